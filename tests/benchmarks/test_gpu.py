"""The checks for a machine with CUDA, at small sizes on the CPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import CHECKS, Check, Setting, run_all
from remind.core.files import read_json


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("cpu", True, tmp_path, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHECKS.keys() - {"tests", "chain", "sae-step", "pra-trainer"}))
def test_a_check_gives_figures(setting: Setting, name: str) -> None:
    if any(find_spec(package) is None for package in CHECKS[name].needs):
        pytest.skip(f"needs {', '.join(CHECKS[name].needs)}")
    figures = CHECKS[name].run(setting)
    assert figures
    assert all(figure.value > 0 or "on top of" in figure.quantity for figure in figures)


@pytest.mark.slow
def test_what_is_there_already_is_not_run_again(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    records = run_all(setting, ["sae-step", "chain"], 300)
    assert records["sae-step"]["status"] == "done"
    assert records["chain"]["status"] == "left out"
    monkeypatch.setattr(gpu, "_run", lambda *_: pytest.fail("run again"))
    assert run_all(setting, ["sae-step", "chain"], 300) == records
    text = (setting.out / "gpu.md").read_text()
    assert "tokens an SAE trains on" in text


def test_a_check_that_takes_too_long_is_stopped(setting: Setting) -> None:
    assert run_all(setting, ["sae-step"], 0.2)["sae-step"]["status"] == "stopped"
    assert read_json(setting.out / "sae-step.json")["why"] == "took more than 0 s"


def test_a_missing_package_is_named(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "tests", Check(CHECKS["tests"].run, ("pytest", "no_such_package")))
    assert run_all(setting, ["tests"], 1)["tests"]["why"] == "needs no_such_package"
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    assert run_all(setting, ["memory-qlora"], 1)["memory-qlora"]["why"] == "needs a device with CUDA"


@pytest.mark.slow
def test_checks_run_without_the_packages_that_a_bare_machine_lacks(tmp_path: Path) -> None:
    hidden = ("pyarrow", "jsonargparse", "sklearn", "scipy", "bm25s", "nltk", "openai", "matplotlib", "hypothesis")
    hidden += ("datasets", "pydantic", "bitsandbytes", "torchao", "trl", "pandas")
    modules = ("benchmarks.bench_sae", "benchmarks.bench_grounding", "benchmarks.gpu", "tests.test_devices")
    code = f"import sys; sys.modules |= dict.fromkeys({hidden}); import {', '.join(modules)}\n"
    # of the checks those of alignment import the most
    code += "gpu = benchmarks.gpu; gpu.steps(gpu.Setting('cpu', True, gpu.Path(sys.argv[1]), []), loop=True)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=gpu.ROOT, timeout=240, check=True)
