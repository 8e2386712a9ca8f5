"""Systems that a chat model writes for, each played by a script: what is kept, where it comes from, and the calls."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat, held, opened, parts, session

from remind.core.errors import DataError
from remind.llm.request import Request, completion
from remind.memory.amem import AMemSystem
from remind.memory.base import Query
from remind.memory.gam import GAMSystem
from remind.memory.lightmem import LightMemSystem
from remind.memory.mem0 import Mem0System
from remind.memory.memgpt import MemGPTSystem
from remind.memory.memoryos import MemoryOSBank, MemoryOSSystem
from remind.memory.trained import Mem1System, MemAgentSystem
from remind.models.encoder import SentenceEncoder

LINES = ("Ann: I have a cat.", "Bob: I live in Rome.", "Ann: The cat is called Tom.")
FIRST = session("s1", "2023-05-08", *LINES)
LATER = session("s2", "2023-06-01", "Ann: Tom the cat ran away.", "Bob: I moved to Oslo.")
QUESTION = Query("What is the name of the cat?", "q", "2023-07-01", "single", ("Tom", "Jerry"))


def template(request: Request) -> str:
    """Name of the template a request was made from."""
    return request.prompt_id.rpartition("-")[0]


# MemAgent and MEM1: what is read and searched, and what is kept of it.


def noter(request: Request) -> str:
    """Keeps the lines on the cat."""
    shown = parts(request)
    lines = [line for line in shown["section"].splitlines() if "cat" in line]
    return "<think>hm</think>" + "\n".join(filter(None, [shown.get("memory", ""), *lines]))


@pytest.mark.parametrize(("chunk", "calls"), [(1, 5), (5000, 1)])
def test_memagent_reads_the_whole_dialogue_in_chunks(chunk: int, calls: int, tmp_path: Path) -> None:
    chat = ScriptedChat(noter)
    with opened(MemAgentSystem(chunk=chunk), tmp_path / "b", chat, FIRST, LATER) as bank:
        assert not chat.asked
        (memory,) = bank.retrieve(QUESTION, k=5).memories
    assert memory.text == "Ann: I have a cat.\nAnn: The cat is called Tom.\nAnn: Tom the cat ran away."
    assert memory.sources is None
    assert len(chat.asked) == calls
    read = "\n".join(parts(request)["section"] for request in chat.asked)
    said = [f"{turn.speaker}: {turn.text}" for turn in (*FIRST.turns, *LATER.turns)]
    assert [line for line in read.splitlines() if line[0] != "["] == said
    assert parts(chat.asked[0])["problem"].splitlines()[::3] == ["Asked on: 2023-07-01", "B. Jerry"]


def seeker(request: Request) -> str:
    """Searches for the cat, then for its end, then answers."""
    shown = parts(request)
    if "state" not in shown:
        return "<think>I know nothing.</think><search>What is the cat called?</search>"
    if "ran away" not in shown.get("found", ""):
        return "<think>The cat is called Tom.</think><search>the cat ran away</search><answer>no</answer>"
    return f"<think>{shown['state']} It ran away.</think><answer>Tom</answer>"


def test_mem1_carries_its_state_from_search_to_search(tmp_path: Path) -> None:
    chat = ScriptedChat(seeker)
    with opened(Mem1System(top=1), tmp_path / "b", chat, FIRST, LATER) as bank:
        found = bank.retrieve(QUESTION, k=1)
    (memory,) = found.memories
    assert memory.text == "The cat is called Tom. It ran away.\nAnswer: Tom"
    assert memory.sources == ("s1:3", "s2:1")
    assert found.trace == {"searches": ["What is the cat called?", "the cat ran away"], "answer": "Tom"}
    assert [parts(request).get("found") for request in chat.asked] == [
        None,
        "[2023-05-08] Ann: The cat is called Tom.",
        "[2023-06-01] Ann: Tom the cat ran away.",
    ]


def test_checkpoints_get_the_prompts_they_were_trained_on(tmp_path: Path) -> None:
    """Read from the authors' files, of which nothing is run; what MEM1 wrote last begins its next turn."""
    reads, searches = tmp_path / "recurrent.py", tmp_path / "data.py"
    reads.write_text('import verl\nOTHER = "{prompt}"\nTEMPLATE = """On {prompt}\nwith {memory}: {chunk} {x}"""\n')
    searches.write_text('def make(question):\n    return f"""Use <search> after </think>. {question}"""\n')
    notes = ScriptedChat(lambda request: "Tom")
    with opened(MemAgentSystem(prompts=str(reads)), tmp_path / "a", notes, FIRST) as bank:
        bank.retrieve(QUESTION, k=1)
    told = "\n".join(LINES)
    assert notes.asked[0].messages[0].text == (
        f"On {QUESTION.asked}\nwith No previous memory: [2023-05-08]\n{told} {{x}}"
    )
    says = iter(["<think>a</think><search>the cat</search>?", "<think>b</think><answer>Tom</answer>"])
    chat, system = ScriptedChat(lambda request: next(says)), Mem1System(top=1, prompts=str(searches))
    with opened(system, tmp_path / "b", chat, FIRST) as bank:
        bank.retrieve(QUESTION, k=1)
    first, last = ([(one.role, one.text) for one in request.messages] for request in chat.asked)
    assert first == last[:1] == [("user", f"Use <search> after </think>. {QUESTION.asked}")]
    hint, found = "[HINT]You have 5 turns left.[/HINT]", "[2023-05-08] Ann: I have a cat."
    said = f"<think>a</think><search>the cat</search><information>\n{hint}\n{found}\n</information>"
    assert last[1:] == [("assistant", said)]
    with pytest.raises(DataError, match=r"recurrent\.py: holds no prompt with {question}, <search>, </think>"):
        Mem1System(prompts=str(reads)).about()


