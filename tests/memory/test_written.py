"""MemAgent and MEM1, played by a script: what is read and searched, what is kept of it, and the number of calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import ScriptedChat, parts, services, session

from remind.core.errors import DataError
from remind.llm.request import Request
from remind.memory.base import Query
from remind.memory.trained import Mem1System, MemAgentSystem
from remind.models.encoder import SentenceEncoder

FIRST = session("s1", "2023-05-08", "Ann: I have a cat.", "Bob: I live in Rome.", "Ann: The cat is called Tom.")
LATER = session("s2", "2023-06-01", "Bob: The weather is fine.", "Ann: Tom the cat ran away.")
QUESTION = Query("What is the name of the cat?", "q", "2023-07-01", "single", ("Tom", "Jerry"))


def noter(request: Request) -> str:
    """Keeps the lines on the cat."""
    shown = parts(request)
    lines = [line for line in shown["section"].splitlines() if "cat" in line]
    return "<think>hm</think>" + "\n".join(filter(None, [shown.get("memory", ""), *lines]))


@pytest.mark.parametrize("chunk", [1, 20, 5000])
def test_memagent_reads_the_whole_dialogue_in_chunks(chunk: int, encoder: SentenceEncoder, tmp_path: Path) -> None:
    chat = ScriptedChat(noter)
    with MemAgentSystem(chunk=chunk).open(tmp_path, "d", services(encoder, chat)) as bank:
        bank.ingest(FIRST)
        bank.ingest(LATER)
        assert not chat.asked
        found = bank.retrieve(QUESTION, k=5)
        (memory,) = found.memories
        assert memory.text == "Ann: I have a cat.\nAnn: The cat is called Tom.\nAnn: Tom the cat ran away."
        assert memory.sources is None
        assert len(chat.asked) == len(found.trace["memories"]) == {1: 5, 5000: 1}.get(chunk, len(chat.asked))
        read = "\n".join(parts(request)["section"] for request in chat.asked)
        assert [line for line in read.splitlines() if line[0] != "["] == [
            f"{turn.speaker}: {turn.text}" for turn in (*FIRST.turns, *LATER.turns)
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
        bank.ingest(FIRST)
        bank.ingest(LATER)
        found = bank.retrieve(QUESTION, k=1)
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
        bank.ingest(FIRST)
        bank.retrieve(QUESTION, k=1)
    asked = [[(one.role, one.text) for one in request.messages] for request in notes.asked]
    assert asked[0] == [
        ("user", f"On {QUESTION.asked}\nwith No previous memory: [2023-05-08]\nAnn: I have a cat. {{x}}")
    ]
    assert asked[1][0][1].splitlines()[4] == "with Tom: Bob: I live in Rome."
    says = iter(["<think>a</think><search>the cat</search>?", "<think>b</think><answer>Tom</answer>"])
    chat = ScriptedChat(lambda request: next(says))
    system = Mem1System(top=1, prompts=str(searches))
    with system.open(tmp_path / "b", "d", services(encoder, chat)) as bank:
        bank.ingest(FIRST)
        (memory,) = bank.retrieve(QUESTION, k=1).memories
    first, last = ([(one.role, one.text) for one in request.messages] for request in chat.asked)
    assert first == last[:1] == [("user", f"Use <search> after </think>. {QUESTION.asked}")]
    hint, found = "[HINT]You have 5 turns left.[/HINT]", "[2023-05-08] Ann: I have a cat."
    said = f"<think>a</think><search>the cat</search><information>\n{hint}\n{found}\n</information>"
    assert last[1:] == [("assistant", said)]
    assert memory.text == "b\nAnswer: Tom"
    assert system.about()["degraded"] == [] != Mem1System().about()["degraded"]
    with pytest.raises(DataError, match=r"recurrent\.py: holds no prompt with {question}, <search>, </think>"):
        Mem1System(prompts=str(reads)).about()
