"""Runs that evaluate.py really made: compared, refused, exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.official.export import ExportOfficialConfig, export_official
from remind.core.errors import ConfigError
from remind.evaluation.compare import CompareConfig, compare
from remind.evaluation.harness import EvaluateConfig, evaluate
from remind.llm import AuxiliaryLLM
from remind.states.parquet import StateRecord


def test_two_levels_of_the_same_states(
    tmp_path: Path, six: list[StateRecord], write_states: Callable[..., Path], judge: AuxiliaryLLM
) -> None:
    cfg = EvaluateConfig(
        states=str(write_states(*six)),
        model="nano-untrained",
        out=str(tmp_path / "x0"),
        max_new_tokens=2,
        bootstrap=10,
    )
    reports = [evaluate(cfg, judge), evaluate(replace(cfg, level="x1", out=str(tmp_path / "x1")), judge)]
    result = compare(CompareConfig(str(tmp_path / "x0"), str(tmp_path / "x1"), resamples=50))
    assert result["differing"] == {"level": ["x0", "x1"]}
    assert result["n"] == 6
    for name in ("evidence_recall", "accuracy_failures_wrong", "bleu1"):
        row = result["differences"]["all"][name]
        assert (row["first"], row["second"]) == pytest.approx(
            tuple(report["overall"][name]["value"] for report in reports)
        )
        assert row["n"] == reports[0]["overall"][name]["n"]
    assert result["yardstick"]["judge"] == "same-words"

    path = tmp_path / "x1" / "predictions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    with pytest.raises(ConfigError, match=r"questions \(2 only in the first: d2, m2"):
        compare(CompareConfig(str(tmp_path / "x0"), str(tmp_path / "x1")))

    out = tmp_path / "rows.jsonl"
    rows = [json.loads(line) for line in (tmp_path / "x0" / "predictions.jsonl").read_text().split("\n") if line]
    answered = [row for row in rows if row["failure"] is None]
    assert export_official(ExportOfficialConfig(str(tmp_path / "x0"), str(out), "longmemeval")) == len(answered) == 6
    assert [json.loads(line)["question_id"] for line in out.read_text().splitlines()] == [
        r["question_id"] for r in rows
    ]
