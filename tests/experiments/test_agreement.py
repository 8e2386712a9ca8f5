"""A judge against labels: figures against scikit-learn, Table 3 of the paper, files and refusals."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from in_process import run_module
from sklearn import metrics as reference

from experiments.official.agreement import AgreementConfig, agreement, judge_agreement, load_labels, load_verdicts
from remind.core.errors import DataError
from remind.llm.asking import Verdict


def test_figures_against_scikit_learn() -> None:
    generator = random.Random(0)
    for _ in range(40):
        labels = [generator.random() < 0.6 for _ in range(generator.randint(2, 60))]
        verdicts = [label if generator.random() < 0.8 else not label for label in labels]
        figures = agreement(verdicts, labels)
        assert figures["accuracy"]["value"] == pytest.approx(reference.accuracy_score(labels, verdicts))
        for name, score in (
            ("precision", reference.precision_score),
            ("recall", reference.recall_score),
            ("f1", reference.f1_score),
            ("kappa", reference.cohen_kappa_score),
        ):
            if figures[name] is not None:
                assert figures[name] == pytest.approx(score(labels, verdicts)), name


def test_failures_and_undefined_figures() -> None:
    figures = agreement([True, None, False, None], [True, True, False, False])
    assert (figures["n"], figures["failed"], figures["accuracy"]["n"], figures["kappa"]) == (4, 2, 2, 1.0)
    same = agreement([True, True], [True, True])
    assert (same["accuracy"]["value"], same["kappa"]) == (1.0, None)
    nothing = agreement([False], [False])
    assert (nothing["precision"], nothing["recall"], nothing["f1"]) == (None, None, None)
    assert agreement([None], [True])["accuracy"] is None


class Rule:
    """Accepts what equals a reference; no verdict on the word boom."""

    name = "rule"

    def verdicts(self, cases: Sequence[Any], samples: Sequence[str] | None = None) -> list[Verdict]:
        return [Verdict(None if said == "boom" else said in references) for _, references, said in cases]


LABELS = [
    {"question_id": "1", "dimension": "x", "question": "?", "references": ["a"], "prediction": "a", "label": True},
    {"question_id": "2", "dimension": "x", "question": "?", "references": ["a"], "prediction": "A", "label": True},
    {"question_id": "3", "dimension": "y", "question": "?", "references": "é", "prediction": "é", "label": True},
    {"question_id": "4", "dimension": "y", "question": "?", "references": ["a"], "prediction": "boom", "label": False},
]


def lines(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_reads_verdicts_in_either_form(tmp_path: Path) -> None:
    labels = load_labels(lines(tmp_path / "l.jsonl", LABELS))
    plain = [{"question_id": str(n), "verdict": value} for n, value in ((4, False), (1, True), (3, None), (2, False))]
    assert load_verdicts(lines(tmp_path / "v.jsonl", plain), labels) == [True, False, None, False]
    rows = [{"question_id": row["question_id"], "autoeval_label": {"label": row["verdict"]}} for row in plain]
    assert load_verdicts(lines(tmp_path / "r.jsonl", rows), labels) == [True, False, None, False]


def test_asks_a_judge(tmp_path: Path) -> None:
    out = tmp_path / "agreement.json"
    result = judge_agreement(AgreementConfig(lines(tmp_path / "l.jsonl", LABELS), out=str(out)), Rule())  # type: ignore[arg-type]
    assert {name: (row["agree"], row["failed"]) for name, row in result["groups"].items()} == {"x": (1, 0), "y": (1, 1)}
    assert result["mean_accuracy"] == pytest.approx((0.5 + 1.0) / 2)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    path = lines(tmp_path / "l.jsonl", [{"question_id": "1", "label": True}])
    with pytest.raises(DataError, match="needs question, references and prediction"):
        judge_agreement(AgreementConfig(path), Rule())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "verdicts", "message"),
    [
        ([], None, "holds no labels"),
        ([{"question_id": "1", "label": "yes"}], None, "line 1.*true or false"),
        ([{"question_id": "1", "label": True}] * 2, None, "line 2.*labelled twice"),
        ([{"label": True}], None, "question_id"),
        (LABELS[:1], [], "no verdict on 1 of 1"),
        (LABELS[:1], [{"question_id": "1", "verdict": "no"}], "line 1"),
        (LABELS[:1], [{"question_id": "1", "verdict": True}] * 2, "line 2"),
    ],
)
def test_bad_files(tmp_path: Path, labels: list[object], verdicts: list[object] | None, message: str) -> None:
    second = None if verdicts is None else lines(tmp_path / "v.jsonl", verdicts)
    with pytest.raises(DataError, match=message):
        judge_agreement(AgreementConfig(lines(tmp_path / "l.jsonl", labels), second))


def test_published_verdicts_agree_with_themselves(remind_data: Path) -> None:
    (rows,) = (remind_data / "longmemeval").glob("*.eval-results*")
    questions = remind_data / "longmemeval" / "longmemeval_s_queries.json"
    command = ("--labels", rows, "--verdicts", rows, "--questions", questions)
    status, printed, errors = run_module("experiments.official.agreement", *command)
    assert status == 0, errors
    assert "1.00 (500/500)" in printed
    for kind, count in {"single-session-preference": 30, "multi-session": 133, "knowledge-update": 78}.items():
        assert re.search(rf"{kind} +{count} ", printed)
