"""Scores of whole outputs, who takes part in which average, and the intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat

import pytest
import torch

from remind.evaluation.judge import Case, judge_answers
from remind.evaluation.scores import Score, counts, parse_all, score, summarise
from remind.llm.asking import Verdict
from remind.models.generate import Generation
from remind.states.records import StateRecord

OUTPUTS = {
    "s1": "<answer>B</answer><explanation>Ana: s1 line 1</explanation>",
    "m1": "<answer>[A]</answer><explanation>Ana: m1 line 1\nAna: m1 line 5</explanation>",
    "v1": "<answer>A</answer><explanation>[1, 4]</explanation>",
    "d1": "<answer>Hiking</answer><explanation></explanation>",
    "d2": "<answer>no information available.</answer>",
}
ENCODED: list[list[str]] = []


def encode(lines: list[str]) -> torch.Tensor:
    """Different lines are orthogonal."""
    ENCODED.append(lines)
    return torch.eye(len(lines))


def scored(records: list[StateRecord], outputs: list[Generation], *verdicts: bool | None) -> list[Score]:
    """Scores with a ruling for each direct question, by turns."""
    given = iter(verdicts or repeat(None))
    rulings = [Verdict(next(given)) if r.format == "direct" and r.answers else None for r in records]
    return score(records, outputs, parse_all(records, outputs), rulings, encode)


def test_scores_by_hand_and_failures_of_the_model_are_wrong(six: list[StateRecord]) -> None:
    ENCODED.clear()
    records = [record for record in six if record.split == "test"]
    failed = Generation("", 99, failure="too_long")
    texts = [OUTPUTS.get(record.question_id) for record in records]
    scores = scored(records, [failed if text is None else Generation(text, 10, 5, True) for text in texts], True, False)
    s1, m1, v1, d1, d2, m2 = scores
    assert [x.accuracy for x in scores] == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert (s1.memory_recall_text, m1.memory_recall_text) == (0.5, 1.0)
    assert (v1.memory_recall_text, v1.memory_recall_visual, v1.memory_recall) == (None, 0.5, 0.5)
    assert d1.memory_recall is None  # nothing predicted
    assert (d1.bleu1, d1.f1, d1.locomo_f1) == (1.0, 1.0, 1.0)
    assert (d2.f1, d2.locomo_f1) == (1.0, 1.0)
    assert (s1.bleu1, s1.f1, s1.locomo_f1) == (None, None, None)
    assert [x.evidence_recall for x in (s1, v1, d2, m2)] == [0.5, 0.5, None, 0.5]
    assert (m2.failure, m2.memory_recall) == ("too_long", None)
    (lines,) = ENCODED
    assert len(set(lines)) == len(lines)

    row = summarise((one.row() for one in scores), resamples=50)
    assert (row["n"], row["failed"], row["no_verdict"]) == (6, 1, 0)
    assert {name: (row[name]["value"], row[name]["n"]) for name in ("accuracy", "parse_rate")} == {
        "accuracy": (pytest.approx(3 / 6), 6),
        "parse_rate": (pytest.approx(5 / 6), 6),
    }
    assert (row["memory_recall"]["value"], row["memory_recall"]["n"]) == (pytest.approx((0.5 + 1.0 + 0.5) / 3), 3)
    assert [row[name]["n"] for name in ("memory_recall_text", "evidence_recall", "bleu1")] == [2, 5, 2]
    total = counts(scores)
    assert (total["questions"], total["answered"], total["failures"]) == (6, 5, {"too_long": 1})
    assert (total["without_gold_answer"], total["without_gold_evidence"]) == (0, 1)
    assert total["problems"] == {"no explanation tag": 1}
    assert (total["prompt_tokens"], total["new_tokens"]) == (149, 25)


def test_without_gold_answer_there_is_no_verdict(make_record: Callable[..., StateRecord]) -> None:
    records = [make_record("a", answers=()), make_record("b", format="single", options=("x", "y"), answers=())]
    done = scored(records, [Generation("<answer>A</answer>", 1, 1, True)] * 2)
    assert [(item.accuracy, item.f1, item.failure) for item in done] == [(None, None, None)] * 2
    row = summarise(one.row() for one in done)
    assert (row["accuracy"], row["f1"], row["parse_rate"]["value"]) == (None, None, 1.0)


def test_equation_8_over_all_questions_that_have_a_verdict(make_record: Callable[..., StateRecord]) -> None:
    """A row for each way to fail, counted by hand: wrong where the model failed, apart where nobody can tell."""
    single = {"format": "single", "options": ("x", "y"), "answers": ("A",)}
    visual = {"dimension": "topic_scoped_visual_prototypes", "evidence": (), "images": (0,)}
    said = "<answer>{}</answer><explanation>[0]</explanation>"
    cases: list[tuple[StateRecord, Generation, bool | None, float | None, float | None]] = [
        # record, output, verdict; s_i of Eq. 9, and whether an answer could be read
        (make_record("right", **single), Generation(said.format("A"), 1, 1, True), None, 1.0, 1.0),
        (make_record("wrong", **single), Generation(said.format("B"), 1, 1, True), None, 0.0, 1.0),
        (make_record("prose", **single), Generation("I would rather not say.", 1, 1, True), None, 0.0, 0.0),
        (make_record("empty", **single), Generation("", 1, 0, True), None, 0.0, 0.0),
        (make_record("thinking", **single), Generation("Let me see: the", 1, 9, False), None, 0.0, 0.0),
        (make_record("cut", **single), Generation("<answer>A</answer><expl", 1, 9, False), None, 1.0, 1.0),
        (make_record("long", **single, **visual), Generation("", 1, failure="too_long"), None, 0.0, 0.0),
        (make_record("refused"), Generation("", 1, failure="refused"), None, 0.0, 0.0),
        (make_record("invalid"), Generation("", 1, failure="invalid"), None, 0.0, 0.0),
        (make_record("blank"), Generation("<answer> </answer>", 1, 1, True), False, 0.0, 0.0),
        (make_record("accepted"), Generation("so", 1, 1, True), True, 1.0, 1.0),
        (make_record("unjudged"), Generation("so", 1, 1, True), None, None, 1.0),
        (make_record("away"), Generation("", 1, failure="server"), None, None, None),
        (make_record("memory", **single), Generation("", 1, failure="error"), None, None, None),
        (make_record("no gold", answers=()), Generation("so", 1, 1, True), None, None, 1.0),
        (make_record("no gold, refused", answers=()), Generation("", 1, failure="refused"), None, None, 0.0),
    ]
    records, outputs, verdicts, hits, read = zip(*cases, strict=True)
    # as `case_of`: nothing is judged without gold answer or output
    judged = [r.format == "direct" and r.answers and o.failure is None for r, o in zip(records, outputs, strict=True)]
    rulings = [Verdict(verdict) if there else None for verdict, there in zip(verdicts, judged, strict=True)]
    scores = score(records, outputs, parse_all(records, outputs), rulings, encode)
    assert [item.accuracy for item in scores] == list(hits)
    assert [item.parse_rate for item in scores] == list(read)
    row = summarise((one.row() for one in scores), 20)
    assert {name: (row[name]["value"], row[name]["n"]) for name in ("accuracy", "parse_rate")} == {
        "accuracy": (pytest.approx(3 / 11), 11),
        "parse_rate": (pytest.approx(6 / 14), 14),
    }
    assert (row["n"], row["failed"], row["no_verdict"]) == (16, 8, 3)
    by_id = {item.record.question_id: item for item in scores}
    # an empty output: nothing named (Eq. 11), no word in common (Eq. 13, 14), not valid for Eq. 10
    assert by_id["long"].memory_recall == 0.0
    assert (by_id["refused"].f1, by_id["refused"].bleu1, by_id["refused"].memory_recall) == (0.0, 0.0, None)
    assert (by_id["away"].f1, by_id["away"].evidence_recall) == (None, 0.5)


def test_locomo_f1_only_for_locomos_categories(make_record: Callable[..., StateRecord]) -> None:
    records = [
        make_record("a", category="temporal-reasoning"),
        make_record("b", category=2, dimension="belief_modeling"),
        make_record("c", category=2),
    ]
    done = scored(records, [Generation("<answer>so</answer>", 1, 1, True)] * 3)
    assert [item.locomo_f1 for item in done] == [None, None, 1.0]
    assert [item.f1 for item in done] == [1.0] * 3


class Moody:
    name = "moody"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def verdicts(self, cases: Sequence[Case], samples: Sequence[str] | None = None) -> list[Verdict]:
        self.asked += [case.prediction for case in cases]
        return [Verdict(None if case.prediction == "down" else True) for case in cases]


def test_a_judge_that_fails_gives_no_verdict(make_record: Callable[..., StateRecord]) -> None:
    judge = Moody()
    cases = [Case("q", ("r",), text) for text in ("up", "down", " ", "up", "down")]
    assert [ruling.value for ruling in judge_answers(judge, cases)] == [True, None, False, True, None]  # type: ignore[arg-type]
    assert judge.asked == ["up", "down"]
    (done,) = scored([replace(make_record(), evidence_lines=())], [Generation("down", 1, 1, True)])
    assert (done.failure, done.accuracy, done.f1) == ("judge", None, 0.0)
