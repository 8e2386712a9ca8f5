"""Systems that a chat model writes for, each played by a script: what is kept, where it comes from, and the calls."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedChat, dump, held, opened, parts, services, session

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

# MemAgent and MEM1, played by a script: what is read and searched, what is kept of it, and the number of calls.


TRAINED_FIRST = session("s1", "2023-05-08", "Ann: I have a cat.", "Bob: I live in Rome.", "Ann: The cat is called Tom.")
TRAINED_LATER = session("s2", "2023-06-01", "Bob: The weather is fine.", "Ann: Tom the cat ran away.")
TRAINED_QUESTION = Query("What is the name of the cat?", "q", "2023-07-01", "single", ("Tom", "Jerry"))


def noter(request: Request) -> str:
    """Keeps the lines on the cat."""
    shown = parts(request)
    lines = [line for line in shown["section"].splitlines() if "cat" in line]
    return "<think>hm</think>" + "\n".join(filter(None, [shown.get("memory", ""), *lines]))


@pytest.mark.parametrize("chunk", [1, 20, 5000])
def test_memagent_reads_the_whole_dialogue_in_chunks(chunk: int, encoder: SentenceEncoder, tmp_path: Path) -> None:
    chat = ScriptedChat(noter)
    with MemAgentSystem(chunk=chunk).open(tmp_path, "d", services(encoder, chat)) as bank:
        bank.ingest(TRAINED_FIRST)
        bank.ingest(TRAINED_LATER)
        assert not chat.asked
        found = bank.retrieve(TRAINED_QUESTION, k=5)
        (memory,) = found.memories
        assert memory.text == "Ann: I have a cat.\nAnn: The cat is called Tom.\nAnn: Tom the cat ran away."
        assert memory.sources is None
        assert len(chat.asked) == len(found.trace["memories"]) == {1: 5, 5000: 1}.get(chunk, len(chat.asked))
        read = "\n".join(parts(request)["section"] for request in chat.asked)
        assert [line for line in read.splitlines() if line[0] != "["] == [
            f"{turn.speaker}: {turn.text}" for turn in (*TRAINED_FIRST.turns, *TRAINED_LATER.turns)
        ]
        assert all(encoder.count_tokens(parts(request)["section"]) <= max(chunk, 20) for request in chat.asked)
        assert parts(chat.asked[0])["problem"].splitlines()[::3] == ["Asked on: 2023-07-01", "B. Jerry"]


def seeker(request: Request) -> str:
    """Searches for the cat, then for its end, then answers."""
    shown = parts(request)
    if "state" not in shown:
        return "<think>I know nothing.</think><search>What is the cat called?</search>"
    if "ran away" not in shown.get("found", ""):
        assert "Tom" in shown["found"]
        return "<think>The cat is called Tom.</think><search>the cat ran away</search><answer>no</answer>"
    return f"<think>{shown['state']} It ran away.</think><answer>Tom</answer>"


def test_mem1_carries_its_state_from_search_to_search(encoder: SentenceEncoder, tmp_path: Path) -> None:
    chat = ScriptedChat(seeker)
    with Mem1System(top=1).open(tmp_path, "d", services(encoder, chat)) as bank:
        bank.ingest(TRAINED_FIRST)
        bank.ingest(TRAINED_LATER)
        found = bank.retrieve(TRAINED_QUESTION, k=1)
        (memory,) = found.memories
        assert memory.text == "The cat is called Tom. It ran away.\nAnswer: Tom"
        assert memory.sources == ("s1:3", "s2:2")
        assert found.trace == {"searches": ["What is the cat called?", "the cat ran away"], "answer": "Tom"}
        assert len(chat.asked) == 3
        assert parts(chat.asked[1])["found"] == "[2023-05-08] Ann: The cat is called Tom."


def test_checkpoints_get_the_prompts_they_were_trained_on(tmp_path: Path, encoder: SentenceEncoder) -> None:
    """Read from the authors' files, of which nothing is run; what MEM1 wrote last begins its next turn."""
    reads, searches = tmp_path / "recurrent.py", tmp_path / "data.py"
    reads.write_text('import verl\nOTHER = "{prompt}"\nTEMPLATE = """On {prompt}\nwith {memory}: {chunk} {x}"""\n')
    searches.write_text('def make(question):\n    return f"""Use <search> after </think>. {question}"""\n')
    notes = ScriptedChat(lambda request: "Tom")
    with MemAgentSystem(chunk=20, prompts=str(reads)).open(tmp_path / "a", "d", services(encoder, notes)) as bank:
        bank.ingest(TRAINED_FIRST)
        bank.retrieve(TRAINED_QUESTION, k=1)
    asked = [[(one.role, one.text) for one in request.messages] for request in notes.asked]
    assert asked[0] == [
        ("user", f"On {TRAINED_QUESTION.asked}\nwith No previous memory: [2023-05-08]\nAnn: I have a cat. {{x}}")
    ]
    assert asked[1][0][1].splitlines()[4] == "with Tom: Bob: I live in Rome."
    says = iter(["<think>a</think><search>the cat</search>?", "<think>b</think><answer>Tom</answer>"])
    chat = ScriptedChat(lambda request: next(says))
    system = Mem1System(top=1, prompts=str(searches))
    with system.open(tmp_path / "b", "d", services(encoder, chat)) as bank:
        bank.ingest(TRAINED_FIRST)
        (memory,) = bank.retrieve(TRAINED_QUESTION, k=1).memories
    first, last = ([(one.role, one.text) for one in request.messages] for request in chat.asked)
    assert first == last[:1] == [("user", f"Use <search> after </think>. {TRAINED_QUESTION.asked}")]
    hint, found = "[HINT]You have 5 turns left.[/HINT]", "[2023-05-08] Ann: I have a cat."
    said = f"<think>a</think><search>the cat</search><information>\n{hint}\n{found}\n</information>"
    assert last[1:] == [("assistant", said)]
    assert memory.text == "b\nAnswer: Tom"
    assert system.about()["degraded"] == [] != Mem1System().about()["degraded"]
    with pytest.raises(DataError, match=r"recurrent\.py: holds no prompt with {question}, <search>, </think>"):
        Mem1System(prompts=str(reads)).about()