# A-Mem: notes, links, evolution.


def amem_scribe(request: Request) -> str:
    """Links notes on the cat, and gives the older one another context."""
    if request.stage == "summaries":
        return json.dumps({"keywords": ["w"], "context": "About it.", "tags": ["t"]})
    shown = parts(request)
    nearest = [json.loads(line) for line in shown.get("nearest", "").splitlines()]
    cats = [row["id"] for row in nearest if "cat" in row["content"]]
    value = {
        "should_evolve": "cat" in json.loads(shown["note"])["content"] and bool(cats),
        "actions": ["strengthen", "update_neighbor"],
        "suggested_connections": [*cats, 999],
        "tags_to_update": ["pets"],
        "new_context_neighborhood": ["Tom." if row["id"] in cats else row["context"] for row in nearest],
        "new_tags_neighborhood": [["pet"] if row["id"] in cats else row["tags"] for row in nearest],
    }
    return json.dumps(value)


def note(said: str, context: str = "About it.", tags: str = "t") -> str:
    return f"{said}\nContext: {context}\nKeywords: w\nTags: {tags}"


def test_notes_links_and_calls(tmp_path: Path) -> None:
    chat = ScriptedChat(amem_scribe)
    with opened(AMemSystem(), tmp_path / "b", chat, FIRST) as memory:
        assert chat.stages() == ["summaries", "update"] * 3
        assert held(memory) == {
            note(LINES[0], "Tom.", "pet"): ("s1:1",),
            note(LINES[1]): ("s1:2",),
            note(LINES[2], tags="pets"): ("s1:3",),
        }
        first, _, last = memory.store.numbers()
        assert memory.store.note(last)["links"] == [first], "the id that is no neighbour's is left out"


# GAM: pages, the rounds of research, where the notes come from.


SESSIONS = (
    session("s1", "2023-05-08", "Ann: I have a cat called Tom.", "Bob: How nice."),
    session("s2", "2023-06-01", "Bob: I live in Rome.", "Ann: The weather is fine."),
    session("s3", None, "Ann: My pet ran away.", "Bob: Oh no."),
)
PLAN = {"info_needs": [], "tools": [], "keyword_collection": [], "vector_queries": [], "page_index": []}


