"""`remind.answer` and `remind answer` against an evaluation of the same questions from x0."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import run_module

import remind
from remind.ask import AnswerConfig, Answering
from remind.core.errors import ConfigError
from remind.core.files import write_rows
from remind.data.dialogue import Corpus, Dialogue, Image, Session, Turn
from remind.data.sample import sample_path
from remind.evaluation.answerers import FixedAnswers
from remind.evaluation.predictions import PREDICTIONS, read_rows
from remind.models.generate import Generation


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """A dialogue with questions of every format."""
    whole = remind.read(sample_path() / "train.jsonl")
    dialogue, questions = next(whole.by_dialogue())
    chosen = {question.format: question for question in questions}.values()
    return Corpus((dialogue,), tuple(replace(question, split="test") for question in chosen))


def test_it_says_what_an_evaluation_from_x0_says(corpus: Corpus, tmp_path: Path) -> None:
    states = remind.build_states(corpus, backbone="nano", levels=("x0",), out=tmp_path / "states", abstention=True)
    remind.evaluate("nano", tmp_path / "states", out=tmp_path / "run", max_new_tokens=24, bootstrap=20)
    rows = {row["question_id"]: row for _, row in read_rows(tmp_path / "run" / PREDICTIONS, "an output")}
    model = Answering(AnswerConfig("nano", "", max_new_tokens=24, cache=None))
    for record in states["test"]:
        question = next(one for one in corpus.questions if one.id == record["question_id"])
        found = model.answer(corpus.dialogues[0], question)
        assert found.prompt == record["x0"]["text"]
        assert found.output == rows[question.id]["text"]
        assert (found.text, sorted(found.letters)) == (rows[question.id]["answer"], rows[question.id]["letters"])


def test_it_names_the_turns_that_are_quoted(corpus: Corpus) -> None:
    [dialogue] = corpus.dialogues
    told = dialogue.turns[1]
    reply = f"<answer>so</answer><explanation>- {told.speaker}: {told.text}\nAna: nobody said this</explanation>"
    fixed = FixedAnswers("fixed", Generation(reply, 0, finished=True))
    found = remind.answer(fixed, dialogue, "What was said?", cache=None)
    assert found.cited == tuple(name for name in found.turns if dialogue.turn(name) == told)
    assert remind.answer(fixed, dialogue, f"Who said: {told.text}", cache=None).cited == (told.id,)


def test_few_words_cite_no_other_turn() -> None:
    said = [
        ("Ana", "I sold the piano."),
        ("Ana", "I"),
        ("Ben", "Yes"),
        ("Ana", ""),
        ("Ben", "Yes, we should meet on Monday."),
    ]
    image = (Image(0, None, "keys"),)
    turns = [Turn(f"t{n}", who, text, None, () if text else image) for n, (who, text) in enumerate(said)]
    dialogue = Dialogue("d", (Session("s", None, tuple(turns)),))

    def cited(*lines: str) -> tuple[str, ...]:
        reply = f"<answer>so</answer><explanation>{chr(10).join(lines)}</explanation>"
        return remind.answer(
            FixedAnswers("fixed", Generation(reply, 0, finished=True)), dialogue, "What?", cache=None
        ).cited

    assert cited("Ana: I sold the piano.", "Ben: Yes, we should meet on Monday.") == ("t0", "t4")
    assert cited("yes", "a", "None") == ("t2",)
    assert cited("1. Ben: Yes") == ("t2",)
    assert cited("I sold the piano", '"we should meet on Monday"') == ("t0", "t4")
    assert cited("we should meet on Monday", "As Ana said: I sold the piano. That is all.") == ("t0", "t4")


def test_the_command_answers_what_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = tmp_path / "chat.jsonl"
    write_rows(chat, [{"speaker": "Ana", "text": "I drink tea.", "time": "2024-03-01"}])
    words = ("answer", "--model", "nano", "--input", str(chat), "--max_new_tokens", "4", "--cache", str(tmp_path / "c"))
    monkeypatch.setattr("sys.stdin", io.StringIO("Who drinks tea?\n\nAnd Ben?\n"))
    status, typed, _ = run_module("remind", *words)
    assert status == 0
    assert "S1:T1 (2024-03-01)  Ana: I drink tea." in typed
    assert run_module("remind", *words, "--ask", "Who drinks tea?", "--ask", "And Ben?")[1] == typed


def test_bad_input_is_one_line(corpus: Corpus, tmp_path: Path) -> None:
    rows = [{"dialogue": name, "speaker": "Ana", "text": "Hello."} for name in ("first", "second")]
    write_rows(tmp_path / "two.jsonl", rows)
    for words, said in ((), "--dialogue"), (("--dialogue", "third"), "no dialogue 'third'"):
        path = str(tmp_path / "two.jsonl")
        status, _, errors = run_module("remind", "answer", "--model", "nano", "--input", path, "--ask", "Who?", *words)
        assert status == 2
        assert said in errors
        assert errors.count("\n") == 1
    with pytest.raises(ConfigError, match="no setting 'limit'"):
        remind.answer("nano", corpus.dialogues[0], "Who?", limit=2)