# A-Mem, played by a script: notes, links, evolution, and the number of calls.


LINES = ("Ann: I have a cat.", "Bob: I live in Rome.", "Ann: The cat is called Tom.")
SESSION = session("s1", "2023-05-08", *LINES)
NOTE = {"keywords": ["w"], "context": "About it.", "tags": ["t"]}


def amem_scribe(request: Request) -> str:
    """Links notes on the cat, and gives the older one another context."""
    if request.stage == "summaries":
        return json.dumps(NOTE)
    if request.stage == "read":
        return '{"keywords": ["cat", "name"]}'
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


def text(said: str, context: str = "About it.", keywords: str = "w", tags: str = "t") -> str:
    return f"{said}\nContext: {context}\nKeywords: {keywords}\nTags: {tags}"


def test_notes_links_and_calls(tmp_path: Path) -> None:
    chat = ScriptedChat(amem_scribe)
    with opened(AMemSystem(), tmp_path / "b", chat) as memory:
        memory.ingest(SESSION)
        assert chat.stages() == ["summaries", "update"] * 3
        assert held(memory) == {
            text(LINES[0], "Tom.", tags="pet"): ("s1:1",),
            text(LINES[1]): ("s1:2",),
            text(LINES[2], tags="pets"): ("s1:3",),
        }
        first, _, last = memory.store.numbers()
        assert memory.store.note(last)["links"] == [first], "the id that is no neighbour's is left out"


# GAM, played by a script: pages, the rounds of research, where the notes come from, and the number of calls.


