"""Runs, and where their results are kept: what sets them apart, the file of each, and the processes that do them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.proof.arms import SFT, Condition, Knobs
from experiments.proof.config import BenchConfig, Split
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, sha256_file, sha256_json
from remind.core.processes import spawned_pool
from remind.core.progress import ProgressBar
from remind.core.run_folder import RunFolder
from remind.models.nano import nano_folder
from remind.states.pyramid import LEVELS
from remind.testbed.built import Marks

#: Raise it when equal settings give other results than before.
_VERSION = 4
#: Accuracy under x1 or x2 by which a run may stay below the untrained model; more is a collapse.
FALL = 0.2


@dataclass(frozen=True)
class Spec:
    """One run. Its JSON is part of the name of its file.

    Attributes:
        condition: as the arm sees it.
        seed: of the training world, its labels, and the order.
        steps: optimiser steps; 0: the base model is measured.
        on: where answers are measured.
    """

    arm: str
    condition: Condition
    seed: int
    knobs: Knobs
    steps: int
    on: Split = "test"


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
        common = {name: value for name, value in asdict(self.config).items() if name not in unread}
        world = {name: value for name, value in common["world"].items() if name not in (*unread, "seed")}
        return sha256_json([_VERSION, self.weights, {**common, "world": world}, asdict(spec)])[:20]

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


def run_all(store: RunStore, specs: Sequence[Spec], workers: int, title: str) -> dict[str, dict[str, Any]]:
    """Do the runs that are not done yet, and read all of them. What is done is on disk: a killed script goes on.

    Args:
        workers: processes of one thread each; 0: this one.
        title: of the progress line.

    Returns:
        Results by key.

    Raises:
        RemindError: of the first run that failed; those that were done stay.
    """
    wanted = {store.key(spec): spec for spec in specs}
    todo = [spec for spec in wanted.values() if not store.done(spec)]
    if todo:
        print(f"{title}: {len(wanted)} runs, {len(wanted) - len(todo)} of them done before", file=sys.stderr)
        shared = groups(store, todo, workers)
        with RunFolder(store.out).held(), ProgressBar(title, len(todo)) as bar:
            if not workers:
                for group in shared:
                    _run_group(store, group)
                    bar.step(len(group))
                return {key: store.result(spec) for key, spec in wanted.items()}
            with spawned_pool(min(workers, len(shared)), _start_worker) as pool:
                running = {pool.submit(_run_group, store, group): len(group) for group in shared}
                _wait(running, bar)
    return {key: store.result(spec) for key, spec in wanted.items()}


def _start_worker() -> None:
    os.environ["REMIND_QUIET"] = "1"


def _wait(running: Mapping[Future[None], int], bar: ProgressBar) -> None:
    try:
        for future in as_completed(running):
            future.result()
            bar.step(running[future])
    except BaseException:
        for future in running:
            future.cancel()
        raise


def groups(store: RunStore, specs: Sequence[Spec], workers: int) -> list[list[Spec]]:
    """Runs that learn from the same states together, cut so that no worker has more than its share in one group."""
    by_states: dict[str, list[Spec]] = {}
    for spec in specs:
        by_states.setdefault(store.states_key(spec), []).append(spec)
    size = -(-len(specs) // max(1, workers))
    return [group[start : start + size] for group in by_states.values() for start in range(0, len(group), size)]


def _run_group(store: RunStore, group: Sequence[Spec]) -> None:
    import torch

    from experiments.proof.runs import Runner

    # sums have the same order in every process
    torch.set_num_threads(1)
    with Runner(store) as runner:
        for spec in group:
            runner.perform(spec)