def researcher(request: Request) -> str:
    """Looks for the cat by its name, then by what it lacks, and cites the pages that tell of it."""
    shown, kind = parts(request), template(request)
    if kind == "gam_page":
        return f"Of {shown['page'].splitlines()[-1].split(':')[0]} and others."
    if kind == "gam_plan":
        first = shown["question"].startswith("What became")
        tool = {"tools": ["keyword"], "keyword_collection": ["Tom"]} if first else {"tools": ["vector"]}
        return json.dumps({**PLAN, "vector_queries": [shown["question"]], **tool})
    if kind == "gam_integrate":
        pages = [page.split("\n", 1) for page in shown.get("pages", "").split("\n\n") if page]
        told = [line for _, page in pages for line in page.splitlines() if "Tom" in line or "ran away" in line]
        cited = [int(head[5:-1]) for head, page in pages if "Tom" in page or "ran away" in page]
        return json.dumps({"content": "\n".join(filter(None, [shown.get("notes"), *told])), "sources": [*cited, 77]})
    if kind == "gam_check":
        return json.dumps({"enough": "ran away" in shown["notes"]})
    return '{"new_requests": ["Did a pet run away?"]}'


def test_pages_and_research(tmp_path: Path) -> None:
    chat = ScriptedChat(researcher)
    with opened(GAMSystem(top=1), tmp_path / "b", chat, *SESSIONS) as memory:
        assert list(held(memory).values()) == [("s1:1", "s1:2"), ("s2:1", "s2:2"), ("s3:1", "s3:2")]
        assert parts(chat.asked[2])["abstracts"] == "Page 0: Of Bob and others.\nPage 1: Of Ann and others."
        found = memory.retrieve(Query("What became of Ann's cat?", "q"), k=1)
    (notes,) = found.memories
    assert notes.text == "Ann: I have a cat called Tom.\nAnn: My pet ran away."
    assert notes.sources == ("s1:1", "s1:2", "s3:1", "s3:2")
    rounds = ["gam_plan", "gam_integrate", "gam_check", "gam_ask", "gam_plan", "gam_integrate", "gam_check"]
    assert list(map(template, chat.asked[3:])) == rounds


# LightMem: buffers, facts and their turns, updates at the end.


TALES = session(
    "s1", "2023-05-08", "Ann: I live in Rome.", "Ann: I live in Rome, in Via Appia.", "Ann: I live in Oslo."
)
_REMARK = re.compile(r"^(\d+)\. \[2023-05-08\] (.*)$", re.MULTILINE)


def editor(request: Request) -> str:
    """Takes down every remark; brings the first entry up to date by the second, removes the second for the third."""
    shown = parts(request)
    if request.stage == "extract":
        told = [{"source_id": int(number), "fact": fact} for number, fact in _REMARK.findall(shown["remarks"])]
        return json.dumps({"data": [*told, {"source_id": 9, "fact": "Nobody said so."}]})
    if "Appia" in shown["entry"]:
        return '{"action": "delete", "new_memory": ""}'
    return json.dumps({"action": "update", "new_memory": "Ann: My house stands in Via Appia."})


def test_entries_are_brought_up_to_date_by_later_ones(tmp_path: Path) -> None:
    chat = ScriptedChat(editor)
    with opened(LightMemSystem(update_at=0.3), tmp_path / "b", chat, TALES) as memory:
        assert not chat.asked, "what is said fits the buffers"
        memory.finish()
        shown = [parts(request) for request in chat.asked if request.stage == "update"]
        assert [len(one["later"].splitlines()) for one in shown] == [2, 1], "later ones alone, as they were before"
        assert held(memory) == {
            "Ann: My house stands in Via Appia.": ("s1:1", "s1:2", "s1:3"),
            "Ann: I live in Oslo.": ("s1:3",),
        }


# MemoryOS: pages, segments, heat, what is learned from them.


