"""The checks for a machine with CUDA, at small sizes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import CHECKS, Check, Figure, Setting, run_all
from remind.core.files import read_json


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("cpu", True, tmp_path, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHECKS if name not in ("tests", "chain")])
def test_a_check_gives_figures(setting: Setting, name: str) -> None:
    figures = CHECKS[name].run(setting)
    assert figures
    assert all(figure.value > 0 or "on top of" in figure.quantity for figure in figures)


@pytest.mark.slow
def test_what_is_there_already_is_not_run_again(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    records = run_all(setting, ["sae-step", "chain"], 300)
    assert records["sae-step"]["status"] == "done"
    assert records["chain"]["status"] == "left out"
    assert "needs" in records["chain"]["why"]
    monkeypatch.setattr(gpu, "_run", lambda *_: pytest.fail("run again"))
    assert run_all(setting, ["sae-step", "chain"], 300) == records
    text = (setting.out / "gpu.md").read_text()
    assert "tokens an SAE trains on" in text
    assert "torch 2" in text.splitlines()[0]
    # another machine, or other versions
    monkeypatch.setattr(gpu, "_run", lambda *_: {"status": "failed", "why": "exit status 1"})
    monkeypatch.setattr(gpu, "about", lambda *_, **__: {"machine": "another"})
    assert run_all(setting, ["sae-step"], 300)["sae-step"]["status"] == "failed"
    assert "failed: exit status 1" in (setting.out / "gpu.md").read_text()


def test_a_check_that_takes_too_long_is_stopped(setting: Setting) -> None:
    assert run_all(setting, ["sae-step"], 0.2)["sae-step"]["status"] == "stopped"
    assert read_json(setting.out / "sae-step.json")["why"] == "took more than 0 s"


def test_a_missing_package_is_named(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "tests", Check(CHECKS["tests"].run, ("pytest", "no_such_package")))
    assert run_all(setting, ["tests"], 1)["tests"]["why"] == "needs no_such_package"


def test_what_a_figure_is_meant_to_be() -> None:
    assert Figure("", 1.0).holds
    assert Figure("", 1.0, most=1.0).holds
    assert not Figure("", 1.1, most=1.0).holds
    assert not Figure("", 0.0, least=1).holds
