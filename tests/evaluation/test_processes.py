"""Questions dealt out over processes: the same run as of one, after kills and errors too."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
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
from remind.evaluation.predictions import part_name
from remind.evaluation.run import run_evaluation
from remind.evaluation.team import Team
from remind.states.records import StateRecord

#: As scripts/evaluate.py, but after its first row process 1 does what is asked of it.
SCRIPT = """
import os, time
from pathlib import Path
from remind.commands import run
from remind.core.errors import DataError
from remind.evaluation import stages

row, rows = stages.Task.row, []

def second(*given):
    rows.append(given)
    if os.environ["RANK"] == "1" and len(rows) == 2:
        Path({asked!r}).with_name("pid").write_text(str(os.getpid()))
        {does}
    return row(*given)

stages.Task.row = second
run("evaluate", ["--config", {asked!r}])
"""


@pytest.fixture
def cfg(local: EvaluateConfig, six: list[StateRecord], make_record: Any, write_states: Any) -> EvaluateConfig:
    """Six questions in three batches, of which process 1 has the second, and one whose prompt is too long."""
    states = str(write_states(*six, make_record("long", text="why? " * 20_000), name="more"))
    return replace(local, states=states, out=str(Path(local.out).with_name("one")))


@pytest.fixture
def start(cfg: EvaluateConfig, tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    """Starts two processes that write to `two`."""
    started = []

    def run(does: str = "pass", **changes: Any) -> Forked:
        asked = tmp_path / "asked.yaml"
        asked.write_text(yaml.safe_dump({**asdict(cfg), "out": str(tmp_path / "two"), **changes}))
        (tmp_path / "script.py").write_text(SCRIPT.format(asked=str(asked), does=does))
        started.append(Forked(tmp_path / "script.py", environment={**os.environ, "OMP_NUM_THREADS": "1"}, processes=2))
        return started[-1]

    yield run
    for process in started:
        process.kill()


def timeless(value: Any) -> Any:
    """A report without its times, its own folder and its threads."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in ("seconds", "out", "machine")}
    return value


def errors_of(process: Forked) -> list[str]:
    _, errors = process.communicate(timeout=120)
    assert process.returncode not in (0, None)
    return [line for line in errors.splitlines() if line.startswith("error: ") or "Traceback" in line]


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(cfg: EvaluateConfig, start: Any, tmp_path: Path) -> None:
    run_evaluation(replace(cfg, conditions=["x0", "x1", "abstain"]))
    process = start(conditions=["x0", "x1", "abstain"])
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert said.count("report: ") == 1
    assert (tmp_path / "pid").exists()  # both have answered
    for name in ("x0", "x1", "abstain"):
        one, two = tmp_path / "one" / name, tmp_path / "two" / name
        assert sorted(file.name for file in one.iterdir()) == sorted(file.name for file in two.iterdir())
        assert (one / "predictions.jsonl").read_bytes() == (two / "predictions.jsonl").read_bytes()
        assert timeless(read_json(one / "report.json")) == timeless(read_json(two / "report.json"))


@pytest.mark.slow
def test_after_a_kill_of_one_of_two_the_rest_is_answered(cfg: EvaluateConfig, start: Any, tmp_path: Path) -> None:
    run_evaluation(cfg)
    process = start("time.sleep(600)")
    two, until = tmp_path / "two", time.monotonic() + 120
    while not (tmp_path / "pid").exists() or len((two / "predictions.jsonl").read_text().splitlines()) < 5:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert [line for line in errors_of(process) if "a process of this run has died" in line]
    part = two / part_name(1)
    known = [json.loads(line)["question_id"] for file in (two / "predictions.jsonl", part) for line in file.open()]
    assert len(set(known)) == len(known) == 6
    # half a line, as of a kill while it was written
    part.write_bytes(part.read_bytes() + b'{"question_id": "m')
    assert run_evaluation(replace(cfg, out=str(two)))["resumed"] == 6
    assert (two / "predictions.jsonl").read_bytes() == (tmp_path / "one/predictions.jsonl").read_bytes()
    assert not part.exists()


def test_several_processes_need_a_local_model(cfg: EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remind.evaluation.run.join", lambda: Team(Shard(0, 2)))
    with pytest.raises(ConfigError, match=r"only questions to a local model .* start one process"):
        run_evaluation(replace(cfg, answers="server"))