MEMORYOS_FIRST = session(
    "s1",
    "2023-05-08",
    *("Ann: My cat is called Tom.", "Bob: A fine name for a cat."),
    *("Ann: The cat sleeps all day.", "Bob: Cats do."),
    *("Ann: I moved to Rome.", "Bob: Is it warm in Rome?"),
)
MEMORYOS_LATER = session("s2", "2023-06-01", "Ann: The cat ran away.", "Bob: Oh no.", "Ann: Hm.", "Bob: Hm.")


def subject(text: str) -> str:
    return "Cats." if "cat" in text.lower() else "Rome, the town." if "Rome" in text else "Nothing."


def memoryos_scribe(request: Request) -> str:
    """Files by what is spoken of, and takes down the names."""
    shown, kind = parts(request), template(request).removeprefix("memoryos_")
    if kind == "continue":
        return json.dumps({"continues": subject(shown["earlier"]) == subject(shown["later"])})
    if kind == "overview":
        return f"{shown['before']} More." if "before" in shown else "<think>hm</think>On " + subject(shown["exchange"])
    if kind == "topic":
        summary = subject(shown["exchange"])
        return json.dumps({"summary": summary, "keywords": [summary.split()[0].strip(".,").lower()]})
    if kind == "profile":
        return "\n".join(filter(None, [shown.get("profile"), f"{shown['person']} has a cat."]))
    if kind == "knowledge":
        user = ["The cat of Ann is called Tom."] if "called Tom" in shown["exchanges"] else []
        return json.dumps({"user": user, "assistant": ["Bob knows cats."]})
    return '{"keywords": ["Cats", "name"]}'


def kept(bank: MemoryOSBank, kind: str) -> dict[str, tuple[str, ...] | None]:
    memories = map(bank.store.memory, bank.store.numbers())
    return {memory.text: memory.sources for memory in memories if memory.kind == kind}


def test_pages_leave_the_queue_for_segments_and_hot_ones_are_learned_from(tmp_path: Path) -> None:
    chat = ScriptedChat(memoryos_scribe)
    with opened(MemoryOSSystem(short=1, hot=3), tmp_path / "b", chat, MEMORYOS_FIRST, MEMORYOS_LATER) as memory:
        assert kept(memory, "segment") == {
            "Cats.": ("s1:1", "s1:2", "s1:3", "s1:4", "s2:1", "s2:2"),
            "Rome, the town.": ("s1:5", "s1:6"),
        }
        overviews = [text.partition("Overview: ")[2] for text in kept(memory, "page")]
        # one holds for all pages that go on with each other; the last page is in the queue
        assert overviews == ["On Cats. More.", "On Cats. More.", "On Rome, the town.", "On Cats.", ""]
        asked = Counter(template(request).removeprefix("memoryos_") for request in chat.asked)
        assert asked == {"overview": 4, "topic": 4, "continue": 3, "profile": 1, "knowledge": 1}
        told = ("s1:1", "s1:2", "s1:3", "s1:4")
        assert kept(memory, "profile") == {"Ann has a cat.": told}
        assert kept(memory, "knowledge") == {"The cat of Ann is called Tom.": told, "Bob knows cats.": told}
        assert memory.retrieve(QUESTION, k=99).memories[-1].kind == "profile"


# MemGPT: what its tools do to the memory, how it answers.


MEMGPT_FACTS = {"I have a cat": "Ann has a cat.", "called Tom": "The cat is called Tom.", "in Rome": "Bob is in Rome."}


def says(*calls: tuple[str, Any], text: Any = None) -> str:
    """A completion with calls of tools: name and arguments."""
    made = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for number, (name, given) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}
    return json.dumps(completion("m", message, "stop", 10, 5))


def seen(request: Request) -> str:
    return str((request.body or {})["messages"][1]["content"])


def memgpt_scribe(request: Request) -> str:
    """Writes down each fact, and of Ann in core memory; answers from what a search brings."""
    results = [message["content"] for message in (request.body or {})["messages"] if message["role"] == "tool"]
    if request.stage == "read":
        query = {"query": "cat called"}
        searches = [("conversation_search", query), ("archival_memory_search", query)]
        return says(text="<think>hm</think> Tom") if results and "called Tom" in results[0] else says(*searches)
    told = [({"content": fact}) for said, fact in MEMGPT_FACTS.items() if said in seen(request)]
    calls = [("archival_memory_insert", fact) for fact in told]
    if "I have a cat" in seen(request):
        calls.append(("core_memory_append", {"content": "Ann: one cat"}))
    return says(text="done") if results else says(*calls)


