"""Runs on two CPU processes, plain and sharded (FSDP2, with gloo), against those on one, and what may happen to them.

All that is to be trained on a number of processes is trained by processes that start once: tests look at what is left.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forked import Forked
from pictured import pictured_records

from remind.alignment.config import Edge, Objective
from remind.alignment.examples import Batches
from remind.alignment.metrics import checkpoints
from remind.core.files import read_json, write_json
from remind.core.run_folder import CONFIG, as_dict
from remind.train_pra.config import DataConfig

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("scenarios.py")
#: Steps: two epochs of a batch of four and one of three.
STEPS = 4
PIXELS = DataConfig(images="pixels", image_tokens=64, train_vision=True)
RUNS: dict[str, dict[str, Any]] = {
    "ema": {"objective": Objective(teacher_model_kind="ema", ema_decay=0.5)},
    "base": {"objective": Objective(teacher_model_kind="base", edges=(Edge(0, 1), Edge(0, 2, 1.0)))},
    "decoded": {"data": DataConfig(targets="decoded", max_decoded=6)},
    "on_policy": {"data": DataConfig(targets="on_policy", max_decoded=6, refresh_steps=2)},
    "pixels": {"data": PIXELS, "prefix_sharing": False, "batch_size": 2},
    "live": {},
}
#: Sharded ones; that with AdamW is stopped and goes on.
SHARDED = {name: RUNS[name] for name in ("ema", "base", "pixels")}
SHARDED["adamw"] = {"optim": "adamw_torch", "learning_rate": 1e-3}
POISONED = 2


class Told:
    """Folders for `scenarios.py`, and what it has left there."""

    def __init__(self, runs: Any, states: dict[str, Path], root: Path) -> None:
        self.runs, self.states, self.root = runs, states, root

    def tell(self, name: str, out: str | None = None, told: dict[str, Any] | None = None, **changes: Any) -> None:
        folder = self.root / "told" / name
        folder.mkdir(parents=True)
        # with AdamW the last digits of gradients near 0 would become steps
        loop = {"optim": "sgd", "learning_rate": 0.1, "max_steps": STEPS, "save_steps": 3, "save_total_limit": None}
        states = self.states["pixels" if changes.get("data") == PIXELS else "text"]
        cfg = self.runs.config(states, self.root / (out or name), **{**loop, **changes})
        (folder / CONFIG).write_text(yaml.safe_dump(as_dict(cfg)))
        write_json(folder / "told.json", told or {})

    def train(self, processes: int) -> None:
        environment = self.runs.environment()
        process = Forked(SCRIPT, self.root / "told", environment=environment, processes=processes)
        _, self.errors = process.communicate(timeout=600)
        assert process.returncode == 0, self.errors[-3000:]

    def ends(self, name: str) -> list[Any]:
        return [read_json(file) for file in sorted((self.root / "told" / name).glob("left-*.json"))]


@pytest.fixture(scope="module")
def batch() -> list[str]:
    """Questions of the step that goes wrong."""
    return sorted(f"q00{place}" for place in Batches(7, 4).batch(POISONED))


@pytest.fixture(scope="module")
def one(runs: Any, make_record: Any, make_states: Any, tmp_path_factory: Any) -> Told:
    folder = tmp_path_factory.mktemp("states")
    records = [make_record(n) for n in range(7)] + [make_record(10 + n, "dev") for n in range(3)]
    states = {
        "text": make_states(folder / "text", records),
        # one of three training questions has images
        "pixels": make_states(folder / "pixels", pictured_records(folder / "images")),
    }
    told = Told(runs, states, tmp_path_factory.mktemp("one"))
    for name, changes in (RUNS | SHARDED).items():
        told.tell(name, **changes)
    told.train(1)
    return told


@pytest.fixture(scope="module")
def two(runs: Any, one: Told, tmp_path_factory: Any) -> Told:
    """What happens in some of them happens on the second process."""
    told = Told(runs, one.states, tmp_path_factory.mktemp("two"))
    for name, changes in RUNS.items():
        told.tell(name, **changes)
    shutil.copytree(one.root / "live" / "checkpoint-3", told.root / "from-one" / "checkpoint-3")
    told.tell("from-one", resume=True)
    rare = {"save_steps": 100, "eval_steps": 100}
    told.tell("SIGINT", told={"signal": "SIGINT", "step": 2, "rank": 1}, **rare)
    told.tell("SIGINT-again", "SIGINT", resume=True, **rare)
    for what in ("loss", "gradient"):
        told.tell(f"nan-{what}", told={"step": POISONED, "rank": 1, "nan": what}, save_steps=2)
    told.tell("nan-loss-again", "nan-loss", resume=True, save_steps=2)
    for name, changes in SHARDED.items():
        signal = {"signal": "SIGTERM", "step": 2, "rank": 1} if name == "adamw" else {}
        told.tell(f"sharded-{name}", told={"sharded": True, **signal}, **changes)
    told.tell("sharded-adamw-again", "sharded-adamw", {"sharded": True}, resume=True, **SHARDED["adamw"])
    told.tell("sharded-bf16", told={"sharded": True}, bf16=True)
    told.train(2)
    return told


def assert_close(runs: Any, a: Path, b: Path, after: int = 0, atol: float = 1e-6) -> None:
    files = ["model", *(["ema"] if (b / f"checkpoint-{STEPS}" / "ema.safetensors").exists() else [])]
    for name in files:
        found, expected = (runs.weights(run, STEPS, name) for run in (a, b))
        # a tied head is written twice where the model is sharded
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")
    rows = [[row for row in runs.timeless(run) if row["step"] > after] for run in (a, b)]
    for row, same in zip(*rows, strict=True):
        assert same.keys() == row.keys()
        for key in ("total", "hard", "ce0", "entropy0"):
            assert same[key] == pytest.approx(row[key], rel=5e-6), (key, row["step"])
        # float32 sums of a million squares
        assert same.get("grad_norm", 0.0) == pytest.approx(row.get("grad_norm", 0.0), rel=1e-4)


@pytest.mark.parametrize("name", [*RUNS, *(f"sharded-{name}" for name in SHARDED)])
def test_two_processes_train_as_one(runs: Any, one: Told, two: Told, name: str) -> None:
    # four steps of AdamW move a weight by at most 4e-3
    assert_close(
        runs, two.root / name, one.root / name.removeprefix("sharded-"), atol=4e-4 if "adamw" in name else 1e-6
    )


def test_sharded_in_mixed_precision(runs: Any, one: Told, two: Told) -> None:
    """Positions and weights of samples are not rounded: losses are within bfloat16 of those in float32."""
    found, expected = (runs.timeless(run, "train") for run in (two.root / "sharded-bf16", one.root / "live"))
    assert [row["total"] for row in found] == pytest.approx([row["total"] for row in expected], rel=0.02)


def test_a_run_goes_on_with_another_number_of_processes(runs: Any, one: Told, two: Told) -> None:
    assert_close(runs, two.root / "from-one", one.root / "live", after=3)


def test_a_signal_to_one_process_ends_the_step_of_all(runs: Any, two: Told) -> None:
    assert two.ends("SIGINT") == [130, 130]
    lines = [line for line in two.errors.splitlines() if line.startswith("stopped by SIGINT")]
    assert set(lines) == {f"stopped by SIGINT at step 3 of {STEPS}; resume to continue"}
    assert [folder.name for folder in checkpoints(two.root / "SIGINT")] == ["checkpoint-3", "checkpoint-4"]
    runs.assert_identical(*(runs.weights(two.root / run, STEPS) for run in ("SIGINT", "live")))


def test_what_is_not_finite_stops_all_with_names_and_the_state_before(runs: Any, two: Told, batch: list[str]) -> None:
    for what in ("loss", "gradient"):
        begin = f"the {what} is not finite in step {POISONED + 1}, questions "
        for end in two.ends(f"nan-{what}"):
            assert end.startswith(begin)
            assert sorted(end.removeprefix(begin).split(";")[0].split(", ")) == batch
            assert end.endswith(str(two.root / f"nan-{what}" / f"checkpoint-{POISONED}"))
    # with the cause gone, the run ends where it would have
    runs.assert_identical(*(runs.weights(two.root / run, STEPS) for run in ("nan-loss", "live")))
