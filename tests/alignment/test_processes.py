"""Runs on two CPU processes against those on one, and what may happen to them; FSDP2: test_fsdp.py.

All that is to be trained on a number of processes is trained by processes that start once: tests look at what is left.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forked import Forked

from remind.alignment.config import Edge, LoraConfig, Objective
from remind.alignment.examples import Batches, example_of
from remind.alignment.metrics import checkpoints
from remind.core.cli import parse
from remind.core.files import read_json
from remind.core.run_folder import CONFIG, as_dict
from remind.models.backbone import load_backbone
from remind.models.nano import nano_tokenizer
from remind.states.dataset import iterate_states
from remind.train_pra.config import DataConfig

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("scenarios.py")
#: Steps: two epochs of a batch of four and one of three.
STEPS = 4
RUNS: dict[str, dict[str, Any]] = {
    "pieces": {"gradient_accumulation_steps": 2},
    "lora": {"lora": LoraConfig(r=2, alpha=4)},
    "ema": {"objective": Objective(teacher_model_kind="ema", ema_decay=0.5)},
    "base": {"objective": Objective(teacher_model_kind="base", edges=(Edge(0, 1), Edge(0, 2, 1.0)))},
    "decoded": {"data": DataConfig(targets="decoded", max_decoded=6)},
    "live": {},
}
POISONED = 2


@pytest.fixture(scope="module")
def seven(make_record: Any, make_states: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [make_record(n) for n in range(7)] + [make_record(10 + n, "dev") for n in range(3)]
    return make_states(tmp_path_factory.mktemp("seven") / "s", records)  # type: ignore[no-any-return]


class Told:
    """Folders for `scenarios.py`, and what it has left there."""

    def __init__(self, runs: Any, states: Path, root: Path) -> None:
        self.runs, self.states, self.root = runs, states, root

    def tell(self, name: str, out: str | None = None, told: dict[str, Any] | None = None, **changes: Any) -> None:
        folder = self.root / "told" / name
        folder.mkdir(parents=True)
        # with AdamW the last digits of gradients near 0 would become steps
        loop = {"optim": "sgd", "learning_rate": 0.1, "max_steps": STEPS, "save_steps": 1, "save_total_limit": None}
        cfg = self.runs.config(self.states, self.root / (out or name), **{**loop, **changes})
        (folder / CONFIG).write_text(yaml.safe_dump(as_dict(cfg)))
        (folder / "told.json").write_text(json.dumps(told or {}))

    def train(self, processes: int, **more: str) -> None:
        environment = self.runs.environment(**more)
        process = Forked(SCRIPT, self.root / "told", environment=environment, processes=processes)
        said, self.errors = process.communicate(timeout=600)
        assert process.returncode == 0, self.errors[-3000:]
        assert all(f"rank {rank} is through" in said for rank in range(processes)), self.errors[-3000:]

    def of(self, name: str, what: str = "end") -> list[Any]:
        return [read_json(file) for file in sorted((self.root / "told" / name).glob(f"{what}-*.json"))]

    def samples(self, name: str) -> dict[int, list[str]]:
        found = defaultdict(list)
        for process in self.of(name, "samples"):
            for step, ids in process:
                found[step] += ids
        return {step: sorted(ids) for step, ids in found.items()}


def trained(told: Told, processes: int, batch: list[str]) -> Told:
    """All runs on so many processes; what happens in some of them happens on the last."""
    rare = {"save_steps": 100, "eval_steps": 100}
    for name, changes in RUNS.items():
        told.tell(name, **changes)
    for name in ("SIGTERM", "SIGINT"):
        told.tell(name, told={"signal": name, "step": 2, "rank": processes - 1}, **rare)
        told.tell(f"{name}-again", name, resume=True, **rare)
    for what in ("loss", "gradient"):
        nan = {"nan": what, "step": POISONED, "rank": processes - 1, "token": _own_token(told.states, batch)}
        told.tell(f"nan-{what}", told=nan, eval_steps=100)
        told.tell(f"nan-{what}-again", f"nan-{what}", resume=True, eval_steps=100)
    told.train(processes)
    return told


def _own_token(states: Path, batch: list[str]) -> int:
    """One that of all questions the first of the batch alone has."""
    tokens = {}
    for record in iterate_states(str(states), "train"):
        example = example_of(nano_tokenizer(), record)
        tokens[record.question_id] = set(torch.cat([*example.prompts, example.answer]).tolist())
    return min(tokens.pop(batch[0]).difference(*tokens.values()))


@pytest.fixture(scope="module")
def batch() -> list[str]:
    """Questions of the step that goes wrong."""
    return sorted(f"q00{place}" for place in Batches(7, 4).batch(POISONED))


@pytest.fixture(scope="module")
def one(runs: Any, seven: Path, batch: list[str], tmp_path_factory: pytest.TempPathFactory) -> Told:
    return trained(Told(runs, seven, tmp_path_factory.mktemp("one")), 1, batch)


@pytest.fixture(scope="module")
def two(runs: Any, seven: Path, one: Told, batch: list[str], tmp_path_factory: pytest.TempPathFactory) -> Told:
    told = Told(runs, seven, tmp_path_factory.mktemp("two"))
    shutil.copytree(one.root / "live" / "checkpoint-3", told.root / "from-one" / "checkpoint-3")
    told.tell("from-one", resume=True)
    return trained(told, 2, batch)


def assert_close(runs: Any, a: Path, b: Path) -> None:
    files = ["model", *(["ema"] if (b / f"checkpoint-{STEPS}" / "ema.safetensors").exists() else [])]
    for name in files:
        found, expected = (runs.weights(run, STEPS, name) for run in (a, b))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
    rows = [[row for row in runs.timeless(run) if row["step"] <= STEPS] for run in (a, b)]
    for row, same in zip(*rows, strict=True):
        assert same.keys() == row.keys()
        for key in ("total", "hard", "ce0", "entropy0"):
            assert same[key] == pytest.approx(row[key], rel=2e-6), (key, row["step"])
        # float32 sums of a million squares
        assert same.get("grad_norm", 0.0) == pytest.approx(row.get("grad_norm", 0.0), rel=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one(runs: Any, one: Told, two: Told, name: str) -> None:
    assert_close(runs, two.root / name, one.root / name)


def test_every_sample_is_used_once_an_epoch_whatever_the_processes(runs: Any, one: Told, two: Told) -> None:
    expected = one.samples("live")
    assert [len(ids) for ids in expected.values()] == [4, 3, 4, 3]
    for epoch in ((1, 2), (3, 4)):
        assert sorted(name for step in epoch for name in expected[step]) == [f"q00{n}" for n in range(7)]
    assert one.samples("pieces") == two.samples("pieces") == two.samples("live") == expected
    assert_close(runs, one.root / "pieces", one.root / "live")


def test_a_run_goes_on_with_another_number_of_processes(runs: Any, one: Told, two: Told, tmp_path: Path) -> None:
    assert two.samples("from-one") == {4: one.samples("live")[4]}
    back = Told(runs, one.states, tmp_path)
    shutil.copytree(two.root / "live" / "checkpoint-3", tmp_path / "back" / "checkpoint-3")
    back.tell("back", resume=True)
    back.train(1)
    assert back.samples("back") == {4: one.samples("live")[4]}
    for run in (two.root / "from-one", tmp_path / "back"):
        for key, value in runs.weights(one.root / "live", STEPS).items():
            torch.testing.assert_close(runs.weights(run, STEPS)[key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_to_one_process_ends_the_step_of_all(
    runs: Any, one: Told, two: Told, processes: int, name: str, status: int
) -> None:
    told = (one, two)[processes - 1]
    assert told.of(name) == [status] * processes
    lines = [line for line in told.errors.splitlines() if line.startswith(f"stopped by {name}")]
    assert lines == [f"stopped by {name} at step 3 of {STEPS}; resume to continue"]
    assert [folder.name for folder in checkpoints(told.root / name)] == ["checkpoint-3", "checkpoint-4"]
    runs.assert_identical(*(runs.weights(told.root / run, STEPS) for run in (name, "live")))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_stops_all_with_names_and_the_state_before(
    runs: Any, one: Told, two: Told, batch: list[str], processes: int, what: str
) -> None:
    told, begin = (one, two)[processes - 1], f"the {what} is not finite in step {POISONED + 1}, questions "
    for end in told.of(f"nan-{what}"):
        assert end.startswith(begin)
        assert sorted(end.removeprefix(begin).split(";")[0].split(", ")) == batch
        assert end.endswith(str(told.root / f"nan-{what}" / f"checkpoint-{POISONED}"))
    # with the cause gone, the run ends where it would have
    runs.assert_identical(*(runs.weights(told.root / run, STEPS) for run in (f"nan-{what}", "live")))


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_the_shipped_config_trains_in_bfloat16_under_the_shipped_launcher(
    runs: Any, seven: Path, tmp_path: Path
) -> None:
    shipped = parse(runs.TrainConfig, "", ["--config", str(runs.ROOT / "configs/paper/pra_full.yaml")])
    told = Told(runs, seven, tmp_path)
    quick = {"max_steps": 2, "save_steps": 1, "save_total_limit": None, "warmup_steps": 0}
    told.tell("run", dtype=shipped.dtype, **{**vars(shipped.trainer), **quick})
    launcher = yaml.safe_load((runs.ROOT / "configs/accelerate/fsdp2_bf16_2gpu.yaml").read_text())
    # as accelerate tells its processes
    shards = {key.upper(): str(value) for key, value in launcher["fsdp_config"].items()}
    told.train(launcher["num_processes"], ACCELERATE_USE_FSDP="true", **shards)
    assert told.of("run") == [0, 0]
    first, second = (runs.weights(tmp_path / "run", step) for step in (1, 2))
    assert {value.dtype for value in second.values()} == {torch.bfloat16}
    start = dict(load_backbone("nano-untrained").model.bfloat16().named_parameters())
    # at a rate of a hundred-thousandth, in bfloat16
    for before, after in ((start, first), (first, second)):
        trained = [name for name in after if "visual" not in name and name in before]
        moved = [name for name in trained if not torch.equal(after[name], before[name])]
        assert len(moved) > len(trained) / 2
