"""Small states, records, and whole runs on nano: how they are told, started as processes, and compared."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forked import ROOT, Forked
from safetensors.torch import load_file
from torch import Tensor

from remind.alignment.arguments import PRAConfig
from remind.alignment.metrics import read_metrics
from remind.alignment.trainer import PRATrainer
from remind.core.run_folder import as_dict
from remind.states.dataset import write_states
from remind.states.pyramid import Rendered
from remind.states.records import StateRecord
from remind.train_pra.config import DataConfig, TrainConfig, TrainerConfig
from remind.train_pra.run import train

_WORDS = ("tea", "lamp", "river", "Ana", "Ben", "moved", "city", "garden", "bought", "sold", "before", "never", "kept")


def record_of(number: int, split: str = "train", target: str | None = "", words: int = 12) -> StateRecord:
    """A record whose three levels differ; target "" makes one whose length depends on the number."""
    rng = random.Random(number)
    dialogue = " ".join(rng.choice(_WORDS) for _ in range(words + rng.randrange(6)))
    x0 = Rendered(f"Conversation\nAna: {dialogue}\nQuestion: what {number}?\n", (0, 12), (), (), ())
    x1 = Rendered(x0.text.replace("Ana:", "[ATTENTION]\nAna:", 1), (0, 12), (), (), ())
    x2 = Rendered(x1.text.replace("Question", f"Reflection: {rng.choice(_WORDS)}\nQuestion"), (0, 12), (), (), ())
    if target == "":
        quote = " ".join(rng.choice(_WORDS) for _ in range(1 + number % 5))
        target = f"<answer>{quote}</answer><explanation>Ana: {quote}</explanation>"
    return StateRecord(
        question_id=f"q{number:03d}", dialogue_id=f"d{number}", split=split, format="direct",
        question=f"what {number}?", options=(), answers=("a",), dimension=None, category=None, visual=False,
        evidence=(f"t{number}",), evidence_lines=(), evidence_found=(), images=(), images_found=(),
        target=target, x0=x0, x1=x1, x2=x2,
    )  # fmt: skip


def save_states(folder: Path, records: list[StateRecord]) -> Path:
    write_states(folder, records, {"inputs": {"made-up.json": "0" * 64}})
    return folder


@pytest.fixture(scope="session")
def make_record() -> Callable[..., StateRecord]:
    return record_of


@pytest.fixture(scope="session")
def make_states() -> Callable[[Path, list[StateRecord]], Path]:
    return save_states


@pytest.fixture(scope="session")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 training examples of unequal lengths and a question without an answer; 3 of dev, 2 of test."""
    records = [record_of(n) for n in range(6)] + [record_of(6, target=None)]
    records += [record_of(10 + n, "dev") for n in range(3)] + [record_of(20 + n, "test") for n in range(2)]
    return save_states(tmp_path_factory.mktemp("states") / "s", records)


class Runs:
    LOOP = TrainerConfig(
        learning_rate=1e-3, num_train_epochs=3, batch_size=4, eval_steps=2, save_steps=2, warmup_steps=0
    )

    def row(self, record: StateRecord) -> dict[str, Any]:
        """A record as a row of anyone's data."""
        texts = {f"x{level}": getattr(record, f"x{level}").text for level in range(3)}
        return {"question_id": record.question_id, "target": record.target, **texts}

    def trainer(self, out: Path, rows: Any, held_out: Any = None, model: Any = "nano-untrained", **more: Any) -> Any:
        """A trainer without a command; what is no argument of the class is one of its `PRAConfig`."""
        own = ("processing_class", "peft_config", "quantization_config", "callbacks", "optimizers")
        given = {name: more.pop(name) for name in own if name in more}
        settings = {name: value for name, value in vars(self.LOOP).items() if name != "more"}
        args = PRAConfig(str(out), **{**settings, "disable_tqdm": True, "use_cpu": True, **more})
        return PRATrainer(model, args, train_dataset=rows, eval_dataset=held_out, **given)

    def config(self, states: Path, out: Path, **changes: Any) -> TrainConfig:
        loop = {name: changes.pop(name) for name in list(changes) if name in vars(self.LOOP)}
        changes.setdefault("data", DataConfig(unlabelled="skip"))
        own = {"model": "nano-untrained", "states": str(states), "out": str(out)}
        return TrainConfig(**{**own, "trainer": replace(self.LOOP, **loop), **changes})

    def environment(self) -> dict[str, str]:
        # sums depend on the number of threads in their last digits
        return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}

    def start(self, cfg: TrainConfig) -> Forked:
        """The command in another process."""
        file = Path(f"{cfg.out}.yaml")
        file.write_text(yaml.safe_dump(as_dict(cfg)))
        return Forked(ROOT / "scripts" / "train_pra.py", "--config", file, environment=self.environment())

    def weights(self, run: Path, step: int = 6, name: str = "model") -> dict[str, Tensor]:
        """Of a checkpoint: the weights that are kept, the moments by number and name, or the averages (name ema)."""
        folder = run / f"checkpoint-{step}"
        if name == "optimizer":
            state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
            return {f"{n}.{key}": value for n, of in state.items() for key, value in of.items()}
        if name == "model" and (folder / "adapter_model.safetensors").exists():
            name = "adapter_model"
        return load_file(folder / f"{name}.safetensors")

    def assert_identical(self, a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []

    def assert_same_runs(self, a: Path, b: Path, step: int = 6) -> None:
        """To the bit: weights, moments, averages and metrics."""
        averages = ["ema"] if (b / f"checkpoint-{step}" / "ema.safetensors").exists() else []
        for name in ("model", "optimizer", *averages):
            self.assert_identical(self.weights(a, step, name), self.weights(b, step, name))
        assert self.timeless(a) == self.timeless(b)

    def timeless(self, run: Path, kind: str = "") -> list[dict[str, Any]]:
        machine = {"seconds", "tokens_per_second", "memory_gib"}
        rows = (row for row in read_metrics(run) if kind in ("", row["kind"]))
        return [{key: value for key, value in row.items() if key not in machine} for row in rows]


@pytest.fixture(scope="session")
def runs() -> Runs:
    return Runs()


@pytest.fixture(scope="session")
def run(runs: Runs, states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs over six examples in batches of four: six steps, every second with two samples; all are saved."""
    return train(runs.config(states, tmp_path_factory.mktemp("runs") / "run", save_steps=1, save_total_limit=None))
