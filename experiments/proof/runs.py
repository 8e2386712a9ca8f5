"""One run: train with the trainer, in this process, and answer the questions of dev or test with what it learned."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from experiments.proof.bench import Shelf, Spec
from experiments.proof.conditions import describe, split_records, training_records
from experiments.proof.training import fit, in_memory, quiet, train_config
from remind.core.files import write_json
from remind.states.parquet import StateRecord
from remind.states.pyramid import LEVELS
from remind.testbed.ladder import write_records
from remind.testbed.score import answered

if TYPE_CHECKING:
    from remind.alignment.trainer import Trainer
    from remind.models.backbone import Backbone

Answers = dict[str, str]


class Workshop:
    """Does runs one after the other; keeps the untrained model, and the states of the last training world."""

    def __init__(self, shelf: Shelf) -> None:
        from remind.models.load import load_backbone

        self.shelf, self.bench = shelf, shelf.bench
        self.base: Backbone = load_backbone(self.bench.model, device="cpu")
        self._asked: dict[str, list[StateRecord]] = {}
        self._states: tuple[str, Path] | None = None

    def asked(self, on: str) -> list[StateRecord]:
        """The questions that are answered."""
        if on not in self._asked:
            number, seed = self.bench.dialogues("dev" if on == "dev" else "test")
            self._asked[on] = split_records(self.bench.world, self.bench.ladder, on, number, seed)
        return self._asked[on]

    def perform(self, spec: Spec) -> dict[str, Any]:
        """Do a run and write its result, unless it is there.

        Raises:
            DataError, ConfigError, ModelError: as the trainer does, but for numbers that are not finite: then the
                state before them is measured, and the result says so under `stopped`.
        """
        path = self.shelf.path(spec)
        if path.exists():
            return {}
        began = perf_counter()
        found = self._measure_base(spec) if spec.steps == 0 else self._train(spec)
        found = {"spec": spec.values(), **found}
        found["seconds"] |= {"all": perf_counter() - began}
        write_json(path, found)
        return found

    def _measure_base(self, spec: Spec) -> dict[str, Any]:
        began = perf_counter()
        answers = self.answer(self.base, spec.on, None)
        return {"right": answers, "flops": 0.0, "seconds": {"answers": perf_counter() - began}}

    def answer(self, backbone: Backbone, on: str, upper: int | None) -> Answers:
        """Right (1) or not (0) for each question under each level, the first `upper` ones under x1 and x2."""
        records, right = self.asked(on), {}
        for level in LEVELS:
            some = records if level == "x0" else records[:upper]
            hits = answered(backbone, some, level, self.bench.max_new_tokens, self.bench.answer_batch)
            right[level] = "".join(str(int(hit)) for hit in hits)
        return right

    def _probe(self, backbone: Backbone, spec: Spec) -> dict[str, float]:
        return {level: share(right) for level, right in self.answer(backbone, spec.on, self.bench.upper).items()}

    # training

    def _train(self, spec: Spec) -> dict[str, Any]:
        from remind.alignment.metrics import read_metrics

        out = self.work / "run"
        shutil.rmtree(out, ignore_errors=True)
        began = perf_counter()
        decoded = self._prepare(spec)
        prepared = perf_counter()
        with quiet():
            trainer = in_memory(train_config(self.shelf, spec, self._folder(spec), out))
            learned = replace(self.base, model=trainer.workers.model)
            if spec.trace:
                trainer.probe = partial(self._probe, learned, spec)
                trainer.probe_every = spec.trace
            stopped = fit(trainer)
        if trainer.stopped:
            raise SystemExit(143)
        trained = perf_counter()
        rows = read_metrics(out)
        found = {
            "right": self.answer(learned, spec.on, self.bench.upper),
            "steps": trainer.step,
            "flops": self._cost(trainer, spec, decoded),
            "stopped": stopped,
            "guard": [{"step": row["step"], "what": row["what"]} for row in rows if row["kind"] == "guard"],
            "watched": [_short(row) for row in rows if row["kind"] == "eval"],
            "trace": {
                "steps": [_short(row) for row in rows if row["kind"] == "train"] if spec.trace else [],
                "accuracy": trainer.probed,
            },
        }
        steps = sum(row["seconds"] for row in rows if row["kind"] == "train")
        answered = perf_counter()
        shutil.rmtree(out)
        del trainer, learned
        # models hang in circles with their hooks, and many runs share one process
        gc.collect()
        found["seconds"] = {
            "states": prepared - began,
            "steps": steps,
            "around": trained - prepared - steps,
            "answers": answered - trained,
        }
        return found

    @property
    def work(self) -> Path:
        return self.shelf.out / "work" / f"{os.getpid()}"

    def _folder(self, spec: Spec) -> Path:
        return self.work / self.shelf.data_key(spec)

    def _prepare(self, spec: Spec) -> list[StateRecord]:
        """Write the states of a run, unless the last run had the same; returns those whose answers were decoded."""
        key = self.shelf.data_key(spec)
        if self._states is None or self._states[0] != key:
            self.leave()
            bench = self.bench
            made = training_records(bench.world, bench.ladder, spec.condition, spec.seed, bench.watched, bench.dev_seed)
            self._pseudo: list[StateRecord] = []
            if spec.pseudo:
                made = self._with_pseudo(made)
            write_records(made, self._folder(spec), describe(spec.condition, spec.seed))
            self._states = (key, self._folder(spec))
        return self._pseudo

    def _with_pseudo(self, made: Sequence[StateRecord]) -> list[StateRecord]:
        from remind.alignment.cache import Cache, Crew
        from remind.alignment.decoded import decode

        empty = [record for record in made if record.target is None and record.split == "train"]
        with quiet():
            cache = Cache(self.work / "decoded")
            most = self.bench.max_new_tokens
            texts = decode(self.base, empty, "x2", most, cache, Crew(), self.bench.weights, None, 32)
        targets = {record.question_id: texts.get(record.question_id) for record in empty}
        filled = [
            replace(record, target=targets[record.question_id]) if record.question_id in targets else record
            for record in made
        ]
        self._pseudo = [record for record in filled if record.question_id in targets]
        return filled

    def _cost(self, trainer: Trainer, spec: Spec, decoded: Sequence[StateRecord]) -> float:
        from experiments.proof.flops import fixed_cost, size_of, step_cost
        from remind.alignment.tokens import row_of

        size, objective, passes = size_of(trainer.workers.model), trainer.cfg.objective, trainer.parts.passes
        items = trainer.data.train.items
        total = fixed_cost(items, objective, size)
        for record in decoded:
            row = row_of(self.base.tokenizer, record)
            answer = 1 if row.answer is None else len(row.answer)
            total += size.forward(len(row.prompts[2]) + answer - 1, answer)
        for step in range(trainer.step):
            total += step_cost([items[index] for index in trainer.order.batch(step)], objective, passes, size)
        return total

    def leave(self) -> None:
        """Remove the states and what was computed of them."""
        self._states = None
        shutil.rmtree(self.work, ignore_errors=True)


def share(right: str) -> float:
    """Accuracy of a string of ones and zeros."""
    return right.count("1") / len(right) if right else 0.0


def _short(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("step", "total", "hard", "lr", "grad_norm")
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
        if name in kept or name.startswith(("share_", "jsd", "dist", "ce", "entropy"))
    }