SESSIONS = (
    session("s1", "2023-05-08", "Ann: I have a cat called Tom.", "Bob: How nice."),
    session("s2", "2023-06-01", "Bob: I live in Rome.", "Ann: The weather is fine."),
    session("s3", None, "Ann: My pet ran away.", "Bob: Oh no."),
)
PLAN = {"info_needs": [], "tools": [], "keyword_collection": [], "vector_queries": [], "page_index": []}


def gam_asks(request: Request) -> str:
    """Name of the template a request was made from."""
    return request.prompt_id.rpartition("-")[0]


def researcher(request: Request) -> str:
    """Looks for the cat by its name, then by what it lacks, and cites the pages that tell of it."""
    shown, template = parts(request), gam_asks(request)
    if template == "gam_page":
        return f"Of {shown['page'].splitlines()[-1].split(':')[0]} and others."
    if template == "gam_plan":
        first = shown["question"].startswith("What became")
        tool = {"tools": ["keyword"], "keyword_collection": ["Tom"]} if first else {"tools": ["vector"]}
        return json.dumps({**PLAN, "vector_queries": [shown["question"]], **tool})
    if template == "gam_integrate":
        pages = [page.split("\n", 1) for page in shown.get("pages", "").split("\n\n") if page]
        told = [line for _, page in pages for line in page.splitlines() if "Tom" in line or "ran away" in line]
        cited = [int(head[5:-1]) for head, page in pages if "Tom" in page or "ran away" in page]
        return json.dumps({"content": "\n".join(filter(None, [shown.get("notes"), *told])), "sources": [*cited, 77]})
    if template == "gam_check":
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
        assert [gam_asks(request) for request in chat.asked[3:]] == [
            *("gam_plan", "gam_integrate", "gam_check", "gam_ask"),
            *("gam_plan", "gam_integrate", "gam_check"),
        ]
        assert [part["pages"] for part in found.trace["rounds"]] == [[0], [2]]


# LightMem, played by a script: buffers, facts and their turns, updates at the end, and the number of calls.


LIGHTMEM_FIRST = session(
    "s1", "2023-05-08", "Ann: I have a cat.", "Bob: Hm.", "Ann: The cat is called Tom.", "Bob: I live in Rome."
)
LIGHTMEM_LATER = session("s2", "2023-06-01", "Bob: I moved to Oslo.", "Ann: Hm.")
_REMARK = re.compile(r"^(\d+)\. (?:\[(.*?)\] )?(\w+): (.*)$", re.MULTILINE)


def lightmem_scribe(request: Request) -> str:
    """Takes down every remark but "Hm.", and lets all entries be."""
    if request.stage == "update":
        return '{"action": "ignore", "new_memory": ""}'
    told = [(int(number), f"{who}: {said}") for number, _, who, said in remarks(request) if said != "Hm."]
    return json.dumps({"data": [{"source_id": number, "fact": fact} for number, fact in told]})


def remarks(request: Request) -> list[tuple[str, ...]]:
    return _REMARK.findall(parts(request)["remarks"])


def test_facts_have_the_turns_that_tell_them(tmp_path: Path) -> None:
    chat = ScriptedChat(lightmem_scribe)
    with opened(LightMemSystem(), tmp_path / "b", chat, LIGHTMEM_FIRST, LIGHTMEM_LATER) as memory:
        assert not chat.asked, "what is said fits the buffers"
        memory.finish()
        assert held(memory) == {
            "Ann: I have a cat.": ("s1:1",),
            "Ann: The cat is called Tom.": ("s1:3",),
            "Bob: I live in Rome.": ("s1:4",),
            "Bob: I moved to Oslo.": ("s2:1",),
        }
        assert chat.stages().count("extract") == 1
        assert [remark[:2] for remark in remarks(chat.asked[0])][3:5] == [("3", "2023-05-08"), ("4", "2023-06-01")]
        (found,) = memory.retrieve(Query("What is the name of the cat?"), k=1).memories
        assert (found.text, found.time) == ("Ann: The cat is called Tom.", "2023-05-08")
        asked, before = len(chat.asked), dump(memory)
        memory.finish()
        assert (len(chat.asked), dump(memory)) == (asked, before)


