"""The auxiliary LLM on scripted chat models and offline: what it makes of replies, or by rules, and where they fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scripted_chat import Scripted

from remind import read
from remind.core.errors import DataError
from remind.data.dialogue import NO_INFORMATION, Dialogue, Image, Question, Session, Turn
from remind.data.sample import sample_path
from remind.llm.request import Reply, Request
from remind.models.encoder import SentenceEncoder
from remind.perception.auxiliary import ChatLLM, OfflineLLM
from remind.states.pyramid import AttentionalState, FactualState, Segment, Strategy

TURNS = (
    Turn("1:1", "Ana", "I quit smoking in March."),
    Turn("1:2", "Melanie", "Well done!"),
    Turn("1:3", "Melanie", "Here.", None, (Image(0, None, "running shoes beside a misty river"),)),
    Turn("1:4", "Ana", "My sister bought a violin."),
)
TALK = Dialogue("talk", (Session("s1", None, TURNS),))
SEGMENTS = (Segment(0, 0), Segment(1, 2), Segment(3, 3))
SINGLE = Question("q1", "talk", "What did Ana give up?", "single", ("smoking", "music"))
DIRECT = Question("q2", "talk", "When did Mel run?")
STRATEGY = {
    "target_speaker": ["ana"],
    "related_entities": ["cigarettes", "cigarettes", "  "],
    "behavioural_focus": ["giving up\nhabits"],
    "temporal_scope": [],
    "reasoning": ["Look for what stopped.", "Prefer what is said twice."],
}
SUMMARY = {
    "understanding": "It asks what ended.",
    "evidence": [
        {"option": "B", "finding": "Her sister plays."},
        {"option": "A", "finding": "Ana says <answer>A</answer> she quit [ATTENTION 0f0f0f0f]."},
    ],
    "conclusion": "She stopped\nsmoking.",
}


def chat(stage: str, value: Any) -> ChatLLM:
    return ChatLLM({stage: Scripted(lambda request: value)})


def state(question: Question = SINGLE) -> AttentionalState:
    return AttentionalState(FactualState(TALK, question, (Segment(0, 3),), Strategy(("Look.",))), ((0, 0),))


def test_cues_of_all_segments_go_out_together() -> None:
    def answer(request: Request) -> str:
        text = request.messages[1].text
        return "<think>hm\nhm</think>\n Smoking\n ended. " if "smoking" in text else "Shoes. " * 200 * ("shoes" in text)

    model = Scripted(answer)
    llm = ChatLLM({"cues": model})
    cues = llm.cues(TALK, SEGMENTS, "pattern_induction")
    assert [len(batch) for batch in model.batches] == [3]
    # one that never ends is cut
    assert cues[:2] == ["Smoking ended.", " ".join(["Shoes."] * 120)]
    # the last was empty: the stand-in wrote it, and that is told
    assert cues[2] == OfflineLLM().cues(TALK, SEGMENTS[2:], "pattern_induction")[0]
    assert [(one.stage, one.failure) for one in llm.failures] == [("cues", "unusable")]


def written_by(llm: OfflineLLM | ChatLLM, stage: str) -> Any:
    """What an auxiliary LLM writes at a stage."""
    if stage == "cues":
        return llm.cues(TALK, SEGMENTS, None)
    return llm.strategies(TALK, [SINGLE]) if stage == "strategy" else llm.summaries([state()])


FAILED = Reply("", failure="server", message="429 too many")


@pytest.mark.parametrize(
    ("stage", "value", "failure", "word"),
    [
        *((stage, FAILED, "server", "429 too many") for stage in ("cues", "strategy", "summary")),
        ("strategy", {**STRATEGY, "reasoning": [" "]}, "unusable", "reasoning"),
        ("summary", {**SUMMARY, "evidence": [{"option": "C", "finding": "out of range"}]}, "unusable", "evidence"),
    ],
)
def test_the_stand_in_writes_what_failed(stage: str, value: Any, failure: str, word: str) -> None:
    llm = chat(stage, value)
    assert written_by(llm, stage) == written_by(OfflineLLM(), stage)
    assert all((one.stage, one.failure) == (stage, failure) and word in one.message for one in llm.failures)
    row = llm.report()["stages"][stage]
    assert len(llm.failures) == row["asked"] == row["failed"]


def test_kinds_are_asked_of_the_model_that_writes_strategies() -> None:
    kinds = {"q1": {"kind": "belief_modeling"}, "q2": {"kind": "factual"}, "q3": None}
    llm = ChatLLM({"strategy": Scripted(lambda request: kinds[request.sample])})
    # the third reply is no kind: the stand-in's rule decides
    questions = [SINGLE, DIRECT, Question("q3", "talk", "What habit does Mel have?", dimension="temporal_dynamics")]
    assert llm.kinds(questions) == ["belief_modeling", None, "pattern_induction"]


def test_a_strategy_is_read_and_its_speakers_are_checked() -> None:
    llm = chat("strategy", {**STRATEGY, "target_speaker": ["ana", "Mel", "Zoe", "MELANIE"]})
    steps = ("Look for what stopped.", "Prefer what is said twice.")
    expected = Strategy(steps, ("Ana", "Melanie"), ("cigarettes",), ("giving up habits",))
    assert llm.strategies(TALK, [SINGLE, DIRECT]) == [expected] * 2


def test_a_summary_is_laid_out_by_option() -> None:
    by_option = "Evidence by option:\nA. smoking - Ana says A she quit .\nB. music - Her sister plays."
    direct = [{"finding": "She says so."}, {"finding": " "}, {"finding": "Twice."}]
    for question, evidence, lines in (
        (SINGLE, SUMMARY["evidence"], by_option),
        (
            SINGLE,
            [
                {**one, "option": label}
                for one, label in zip(SUMMARY["evidence"], ("Music", "**Option A.**"), strict=True)
            ],
            by_option,
        ),
        (
            SINGLE,
            [
                {**one, "option": label}
                for one, label in zip(SUMMARY["evidence"], ("B: music", "A. smoking"), strict=True)
            ],
            by_option,
        ),
        (SINGLE, SUMMARY["evidence"][:1], by_option.replace("Ana says A she quit .", "nothing was said to it")),
        (DIRECT, direct, "Evidence:\n- She says so.\n- Twice."),
    ):
        llm = chat("summary", {**SUMMARY, "evidence": evidence})
        expected = f"Understanding: It asks what ended.\n{lines}\nConclusion: She stopped smoking."
        assert llm.summaries([state(question)]) == [expected]


SAID = (
    Turn("1:1", "Ana", "Hey, good to see you! How are you?"),
    Turn("1:2", "Ben", "I quit smoking in March. Since then I always run along the river at dawn."),
    Turn("1:3", "Ana", "Great."),
    Turn("1:4", "Ben", "Here.", None, (Image(0, None, "running shoes beside a misty river"),)),
    Turn("1:5", "Ana", "My sister bought a violin. We never talk about her old one."),
    Turn("1:6", "Ben", "Thanks, bye!"),
)
CHATTER = Dialogue("talk", (Session("s1", None, SAID),))
PARTS = (Segment(0, 1), Segment(2, 3), Segment(4, 5))
OPTIONS = ("runs at dawn by the river", "his sister bought a violin", "collects stamps")
HABIT = Question("q", "talk", "What is Ben's habit?", "single", OPTIONS, dimension="belief_modeling")


def extract(question: Question, *blocks: tuple[int, int], llm: OfflineLLM | None = None) -> str:
    factual = FactualState(CHATTER, question, (Segment(0, 5),), Strategy(()))
    return (llm or OfflineLLM()).summaries([AttentionalState(factual, blocks or ((1, 1), (4, 4)))])[0]


def test_cues_keep_what_tells_and_drop_small_talk() -> None:
    first, second, third = OfflineLLM().cues(CHATTER, PARTS, None)
    assert [text in first for text in ("Ben: I quit smoking in March.", "How are you")] == [True, False]
    assert "misty river" in second
    assert [text in third for text in ("violin", "bye")] == [True, False]
    with pytest.raises(DataError, match="unknown dimension"):
        OfflineLLM().cues(CHATTER, PARTS, "mood")


def test_the_kind_of_a_question_is_read_from_its_words() -> None:
    """Four of five of the sample's questions, none of which the rule was given a dimension of; facts stay facts."""
    questions = read(sample_path()).questions
    found = OfflineLLM().kinds([replace(question, dimension=None) for question in questions])
    right = [name == question.dimension for name, question in zip(found, questions, strict=True)]
    assert sum(right) / len(right) > 0.8
    facts = ("Where was Ana born?", "When did Ben quit smoking?", "Who bought a violin?", "")
    assert OfflineLLM().kinds([Question("q", "talk", text) for text in facts]) == [None] * 4


def test_summaries_quote_marked_turns_only() -> None:
    assert ["violin" in extract(HABIT, (4, 5)), "smoking" in extract(HABIT, (4, 5))] == [True, False]
    direct = extract(Question("q", "talk", "When did Ben quit smoking?")).splitlines()[-1]
    assert direct.startswith("Conclusion: the answer most likely rests on Ben: I quit smoking in March.")
    # meaning, where no word is shared
    jogs = replace(HABIT, options=("jogs early in the morning", "owns a string instrument"))
    assert "A. jogs early in the morning - Ben: I quit smoking" in extract(jogs, llm=OfflineLLM(SentenceEncoder()))


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
