"""Scores of whole outputs, who takes part in which average, and the intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from remind.core.errors import DataError
from remind.evaluation.judge import Case, judge_answers
from remind.evaluation.scores import Score, counts, score, summarise
from remind.models.generate import Generation
from remind.states.auxiliary import AuxiliaryLLM
from remind.states.parquet import StateRecord

OUTPUTS = {
    "s1": "<answer>B</answer><explanation>Ana: s1 line 1</explanation>",
    "m1": "<answer>[A]</answer><explanation>Ana: m1 line 1\nAna: m1 line 5</explanation>",
    "v1": "<answer>A</answer><explanation>[1, 4]</explanation>",
    "d1": "<answer>Hiking</answer><explanation></explanation>",
    "d2": "<answer>no information available.</answer>",
}


def encode(lines: list[str]) -> torch.Tensor:
    """Different lines are orthogonal."""
    encode.calls.append(lines)  # type: ignore[attr-defined]
    return torch.eye(100)[[ALL.setdefault(line, len(ALL)) for line in lines]]


ALL: dict[str, int] = {}


@pytest.fixture
def scored(six: list[StateRecord], judge: AuxiliaryLLM) -> dict[str, Score]:
    encode.calls = []  # type: ignore[attr-defined]
    records = [record for record in six if record.split == "test"]
    generations = [
        Generation(OUTPUTS[record.question_id], 10, 5, True)
        if record.question_id in OUTPUTS
        else Generation("", 99, failure="too_long")
        for record in records
    ]
    return {item.record.question_id: item for item in score(records, generations, judge, encode)}


def test_scores_by_hand(scored: dict[str, Score]) -> None:
    s1, m1, v1, d1, d2, m2 = (scored[name] for name in ("s1", "m1", "v1", "d1", "d2", "m2"))
    assert [x.accuracy for x in (s1, m1, v1, d1, d2, m2)] == [1.0, 0.0, 1.0, 1.0, 0.0, None]
    assert (s1.memory_recall_text, m1.memory_recall_text) == (0.5, 1.0)
    assert (v1.memory_recall_text, v1.memory_recall_visual, v1.memory_recall) == (None, 0.5, 0.5)
    assert d1.memory_recall is None  # nothing predicted
    assert (d1.bleu1, d1.f1, d1.locomo_f1) == (1.0, 1.0, 1.0)
    assert (d2.f1, d2.locomo_f1) == (1.0, 1.0)
    assert (s1.bleu1, s1.f1, s1.locomo_f1) == (None, None, None)
    assert [x.evidence_recall for x in (s1, v1, d2, m2)] == [0.5, 0.5, None, 0.5]
    assert m2.failure == "too_long"
    assert m2.memory_recall is None
    assert len(encode.calls) == 1  # type: ignore[attr-defined]
    assert len(set(encode.calls[0])) == len(encode.calls[0])  # type: ignore[attr-defined]


def test_failures_are_apart_from_wrong_answers(scored: dict[str, Score]) -> None:
    row = summarise(list(scored.values()), resamples=50)
    assert (row["n"], row["failed"]) == (6, 1)
    assert (row["accuracy"]["value"], row["accuracy"]["n"]) == (pytest.approx(3 / 5), 5)
    assert (row["accuracy_failures_wrong"]["value"], row["accuracy_failures_wrong"]["n"]) == (0.5, 6)
    assert (row["memory_recall"]["value"], row["memory_recall"]["n"]) == (pytest.approx((0.5 + 1.0 + 0.5) / 3), 3)
    assert row["memory_recall_text"]["n"] == 2
    assert row["evidence_recall"]["n"] == 5
    assert row["bleu1"]["n"] == 2
    total = counts(list(scored.values()))
    assert total["questions"] == 6
    assert total["answered"] == 5
    assert total["failures"] == {"too_long": 1}
    assert (total["without_gold_answer"], total["without_gold_evidence"]) == (0, 1)
    assert total["problems"] == {"no explanation tag": 1}
    assert (total["prompt_tokens"], total["new_tokens"]) == (149, 25)


def test_without_gold_answer_there_is_no_verdict(make_record: Callable[..., StateRecord], judge: AuxiliaryLLM) -> None:
    records = [make_record("a", answers=()), make_record("b", format="single", options=("x", "y"), answers=())]
    done = score(records, [Generation("<answer>A</answer>", 1, 1, True)] * 2, judge, encode)
    assert [(item.accuracy, item.f1, item.failure) for item in done] == [(None, None, None)] * 2
    row = summarise(done)
    assert (row["accuracy"], row["f1"], row["accuracy_failures_wrong"]) == (None, None, None)


def test_locomo_f1_only_for_locomos_categories(make_record: Callable[..., StateRecord], judge: AuxiliaryLLM) -> None:
    records = [
        make_record("a", category="temporal-reasoning"),
        make_record("b", category=2, dimension="belief_modeling"),
        make_record("c", category=2),
    ]
    done = score(records, [Generation("<answer>so</answer>", 1, 1, True)] * 3, judge, encode)
    assert [item.locomo_f1 for item in done] == [None, None, 1.0]
    assert [item.f1 for item in done] == [1.0] * 3


class Moody:
    name = "moody"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def judge(self, question: str, references: tuple[str, ...], prediction: str) -> bool:
        self.asked.append(prediction)
        if prediction == "down":
            raise DataError("the server is away")
        return True


def test_a_judge_that_fails_gives_no_verdict(make_record: Callable[..., StateRecord]) -> None:
    judge = Moody()
    cases = [Case("q", ("r",), text) for text in ("up", "down", " ", "up", "down")]
    assert [ruling.value for ruling in judge_answers(judge, cases)] == [True, None, False, True, None]  # type: ignore[arg-type]
    assert judge.asked == ["up", "down"]
    record = replace(make_record(), evidence_lines=())
    done = score([record], [Generation("down", 1, 1, True)], judge, encode)  # type: ignore[arg-type]
    assert (done[0].failure, done[0].accuracy) == ("judge", None)
    assert done[0].f1 == 0.0
