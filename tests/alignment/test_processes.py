"""Runs on two CPU processes, under DDP and FSDP2, against one process.

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
from remind.alignment.examples import example_of
from remind.alignment.trainer import checkpoints, is_whole
from remind.core.cli import parse
from remind.core.files import read_json
from remind.core.run_folder import CONFIG, as_dict
from remind.models.load import load_backbone
from remind.models.nano import nano_tokenizer
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
        said, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]
        assert all(f"rank {rank} is through" in said for rank in range(processes)), errors[-3000:]

    def of(self, name: str, what: str) -> list[Any]:
        return [read_json(file) for file in sorted((self.root / "told" / name).glob(f"{what}-*.json"))]

    def samples(self, name: str) -> dict[int, list[str]]:
        found = defaultdict(list)
        for process in self.of(name, "samples"):
            for step, ids in process:
                found[step] += ids
        return {step: sorted(ids) for step, ids in found.items()}


@pytest.fixture(scope="module")
def one(runs: Any, seven: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    told = Told(runs, seven, tmp_path_factory.mktemp("one"))
    for name, changes in RUNS.items():
        told.tell(name, **changes)
    told.train(1)
    return told


@pytest.fixture(scope="module")
def two(runs: Any, seven: Path, one: Told, tmp_path_factory: pytest.TempPathFactory) -> Told:
    told = Told(runs, seven, tmp_path_factory.mktemp("two"))
    for name, changes in RUNS.items():
        told.tell(name, **changes)
    resumed = told.root / "from-one"
    shutil.copytree(one.root / "live" / "checkpoint-3", resumed / "checkpoint-3")
    told.tell("from-one", resume=True)
    for name in ("SIGTERM", "SIGINT"):
        told.tell(name, told={"signal": name, "step": 2, "rank": 1}, save_steps=100, eval_steps=100)
        told.tell(f"{name}-again", name, save_steps=100, eval_steps=100, resume=True)
    question = _batch(one)[0]
    told.tell("nan-loss", told={"nan": "loss", "step": POISONED, "token": _own_token(seven, question)}, save_steps=100)
    told.tell("nan-gradient", told={"nan": "gradient", "step": POISONED, "rank": 1}, save_steps=100)
    told.train(2)
    return told


def _batch(one: Told) -> list[str]:
    return one.samples("live")[POISONED + 1]


def _own_token(states: Path, question: str) -> int:
    """One that no other question has."""
    from remind.states.parquet import iterate_states

    tokens = {}
    for record in iterate_states(str(states), "train"):
        example = example_of(nano_tokenizer(), record)
        tokens[record.question_id] = set(torch.cat([*example.prompts, example.answer]).tolist())
    others = (ids for name, ids in tokens.items() if name != question)
    return min(tokens[question].difference(*others))


def assert_close(runs: Any, a: Path, b: Path, atol: float = 1e-6) -> None:
    files = ["model", *(["ema"] if (b / f"checkpoint-{STEPS}" / "ema.safetensors").exists() else [])]
    for name in files:
        found, expected = (runs.weights(run, STEPS, name) for run in (a, b))
        if "lm_head.weight" in found.keys() - expected.keys():
            # of shards a tied head is written too
            assert torch.equal(found.pop("lm_head.weight"), found["model.language_model.embed_tokens.weight"])
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")
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


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_to_one_process_stops_both(runs: Any, two: Told, name: str, status: int) -> None:
    assert two.of(name, "end") == [status, status]
    assert two.of(f"{name}-again", "end") == [0, 0]
    assert [folder.name for folder in checkpoints(two.root / name)] == ["checkpoint-3", "checkpoint-4"]
    runs.assert_identical(runs.weights(two.root / name, STEPS), runs.weights(two.root / "live", STEPS))


def test_what_is_not_finite_on_one_process_stops_both(one: Told, two: Told) -> None:
    batch = _batch(one)
    for what, names in (("loss", batch[:1]), ("gradient", batch)):
        run = two.root / f"nan-{what}"
        begin = f"the {what} is not finite in step {POISONED + 1}, questions "
        for end in two.of(f"nan-{what}", "end"):
            assert end.startswith(begin)
            assert "\n" not in end
            assert sorted(end.removeprefix(begin).split(";")[0].split(", ")) == names
        assert checkpoints(run) == [run / f"checkpoint-{POISONED}"]
        assert is_whole(checkpoints(run)[0])


def fsdp(name: str) -> dict[str, str]:
    """As accelerate tells its processes of a shipped launcher."""
    launcher = yaml.safe_load((SCRIPT.parents[2] / "configs" / "accelerate" / f"{name}.yaml").read_text())
    told = {key.upper(): str(value) for key, value in launcher["fsdp_config"].items()}
    return {"ACCELERATE_USE_FSDP": "true", **told}


def test_shards_train_as_one_process_and_go_on(runs: Any, seven: Path, one: Told, tmp_path: Path) -> None:
    told = Told(runs, seven, tmp_path)
    for name in ("live", "ema", "pieces"):
        told.tell(name, **RUNS[name])
    # SGD has no moments, with which a checkpoint of shards cannot be opened
    adam = {**RUNS["ema"], "optim": "adamw_torch_fused", "learning_rate": 1e-3}
    told.tell("adam", **adam)
    told.tell("signal", "resumed", {"signal": "SIGTERM", "step": 2, "rank": 1}, **adam)
    told.tell("signal-again", "resumed", resume=True, **adam)
    told.train(2, **fsdp("fsdp2_2gpu"))
    assert told.of("signal", "end") == [143, 143]
    for name in ("live", "ema", "pieces"):
        assert told.of(name, "end") == [0, 0]
        assert_close(runs, tmp_path / name, one.root / name, 2e-6)
    for name in ("model", "ema"):
        runs.assert_identical(*(runs.weights(tmp_path / run, STEPS, name) for run in ("resumed", "adam")))


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_the_shipped_config_trains_in_bfloat16_under_the_shipped_launcher(
    runs: Any, seven: Path, tmp_path: Path
) -> None:
    shipped = parse(runs.TrainConfig, "", ["--config", str(runs.ROOT / "configs/paper/pra_full.yaml")])
    told = Told(runs, seven, tmp_path)
    told.tell(
        "run", dtype=shipped.dtype, **{**vars(shipped.trainer), "max_steps": 2, "save_steps": 1, "save_total_limit": 2}
    )
    told.train(2, **fsdp("fsdp2_bf16_2gpu"))
    assert told.of("run", "end") == [0, 0]
    first, second = (runs.weights(tmp_path / "run", step) for step in (1, 2))
    assert {value.dtype for value in second.values()} == {torch.bfloat16}
    start = dict(load_backbone("nano-untrained").model.bfloat16().named_parameters())
    # at a rate of a hundred-thousandth, in bfloat16
    for before, after in ((start, first), (first, second)):
        trained = [name for name in after if "visual" not in name and name in before]
        moved = [name for name in trained if not torch.equal(after[name], before[name])]
        assert len(moved) > len(trained) / 2
