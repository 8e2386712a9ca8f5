"""The bench of grounding measures what it says and prints it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.bench_grounding import BenchGroundingConfig, bench_grounding, bench_state
from remind.models.backbone import load_backbone
from remind.states.pyramid import render

SMALL = {"tokens": 500, "d_sae": 64, "k": 4, "rounds": 2}


def test_figures_are_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = bench_grounding(BenchGroundingConfig(**SMALL, out=str(tmp_path / "out.json")))
    assert json.loads((tmp_path / "out.json").read_text()) == figures
    assert figures["ratio"] == pytest.approx(figures["scoring_s"] / figures["forward_s"])
    assert all(figures[f"{name}_s"] > 0 for name in ("forward", "encode", "prompt", "products"))
    assert figures["layers"] == [1, 2, 3, 4]
    assert 300 < figures["tokens"] <= 500
    assert f"{figures['ratio']:.1%}" in capsys.readouterr().out


def test_x0_is_as_long_as_asked() -> None:
    tokens = 2500
    nano = load_backbone("nano")
    state = bench_state(nano, tokens)
    length = len(nano.tokenize(render(state).text).ids)
    assert tokens - 150 < length <= tokens
    assert all(a.end + 1 == b.start for a, b in pairwise(state.segments))
    assert any(image.caption for turn in state.turns for image in turn.images)