TALES = session("s1", None, "Ann: I live in Rome.", "Ann: I live in Rome, in Via Appia.", "Ann: I live in Oslo.")


def editor(request: Request) -> str:
    """Brings the first entry up to date by the second, removes the second for the third."""
    if request.stage == "extract":
        return lightmem_scribe(request)
    entry = parts(request)["entry"]
    if "Appia" in entry:
        return '{"action": "delete", "new_memory": ""}'
    return json.dumps({"action": "update", "new_memory": "Ann: My house stands in Via Appia."})


def test_entries_are_brought_up_to_date_by_later_ones(tmp_path: Path) -> None:
    chat = ScriptedChat(editor)
    with opened(LightMemSystem(update_at=0.3), tmp_path / "b", chat, TALES) as memory:
        memory.finish()
        shown = [parts(request) for request in chat.asked if request.stage == "update"]
        assert [(one["entry"], {*one["later"].splitlines()}) for one in shown] == [
            ("Ann: I live in Rome.", {"Ann: I live in Rome, in Via Appia.", "Ann: I live in Oslo."}),
            ("Ann: I live in Rome, in Via Appia.", {"Ann: I live in Oslo."}),
        ], "each is shown with later ones alone, as they were before; the last one has none"
        assert held(memory) == {
            "Ann: My house stands in Via Appia.": ("s1:1", "s1:2", "s1:3"),
            "Ann: I live in Oslo.": ("s1:3",),
        }


# MemoryOS, played by a script: pages, segments, heat, what is learned from them, and the number of calls.


MEMORYOS_FIRST = session(
    "s1",
    "2023-05-08",
    *("Ann: My cat is called Tom.", "Bob: A fine name for a cat."),
    *("Ann: The cat sleeps all day.", "Bob: Cats do."),
    *("Ann: I moved to Rome.", "Bob: Is it warm in Rome?"),
)
MEMORYOS_LATER = session("s2", "2023-06-01", "Ann: The cat ran away.", "Bob: Oh no.", "Ann: Hm.", "Bob: Hm.")
MEMORYOS_QUESTION = Query("Which name does the cat of Ann have?", "q")


def memoryos_asks(request: Request) -> str:
    """Name of the template a request was made from, without the system's."""
    return request.prompt_id.rpartition("-")[0].removeprefix("memoryos_")


def subject(text: str) -> str:
    return "Cats." if "cat" in text.lower() else "Rome, the town." if "Rome" in text else "Nothing."


def memoryos_scribe(request: Request) -> str:
    """Files by what is spoken of, and takes down the names."""
    shown, kind = parts(request), memoryos_asks(request)
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


def test_pages_leave_the_queue_for_segments(tmp_path: Path) -> None:
    chat = ScriptedChat(memoryos_scribe)
    with opened(MemoryOSSystem(short=1), tmp_path / "b", chat, MEMORYOS_FIRST, MEMORYOS_LATER) as memory:
        assert kept(memory, "segment") == {
            "Cats.": ("s1:1", "s1:2", "s1:3", "s1:4", "s2:1", "s2:2"),
            "Rome, the town.": ("s1:5", "s1:6"),
        }
        assert list(kept(memory, "page").items()) == [
            ("Ann: My cat is called Tom.\nBob: A fine name for a cat.\nOverview: On Cats. More.", ("s1:1", "s1:2")),
            ("Ann: The cat sleeps all day.\nBob: Cats do.\nOverview: On Cats. More.", ("s1:3", "s1:4")),
            ("Ann: I moved to Rome.\nBob: Is it warm in Rome?\nOverview: On Rome, the town.", ("s1:5", "s1:6")),
            ("Ann: The cat ran away.\nBob: Oh no.\nOverview: On Cats.", ("s2:1", "s2:2")),
            ("Ann: Hm.\nBob: Hm.", ("s2:3", "s2:4")),
        ], "an overview holds for all pages that go on with each other"
        assert Counter(map(memoryos_asks, chat.asked)) == {"overview": 4, "topic": 4, "continue": 3}


