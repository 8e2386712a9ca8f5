from __future__ import annotations

from dataclasses import replace

import pytest

from remind import read
from remind.core.errors import DataError
from remind.data.dialogue import NO_INFORMATION, Dialogue, Image, Question, Session, Turn
from remind.data.sample import sample_path
from remind.models.encoder import SentenceEncoder
from remind.perception.auxiliary import OfflineLLM
from remind.states.pyramid import AttentionalState, FactualState, Segment, Strategy

TURNS = (
    Turn("1:1", "Ana", "Hey, good to see you! How are you?"),
    Turn("1:2", "Ben", "I quit smoking in March. Since then I always run along the river at dawn."),
    Turn("1:3", "Ana", "Great."),
    Turn("1:4", "Ben", "Here.", None, (Image(0, None, "running shoes beside a misty river"),)),
    Turn("1:5", "Ana", "My sister bought a violin. We never talk about her old one."),
    Turn("1:6", "Ben", "Thanks, bye!"),
)
TALK = Dialogue("talk", (Session("s1", None, TURNS),))
SEGMENTS = (Segment(0, 1), Segment(2, 3), Segment(4, 5))
OPTIONS = ("runs at dawn by the river", "his sister bought a violin", "collects stamps")
HABIT = Question("q", "talk", "What is Ben's habit?", "single", OPTIONS, dimension="belief_modeling")


def summary(question: Question, *blocks: tuple[int, int], llm: OfflineLLM | None = None) -> str:
    factual = FactualState(TALK, question, (Segment(0, 5),), Strategy(()))
    return (llm or OfflineLLM()).summaries([AttentionalState(factual, blocks or ((1, 1), (4, 4)))])[0]


def test_cues_keep_what_tells_and_drop_small_talk() -> None:
    first, second, third = OfflineLLM().cues(TALK, SEGMENTS, None)
    assert [text in first for text in ("Ben: I quit smoking in March.", "How are you")] == [True, False]
    assert "misty river" in second
    assert [text in third for text in ("violin", "bye")] == [True, False]
    with pytest.raises(DataError, match="unknown dimension"):
        OfflineLLM().cues(TALK, SEGMENTS, "mood")


def test_the_kind_of_a_question_is_read_from_its_words() -> None:
    """Four of five of the sample's questions, none of which the rule was given a dimension of; facts stay facts."""
    questions = read(sample_path()).questions
    found = OfflineLLM().kinds([replace(question, dimension=None) for question in questions])
    right = [name == question.dimension for name, question in zip(found, questions, strict=True)]
    assert sum(right) / len(right) > 0.8
    facts = ("Where was Ana born?", "When did Ben quit smoking?", "Who bought a violin?", "")
    assert OfflineLLM().kinds([Question("q", "talk", text) for text in facts]) == [None] * 4


def test_summaries_quote_marked_turns_only() -> None:
    assert ["violin" in summary(HABIT, (4, 5)), "smoking" in summary(HABIT, (4, 5))] == [True, False]
    direct = summary(Question("q", "talk", "When did Ben quit smoking?")).splitlines()[-1]
    assert direct.startswith("Conclusion: the answer most likely rests on Ben: I quit smoking in March.")
    # meaning, where no word is shared
    jogs = replace(HABIT, options=("jogs early in the morning", "owns a string instrument"))
    assert "A. jogs early in the morning - Ben: I quit smoking" in summary(jogs, llm=OfflineLLM(SentenceEncoder()))


@pytest.mark.parametrize(
    ("reference", "prediction", "expected"),
    [
        ("Sweden", "sweden.", True),
        ("7 May 2023", "8 May 2023", False),
        (NO_INFORMATION, "It is not mentioned in the conversation", True),
    ],
)
def test_judge_follows_its_rule(reference: str, prediction: str, expected: bool) -> None:
    cases = [("?", [reference], prediction), ("?", ["zzz", reference], prediction), ("?", [], prediction)]
    assert [one.value for one in OfflineLLM().verdicts(cases)] == [expected, expected, False]
