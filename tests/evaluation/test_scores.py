"""Scores of whole outputs, who takes part in which average, and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from scripted_answers import Judge

from remind.data.dialogue import DIMENSIONS
from remind.evaluation.judge import Case, judge_answers
from remind.evaluation.scores import MEASURES, Score, counts, macro, parse_all, score, summarise
from remind.models.generate import Generation
from remind.states.records import StateRecord
from remind.text.words import Verdict


def encode(lines: list[str]) -> torch.Tensor:
    """Different lines are orthogonal."""
    return torch.eye(len(lines))


def scored(
    records: Sequence[StateRecord], outputs: Sequence[Generation], verdicts: Sequence[bool | None]
) -> list[Score]:
    """Nothing is judged without gold answer or output."""
    rulings = [
        Verdict(verdict) if record.format == "direct" and record.answers and output.failure is None else None
        for record, output, verdict in zip(records, outputs, verdicts, strict=True)
    ]
    return score(records, outputs, parse_all(records, outputs), rulings, encode)


def test_scores_by_hand(six: list[StateRecord]) -> None:
    texts = (
        "<answer>B</answer><explanation>Ana: s1 line 1</explanation>",
        "<answer>[A]</answer><explanation>Ana: m1 line 1\nAna: m1 line 5</explanation>",
        "<answer>A</answer><explanation>[1, 4]</explanation>",
        "<answer>Hiking</answer><explanation></explanation>",
        "<answer>no information available.</answer>",
    )
    outputs = [*(Generation(text, 10, 5, True) for text in texts), Generation("", 99, failure="too_long")]
    scores = scored(six[:6], outputs, [None, None, None, True, False, None])
    s1, m1, v1, d1, d2, m2 = scores
    assert [x.accuracy for x in scores] == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert (s1.memory_recall_text, m1.memory_recall_text, d1.memory_recall) == (0.5, 1.0, None)
    assert (v1.memory_recall_text, v1.memory_recall_visual, v1.memory_recall) == (None, 0.5, 0.5)
    assert [(x.bleu1, x.f1, x.locomo_f1) for x in (d1, s1)] == [(1.0, 1.0, 1.0), (None, None, None)]
    assert (d2.f1, d2.locomo_f1) == (1.0, 1.0)
    assert [x.evidence_recall for x in (s1, v1, d2, m2)] == [0.5, 0.5, None, 0.5]
    row = summarise((one.row() for one in scores), resamples=50)
    assert (row["memory_recall"]["value"], row["memory_recall"]["n"]) == (pytest.approx((0.5 + 1.0 + 0.5) / 3), 3)
    assert counts(scores)["problems"] == {"no explanation tag": 1}


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
        (make_record("blank"), Generation("<answer> </answer>", 1, 1, True), False, 0.0, 0.0),
        (make_record("accepted"), Generation("so", 1, 1, True), True, 1.0, 1.0),
        (make_record("unjudged"), Generation("so", 1, 1, True), None, None, 1.0),
        (make_record("away"), Generation("", 1, failure="server"), None, None, None),
        (make_record("memory", **single), Generation("", 1, failure="error"), None, None, None),
        (make_record("no gold", answers=()), Generation("so", 1, 1, True), None, None, 1.0),
        (make_record("no gold, refused", answers=()), Generation("", 1, failure="refused"), None, None, 0.0),
    ]
    records, outputs, verdicts, hits, read = zip(*cases, strict=True)
    scores = scored(records, outputs, verdicts)
    assert [item.accuracy for item in scores] == list(hits)
    assert [item.parse_rate for item in scores] == list(read)
    row = summarise((item.row() for item in scores), 20)
    for name, value, n in (("accuracy", 3 / 10, 10), ("parse_rate", 6 / 13, 13)):
        assert (row[name]["value"], row[name]["n"]) == (pytest.approx(value), n)
    assert (row["n"], row["failed"], row["no_verdict"]) == (15, 7, 3)
    by_id = {item.record.question_id: item for item in scores}
    # an empty output: nothing named (Eq. 11), no word in common (Eq. 13, 14), not valid for Eq. 10
    assert by_id["long"].memory_recall == 0.0
    assert (by_id["refused"].f1, by_id["refused"].bleu1, by_id["refused"].memory_recall) == (0.0, 0.0, None)
    assert (by_id["away"].f1, by_id["away"].evidence_recall) == (None, 0.5)


def test_empty_answers_are_wrong_without_asking() -> None:
    judge = Judge(fails=("down",))
    cases = [Case("q", ("up",), text) for text in ("up", " ", "down", "other")]
    assert [ruling.value for ruling in judge_answers(judge, cases)] == [True, False, None, False]  # type: ignore[arg-type]
    assert judge.asked == ["up", "down", "other"]


#: Table 4's accuracies of the eight dimensions, and what Table 1 prints.
PRINTED = {
    "multi": ((60.92, 65.04, 64.20, 52.78, 51.73, 59.60, 60.09, 60.41), 59.4),
    "single": ((60.97, 68.26, 58.76, 69.39, 68.64, 65.40, 64.32, 73.73), 66.2),
    "direct": ((27.21, 31.49, 35.68, 26.82, 28.59, 59.05, 43.50, 10.59), 32.9),
}


@pytest.mark.parametrize(("cells", "printed"), PRINTED.values(), ids=PRINTED)
def test_the_mean_over_dimensions_is_what_table_1_prints(cells: tuple[float, ...], printed: float) -> None:
    nothing = dict.fromkeys(MEASURES)
    rows = {
        name: {"n": n, "failed": 0, "no_verdict": 0, **nothing, "accuracy": {"value": value}}
        for n, (name, value) in enumerate(zip(DIMENSIONS, cells, strict=True), start=1)
    }
    found = macro(rows)
    assert found["accuracy"]["value"] == pytest.approx(printed, abs=0.1)
    assert (found["accuracy"]["n"], found["n"], found["f1"]) == (8, 36, None)