def test_hot_segments_are_learned_from(tmp_path: Path) -> None:
    chat = ScriptedChat(memoryos_scribe)
    with opened(MemoryOSSystem(short=1, hot=3), tmp_path / "b", chat, MEMORYOS_FIRST, MEMORYOS_LATER) as memory:
        learned = [request for request in chat.asked if request.stage == "extract"]
        assert list(map(memoryos_asks, learned)) == ["profile", "knowledge"]
        assert parts(learned[0])["person"] == "Ann"
        assert parts(learned[0])["exchanges"].count("\n\n") == 1, "two pages and recency make a heat of 3"
        told = ("s1:1", "s1:2", "s1:3", "s1:4")
        assert kept(memory, "profile") == {"Ann has a cat.": told}
        assert kept(memory, "knowledge") == {"The cat of Ann is called Tom.": told, "Bob knows cats.": told}
        # the third page on cats is one that is not learned from
        cats = memory.store.note(next(n for n in memory.store.numbers() if memory.store.memory(n).text == "Cats."))
        assert (len(cats["pages"]), len(cats["fresh"])) == (3, 1)
        assert memory.retrieve(MEMORYOS_QUESTION, k=99).memories[-1].kind == "profile"


# MemGPT, played by a script: what its tools do to the memory, how it answers, and the number of calls.


TALK = session(
    "s1", "2023-05-08", "Ann: I have a cat.", "Bob: I live in Rome.", "Ann: The cat is called Tom.", "Bob: Hm."
)
MEMGPT_FACTS = {
    "I have a cat": "Ann has a cat.",
    "called Tom": "The cat of Ann is called Tom.",
    "in Rome": "Bob lives in Rome.",
}
MEMGPT_QUESTION = Query("What is the name of the cat?", "q")


def says(*calls: tuple[Any, Any], text: Any = None) -> str:
    """A completion with calls of tools: name, and arguments as JSON or as they are."""
    made = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for number, (name, given) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}
    return json.dumps(completion("m", message, "stop", 10, 5))


def told(request: Request) -> list[str]:
    """What the tools of the last call replied."""
    messages = (request.body or {})["messages"]
    last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    return [message["content"] for message in messages[last + 1 :]]


def seen(request: Request) -> str:
    return str((request.body or {})["messages"][1]["content"])


def memgpt_scribe(request: Request) -> str:
    """Writes down each fact, and of Ann in core memory; answers from what a search brings."""
    results = told(request)
    if request.stage == "update":
        calls = [
            ("archival_memory_insert", {"content": fact})
            for said, fact in MEMGPT_FACTS.items()
            if said in seen(request)
        ]
        if "I have a cat" in seen(request):
            calls.append(("core_memory_append", {"content": "Ann: one cat"}))
        return says(text="done") if results or not calls else says(*calls)
    if not results:
        return says(
            ("conversation_search", {"query": "cat called"}), ("archival_memory_search", {"query": "name of the cat"})
        )
    return says(text="<think>hm</think> Tom" if "called Tom" in results[0] else "nobody")


def test_memories_have_the_batches_that_they_were_written_at(tmp_path: Path) -> None:
    chat = ScriptedChat(memgpt_scribe)
    with opened(MemGPTSystem(batch=2), tmp_path / "b", chat) as memory:
        memory.ingest(TALK)
        assert held(memory) == {
            "Ann: one cat": ("s1:1", "s1:2"),
            "Ann has a cat.": ("s1:1", "s1:2"),
            "Bob lives in Rome.": ("s1:1", "s1:2"),
            "The cat of Ann is called Tom.": ("s1:3", "s1:4"),
            **{f"{turn.speaker}: {turn.text}": (turn.id,) for turn in TALK.turns},
        }
        assert len(chat.asked) == 4
        assert "Ann: one cat" in seen(chat.asked[2]), "the core memory is always seen"


