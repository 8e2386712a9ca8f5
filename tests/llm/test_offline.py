from __future__ import annotations

from dataclasses import replace

import pytest

from remind import read
from remind.core.errors import DataError
from remind.data.dialogue import DIMENSIONS, NO_INFORMATION, Dialogue, Image, Question, Session, Turn
from remind.data.sample import sample_path
from remind.llm.auxiliary import OfflineLLM
from remind.models.encoder import SentenceEncoder
from remind.states.pyramid import AttentionalState, FactualState, Segment, Strategy, blind, blind_state

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


def state(question: Question, blocks: tuple[tuple[int, int], ...] = ((1, 1), (4, 4))) -> AttentionalState:
    return AttentionalState(FactualState(TALK, question, (Segment(0, 5),), Strategy(())), blocks)


def options(**fields: object) -> Question:
    texts = ("runs at dawn by the river", "plays the violin at weddings", "collects stamps")
    return Question("q", "talk", "What is Ben's habit?", "single", texts, **fields)  # type: ignore[arg-type]


def test_cues_keep_what_tells_and_drop_small_talk() -> None:
    first, second, third = OfflineLLM().cues(TALK, SEGMENTS, None)
    assert "Ben: I quit smoking in March." in first
    assert "How are you" not in first
    assert "misty river" in second
    assert "violin" in third
    assert "bye" not in third
    talk = Dialogue("d", (Session("s", None, (Turn("1", "Ana", "Ok!"), Turn("2", "Ben", ""))),))
    assert OfflineLLM().cues(talk, [Segment(0, 0), Segment(1, 1)], DIMENSIONS[0]) == ["Ana: Ok!", "Ben"]
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


def test_summary_quotes_marked_turns_only() -> None:
    text = OfflineLLM().summaries([state(options(), blocks=((4, 5),))])[0]
    assert "violin" in text
    assert "smoking" not in text
    assert "misty" not in text
    assert "marked" not in OfflineLLM().summaries([state(options(), blocks=())])[0]
    text = OfflineLLM().summaries([state(Question("q", "talk", "When did Ben quit smoking?"))])[0]
    assert text.splitlines()[-1].startswith("Conclusion: the answer most likely rests on Ben: I quit smoking in March.")
    texts = ("runs at dawn along the river", "his sister bought a violin", "collects stamps")
    question = replace(options(), format="multi", options=texts)
    assert (
        OfflineLLM().summaries([state(question)])[0].splitlines()[-1]
        == "Conclusion: the marked turns bear most on A, B."
    )


def test_the_encoder_sees_meaning_where_no_word_is_shared() -> None:
    encoder = SentenceEncoder()
    question = Question("q", "talk", "Which one?", "single", ("jogs early in the morning", "owns a string instrument"))
    text = OfflineLLM(encoder).summaries([state(question)])[0]
    assert "A. jogs early in the morning - Ben: I quit smoking" in text
    assert text == OfflineLLM(encoder).summaries([state(question)])[0]


def test_gold_changes_nothing() -> None:
    shown = options(dimension="belief_modeling")
    gold = replace(shown, answers=("B",), evidence=("1:5",), images=(0,), category=5, split="train")
    llm = OfflineLLM()
    assert llm.summaries([state(gold)])[0] == llm.summaries([state(shown)])[0]
    assert llm.strategies(TALK, [gold]) == llm.strategies(TALK, [shown])
    assert blind(gold) == shown
    assert blind_state(state(gold)) == state(shown)


@pytest.mark.parametrize(
    ("reference", "prediction", "expected"),
    [
        ("Sweden", "sweden.", True),
        ("four years", "4 years", True),
        ("7 May 2023", "8 May 2023", False),
        (NO_INFORMATION, "It is not mentioned in the conversation", True),
    ],
)
def test_judge_follows_its_rule(reference: str, prediction: str, expected: bool) -> None:
    cases = [("?", [reference], prediction), ("?", ["zzz", reference], prediction), ("?", [], prediction)]
    assert [one.value for one in OfflineLLM().verdicts(cases)] == [expected, expected, False]
