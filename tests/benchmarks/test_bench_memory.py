from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bench_memory
from benchmarks.bench_memory import BenchMemoryConfig
from remind.core.files import read_json


def test_small_banks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_memory, "peak", lambda *_: {"before": 1.0, "peak": 2.0})
    monkeypatch.setattr(bench_memory, "spawned_pool", Here)
    out = tmp_path / "figures.json"
    cfg = BenchMemoryConfig(vectors=9000, small=50, questions=3, turns=5, sessions=4, out=str(out))
    figures = bench_memory.bench_memory(cfg)
    assert figures == read_json(out)
    assert figures["question"]["exact"]
    assert figures["session"]["clock"]["ratio"] > 0
    assert "exact: True" in capsys.readouterr().out


class Here:
    """A pool whose process is this one."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, run: object, *given: object) -> Here:
        self.result = lambda: run(*given)  # type: ignore[operator]
        return self


def test_made_up_vectors_have_unit_length_and_the_spectrum() -> None:
    rows = bench_memory.made_up(1500, block=1)
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(1500))
    values = torch.linalg.eigvalsh((rows.T @ rows).double()).flip(0)
    # 0.8 of the variance in a sixth of the directions, nearly nothing in the last
    assert values[:64].sum() / values.sum() == pytest.approx(0.82, abs=0.03)
    assert values[300:].sum() / values.sum() < 0.01
