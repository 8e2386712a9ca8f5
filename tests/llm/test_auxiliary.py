"""The auxiliary LLM on scripted chat models: what it makes of replies, and what it does where they fail."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_chat import Scripted

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.llm.request import Reply, Request
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
        (SINGLE, SUMMARY["evidence"][:1], by_option.replace("Ana says A she quit .", "nothing was said to it")),
        (DIRECT, direct, "Evidence:\n- She says so.\n- Twice."),
    ):
        llm = chat("summary", {**SUMMARY, "evidence": evidence})
        expected = f"Understanding: It asks what ended.\n{lines}\nConclusion: She stopped smoking."
        assert llm.summaries([state(question)]) == [expected]
