"""Questions dealt out over processes: the same run as of one, after a kill too."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import Forked

from remind.core.errors import ConfigError
from remind.core.files import read_json
from remind.core.processes import Shard
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.run import run_evaluation
from remind.evaluation.team import Team
from remind.states.records import StateRecord

#: As scripts/evaluate.py, but the first time process 1 is killed at its second row.
SCRIPT = """
import os, signal
from pathlib import Path
from remind.commands import run
from remind.evaluation import stages

row, rows, killed = stages.Task.row, [], Path({killed!r})

def second(*given):
    rows.append(given)
    if os.environ["RANK"] == "1" and len(rows) == 2 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return row(*given)

stages.Task.row = second
run("evaluate", ["--config", {asked!r}])
"""


@pytest.fixture
def cfg(local: EvaluateConfig, six: list[StateRecord], make_record: Any, write_states: Any) -> EvaluateConfig:
    """Six questions in three batches, of which process 1 has the second, and one whose prompt is too long."""
    states = str(write_states(*six, make_record("long", text="why? " * 20_000), name="more"))
    return replace(local, states=states, conditions=["x0", "x1", "abstain"])


def timeless(value: Any) -> Any:
    """A report without its times, its own folder, its sittings and its threads."""
    if isinstance(value, dict):
        return {
            key: timeless(item) for key, item in value.items() if key not in ("seconds", "out", "machine", "resumed")
        }
    return value


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(cfg: EvaluateConfig, tmp_path: Path) -> None:
    asked, script, environment = tmp_path / "asked.yaml", tmp_path / "script.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    asked.write_text(yaml.safe_dump({**asdict(cfg), "out": str(tmp_path / "two")}))
    script.write_text(SCRIPT.format(asked=str(asked), killed=str(tmp_path / "killed")))
    run_evaluation(cfg)
    process = Forked(script, environment=environment, processes=2)
    _, errors = process.communicate(timeout=120)
    assert "error: a process of this run has died" in errors
    # what it had answered is not asked again
    assert list((tmp_path / "two").rglob("*.part"))
    process = Forked(script, environment=environment, processes=2)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert said.count("report: ") == 1
    for name in cfg.conditions:
        one, two = Path(cfg.out) / name, tmp_path / "two" / name
        assert sorted(file.name for file in one.iterdir()) == sorted(file.name for file in two.iterdir())
        assert (one / "predictions.jsonl").read_bytes() == (two / "predictions.jsonl").read_bytes()
        report = read_json(two / "report.json")
        assert timeless(read_json(one / "report.json")) == timeless(report)
        assert (report["resumed"] > 0) == (name == "x0")


def test_several_processes_need_a_local_model(cfg: EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remind.evaluation.run.join", lambda: Team(Shard(0, 2)))
    with pytest.raises(ConfigError, match=r"only questions to a local model .* start one process"):
        run_evaluation(replace(cfg, answers="server"))