def test_a_question_is_answered_by_searches_and_changes_nothing(tmp_path: Path) -> None:
    chat = ScriptedChat(memgpt_scribe)
    with opened(MemGPTSystem(page=1), tmp_path / "b", chat) as memory:
        memory.ingest(TALK)
        before, asked = dump(memory), len(chat.asked)
        found = memory.retrieve(MEMGPT_QUESTION, k=9)
        assert [(one.kind, one.sources) for one in found.memories] == [
            ("turn", ("s1:3",)),
            ("passage", tuple(turn.id for turn in TALK.turns)),
            ("core", tuple(turn.id for turn in TALK.turns)),
        ]
        assert found.trace["answer"] == "Tom"
        assert len(chat.asked) == asked + 2
        names = {tool["function"]["name"] for tool in (chat.asked[-1].body or {})["tools"]}
        assert names == {"archival_memory_search", "conversation_search"}
        assert dump(memory) == before


# Mem0's four operations, played by a script: what is kept, where it comes from, what is asked, and what goes wrong.


MEM0_FIRST = session("s1", "2023-05-08", "Ann: I have a cat.", "Bob: I live in Rome.", "Ann: The cat is called Tom.")
MEM0_LATER = session("s2", "2023-06-01", "Ann: Tom the cat ran away.", "Bob: I moved to Oslo.")
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
        about = shown.get("person")
        return json.dumps({"facts": [MEM0_FACTS[text] for who, text in said if about in (None, who)]})
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
    with opened(Mem0System(), tmp_path / "b", chat) as memory:
        memory.ingest(MEM0_FIRST)
        assert held(memory) == {
            "Ann has a cat called Tom": ("s1:1", "s1:2", "s1:3"),
            "Bob lives in Rome": ("s1:1", "s1:2"),
        }
        # two speakers in the first batch, one in the second; each has facts, so each is asked twice
        assert chat.stages() == ["extract", "update"] * 3
        first = memory.store.numbers()
        memory.ingest(MEM0_LATER)
        assert held(memory) == {"Bob lives in Oslo": ("s1:1", "s1:2", "s2:1", "s2:2")}
        assert set(memory.store.numbers()) < set(first), "an update keeps its memory's number"
        (found,) = memory.retrieve(Query("Where does Bob live?"), k=3).memories
        assert (found.text, found.time) == ("Bob: Bob lives in Oslo", "2023-06-01")
        assert found.tokens == encoder.count_tokens(found.text)
        events = [operation[0] for entry in memory.store.journal() for operation in entry["operations"]]
        assert events == ["ADD", "ADD", "UPDATE", "DELETE", "UPDATE"]


@pytest.mark.parametrize(
    ("operations", "kept"),
    [
        ([{"id": 0, "text": "new", "event": "UPDATE"}], {"new": ("s1:1", "s2:1")}),
        ([{"id": "9", "text": "new", "event": "UPDATE"}], {"old": ("s1:1",), "new": ("s2:1",)}),
        ([{"id": "0", "text": "new", "event": "NONE"}], {"old": ("s1:1",)}),
        ([{"id": "0", "event": "DELETE"}] * 2, {}),
    ],
)
def test_operations_of_a_reply(operations: Any, kept: Any, encoder: SentenceEncoder, tmp_path: Path) -> None:
    def play(request: Request) -> str:
        if request.stage == "extract":
            return '{"facts": ["fact"]}'
        added = [{"id": "0", "text": "old", "event": "ADD"}]
        return json.dumps({"memory": operations if parts(request).get("entries") else added})

    with opened(Mem0System(), tmp_path / "b", ScriptedChat(play)) as memory:
        memory.ingest(session("s1", None, "Ann: One."))
        memory.ingest(session("s2", None, "Ann: Two."))
        assert held(memory) == kept
