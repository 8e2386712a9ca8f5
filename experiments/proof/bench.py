"""What all runs of a script have in common, and what sets one run apart; together they name its file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from experiments.proof.arms import Knobs
from experiments.proof.conditions import Condition
from remind.core.errors import ConfigError
from remind.core.files import sha256_file, sha256_json
from remind.models.nano import nano_folder
from remind.testbed.ladder import LadderConfig
from remind.testbed.world import WorldConfig

#: Raise it when equal settings give other results than before.
_VERSION = 2
On = Literal["dev", "test"]


@dataclass(frozen=True)
class Bench:
    """Common to all runs.

    Attributes:
        model: folder of the untrained model.
        weights: hash of its files.
        world: training, dev and test dialogues, and how hard they are; its seed is not read.
        upper: questions answered under x1 and x2, the first ones; under x0 all are.
        watched: dialogues of dev on which the loss is watched, every `watch_every` steps.
    """

    model: str
    weights: str
    world: WorldConfig
    ladder: LadderConfig
    dev_seed: int
    test_seed: int
    batch: int
    max_new_tokens: int
    answer_batch: int
    upper: int
    watched: int
    watch_every: int

    def dialogues(self, on: On) -> tuple[int, int]:
        """Number and seed of the dialogues that answers are measured on."""
        return (self.world.dev, self.dev_seed) if on == "dev" else (self.world.test, self.test_seed)


@dataclass(frozen=True)
class Spec:
    """One run.

    Attributes:
        condition: as the arm sees it.
        seed: of the training world, its labels, and the order.
        steps: optimiser steps; 0: the base model is measured.
        on: where answers are measured.
        trace: steps between measurements of the answers on the way; 0: at the end alone.
    """

    arm: str
    condition: Condition
    seed: int
    knobs: Knobs
    steps: int
    on: On = "test"
    trace: int = 0

    def values(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def pseudo(self) -> bool:
        """Whether questions without a label get one decoded from x2."""
        return self.arm == "sft_pseudo"


def base_spec(on: On) -> Spec:
    """The untrained model; the condition means nothing to it."""
    return Spec("base", Condition("clean"), 0, Knobs(lambda_hard=1.0, edges=()), 0, on)


@dataclass(frozen=True)
class Shelf:
    """Where the results are kept."""

    bench: Bench
    out: Path

    @cached_property
    def _common(self) -> dict[str, Any]:
        values = asdict(self.bench)
        # the folder may move, the weights must not change
        del values["model"]
        return {"version": _VERSION, **values}

    def key(self, spec: Spec) -> str:
        # numbers that the run never reads would only make it run again
        unread = ("dev",) if spec.on == "test" else ("test", "test_seed")
        common = {name: value for name, value in self._common.items() if name not in unread}
        world = {name: value for name, value in common["world"].items() if name not in (*unread, "seed")}
        return sha256_json([{**common, "world": world}, spec.values()])[:20]

    def path(self, spec: Spec) -> Path:
        return self.out / "runs" / f"{self.key(spec)}.json"

    def data_key(self, spec: Spec) -> str:
        """Equal for runs that learn from the same states."""
        return sha256_json([asdict(spec.condition), spec.seed, spec.pseudo])[:12]


def make_bench(model: str | Path, **values: Any) -> Bench:
    """A bench on a model folder, its weights hashed; nano: the shipped one.

    Raises:
        ConfigError: not a folder with safetensors and a tokenizer.
    """
    folder = Path(nano_folder() if str(model) == "nano" else model)
    files = sorted([*folder.glob("*.safetensors"), folder / "tokenizer.json", folder / "config.json"])
    if not folder.is_dir() or len(files) < 3 or not all(path.is_file() for path in files):
        raise ConfigError(f"{model}: not a model folder (config.json, tokenizer.json, *.safetensors)")
    weights = sha256_json([(path.name, sha256_file(path)) for path in files])
    return Bench(str(folder.resolve()), weights, **values)