def test_memories_have_the_batches_that_they_were_written_at(tmp_path: Path) -> None:
    chat = ScriptedChat(memgpt_scribe)
    with opened(MemGPTSystem(batch=2, page=1), tmp_path / "b", chat, FIRST) as memory:
        assert held(memory) == {
            "Ann: one cat": ("s1:1", "s1:2"),
            "Ann has a cat.": ("s1:1", "s1:2"),
            "Bob is in Rome.": ("s1:1", "s1:2"),
            "The cat is called Tom.": ("s1:3",),
            **{line: (turn.id,) for line, turn in zip(LINES, FIRST.turns, strict=True)},
        }
        assert len(chat.asked) == 4
        assert "Ann: one cat" in seen(chat.asked[2]), "the core memory is always seen"
        found = memory.retrieve(QUESTION, k=9)
        assert [(one.kind, one.sources) for one in found.memories] == [
            ("turn", ("s1:3",)),
            ("passage", ("s1:3",)),
            ("core", ("s1:1", "s1:2")),
        ]
        assert found.trace["answer"] == "Tom"
        names = {tool["function"]["name"] for tool in (chat.asked[-1].body or {})["tools"]}
        assert names == {"archival_memory_search", "conversation_search"}


# Mem0's four operations.


#: What a perfect manager takes from each line.
MEM0_FACTS = {
    "I have a cat.": "Ann has a cat",
    "I live in Rome.": "Bob lives in Rome",
    "The cat is called Tom.": "Ann has a cat called Tom",
    "Tom the cat ran away.": "Ann has no cat any more",
    "I moved to Oslo.": "Bob lives in Oslo",
}


def mem0_scribe(request: Request) -> str:
    """Keeps the known facts: a longer one updates, a contradiction deletes, a move updates."""
    shown = parts(request)
    if request.stage == "extract":
        said = [line.split(": ", 1) for line in shown["conversation"].splitlines()]
        return json.dumps({"facts": [MEM0_FACTS[text] for who, text in said if who == shown["person"]]})
    entries = {row["text"]: row["id"] for row in map(json.loads, shown.get("entries", "").splitlines())}
    operations = []
    for fact in map(json.loads, shown["facts"].splitlines()):
        old = {"Ann has a cat called Tom": "Ann has a cat", "Bob lives in Oslo": "Bob lives in Rome"}.get(fact)
        if fact == "Ann has no cat any more":
            operations.append({"id": entries["Ann has a cat called Tom"], "event": "DELETE"})
        elif old in entries:
            operations.append({"id": entries[old], "text": fact, "event": "UPDATE", "old_memory": old})
        else:
            operations.append({"id": str(len(entries)), "text": fact, "event": "ADD"})
    return json.dumps({"memory": operations})


def test_operations_provenance_and_calls(encoder: SentenceEncoder, tmp_path: Path) -> None:
    chat = ScriptedChat(mem0_scribe)
    with opened(Mem0System(), tmp_path / "b", chat, FIRST) as memory:
        assert held(memory) == {
            "Ann has a cat called Tom": ("s1:1", "s1:2", "s1:3"),
            "Bob lives in Rome": ("s1:1", "s1:2"),
        }
        # two speakers in the first batch, one in the second; each has facts, so each is asked twice
        assert chat.stages() == ["extract", "update"] * 3
        memory.ingest(LATER)
        assert held(memory) == {"Bob lives in Oslo": ("s1:1", "s1:2", "s2:1", "s2:2")}
        (found,) = memory.retrieve(Query("Where does Bob live?"), k=3).memories
        assert (found.text, found.time) == ("Bob: Bob lives in Oslo", "2023-06-01")
        assert found.tokens == encoder.count_tokens(found.text)
