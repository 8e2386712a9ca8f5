"""Runs and where their results are kept: what runs have in common, what sets them apart, and the file of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from experiments.proof.arms import SFT, Knobs
from experiments.proof.conditions import Condition
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, sha256_file, sha256_json
from remind.models.nano import nano_folder
from remind.perception.config import RetrieveConfig
from remind.states.pyramid import LEVELS
from remind.testbed.built import BuiltConfig, Marks
from remind.testbed.ladder import LadderConfig
from remind.testbed.world import WorldConfig
from sae.ranges import NonNegativeInt, PositiveInt, Seed, check_ranges

#: Raise it when equal settings give other results than before.
_VERSION = 3
#: Accuracy under x1 or x2 by which a run may stay below the untrained model; more is a collapse.
FALL = 0.2
Split = Literal["dev", "test"]


@dataclass
class BenchConfig:
    """What every run has in common."""

    world: WorldConfig = field(default_factory=lambda: WorldConfig(train=30, dev=20, test=20))
    """Dialogues to train, choose and report on, 20 questions each, and how hard they are. Its seed is not read."""
    ladder: LadderConfig = field(default_factory=LadderConfig)
    """What the states show. Its seed and wrong_summaries are not read."""
    dev_seed: Seed = 7001
    """World of the dev dialogues, on which settings are chosen."""
    test_seed: Seed = 9001
    """World of the test dialogues. No choice is made by them."""
    batch: PositiveInt = 8
    """Questions per optimiser step."""
    max_new_tokens: PositiveInt = 12
    """Most tokens of an answer."""
    answer_batch: PositiveInt = 64
    """Questions answered at once."""
    upper: PositiveInt = 200
    """Questions answered under x1 and x2, the first ones; the base model answers all."""
    watched: NonNegativeInt = 1
    """Dialogues of dev on which the held-out loss and the collapse guard are measured; 0: none."""
    watch_every: PositiveInt = 25
    """Steps between these measurements; the first and the last step have one in any case."""
    built: BuiltConfig | None = None
    """Build the states from the dialogues with the pipeline, with these settings; None: make them from the known
    evidence, with the errors of `ladder`."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if min(self.world.train, self.world.dev) < 1:
            raise ConfigError("world.train and world.dev must be 1 or more")
        if self.dev_seed == self.test_seed:
            raise ConfigError("dev_seed and test_seed must differ: dev would be test")

    def dialogues(self, split: Split) -> tuple[int, int]:
        """Number and seed of the dialogues that answers are measured on."""
        return (self.world.dev, self.dev_seed) if split == "dev" else (self.world.test, self.test_seed)


@dataclass(frozen=True)
class Spec:
    """One run. Its JSON is part of the name of its file.

    Attributes:
        condition: as the arm sees it.
        seed: of the training world, its labels, and the order.
        steps: optimiser steps; 0: the base model is measured.
        on: where answers are measured.
        trace: steps between measurements of the answers during training; 0: at the end alone.
    """

    arm: str
    condition: Condition
    seed: int
    knobs: Knobs
    steps: int
    on: Split = "test"
    trace: int = 0


def built_settings(built: BuiltConfig) -> dict[str, Any]:
    """The settings that name built states and the runs on them: those there were when the first were published.

    A newer one counts where it is not its default, which leaves a world's dialogues alone.
    """
    values = asdict(built)
    if built.perception.retrieve.whole_tokens == RetrieveConfig().whole_tokens:
        del values["perception"]["retrieve"]["whole_tokens"]
    return values


def base_spec(on: Split, marks: Marks | None = None) -> Spec:
    """The untrained model; it takes no condition but the marks of built states."""
    return Spec("base", Condition("clean", marks=marks), 0, SFT, 0, on)


@dataclass(frozen=True)
class RunStore:
    """The results of runs on one model: a file each.

    Attributes:
        model: folder of the untrained model.
        weights: hash of its files.
    """

    config: BenchConfig
    model: str
    weights: str
    out: Path

    def key(self, spec: Spec) -> str:
        """The name of a run. The model's folder may move, its weights must not change."""
        # numbers that the run never reads would only make it run again
        unread = ("dev",) if spec.on == "test" else ("test", "test_seed")
        common = {"version": _VERSION, "weights": self.weights, **asdict(self.config)}
        common = {name: value for name, value in common.items() if name not in unread}
        # runs on states from the known evidence keep the names they had before states could be built
        common.pop("built" if self.config.built is None else "ladder")
        if self.config.built is not None:
            common["built"] = built_settings(self.config.built)
        world = {name: value for name, value in common["world"].items() if name not in (*unread, "seed")}
        about = asdict(spec)
        if spec.condition.marks is None:
            del about["condition"]["marks"]
        return sha256_json([{**common, "world": world}, about])[:20]

    def path(self, spec: Spec) -> Path:
        return self.out / "runs" / f"{self.key(spec)}.json"

    def states_key(self, spec: Spec) -> str:
        """Equal for runs that learn from the same states."""
        return sha256_json([asdict(spec.condition), spec.seed, spec.arm == "sft_pseudo"])[:12]

    def done(self, spec: Spec) -> bool:
        return self.path(spec).exists()

    def result(self, spec: Spec) -> dict[str, Any]:
        """The result of a run. Raises DataError where there is none or it is not one."""
        path = self.path(spec)
        values = read_json(path)
        if not isinstance(values, dict) or not {"spec", "right", "flops", "seconds"} <= values.keys():
            raise DataError("not the result of a run; remove it and start again", path)
        return values


def open_store(config: BenchConfig, model: str, out: str | Path) -> RunStore:
    """The results in a folder, of a model folder or of the shipped model (nano).

    Raises:
        ConfigError: no folder with safetensors and a tokenizer.
    """
    folder = Path(nano_folder() if model == "nano" else model)
    files = sorted([*folder.glob("*.safetensors"), folder / "tokenizer.json", folder / "config.json"])
    if len(files) < 3 or not all(path.is_file() for path in files):
        raise ConfigError(f"{model}: not a model folder (config.json, tokenizer.json, *.safetensors)")
    weights = sha256_json([(path.name, sha256_file(path)) for path in files])
    return RunStore(config, str(folder.resolve()), weights, Path(out).resolve())


def accuracy(answers: str) -> float:
    """Of a string of ones (right) and zeros."""
    return answers.count("1") / len(answers) if answers else 0.0


def collapsed(run: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether the guard fired, or answers under x1 or x2 got worse by more than `FALL` than the untrained model's."""
    if run["guard"] or run["stopped"]:
        return True
    right, reference = run["right"], base["right"]
    return any(accuracy(reference[x][: len(right[x])]) - FALL > accuracy(right[x]) for x in LEVELS[1:])
