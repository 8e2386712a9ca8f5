"""One run: train with the trainer, in this process, and answer the questions of dev or test with the trained model."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from experiments.proof.flops import fixed_cost, size_of, step_cost
from experiments.proof.states import split_records, training_records
from experiments.proof.store import RunStore, Spec, accuracy
from remind.alignment.cache import Cache
from remind.alignment.checkpoint import folder_of
from remind.alignment.config import DataConfig, TeacherConfig, TrainConfig, TrainerConfig
from remind.alignment.metrics import read_metrics
from remind.alignment.tokens import decode, example_of
from remind.alignment.trainer import Trainer
from remind.core.errors import ModelError
from remind.core.files import write_json
from remind.models.backbone import Backbone
from remind.models.load import load_backbone
from remind.states.parquet import StateRecord
from remind.states.pyramid import LEVELS
from remind.testbed.accuracy import MonitoredTrainer, correct_answers
from remind.testbed.built import Marks
from remind.testbed.ladder import write_records

#: Right (1) or wrong (0) for each question, by level.
Answers = dict[str, str]
_KEPT = ("step", "total", "hard", "lr", "grad_norm")
_KEPT_BEGINNINGS = ("share_", "jsd", "dist", "ce", "entropy")


class InMemoryTrainer(MonitoredTrainer):
    """A trainer that saves nothing: the model is measured where it is."""

    def save(self) -> Path:
        return folder_of(self.folder.path, self.step)


class Runner:
    """Performs runs one after the other; keeps the untrained model, and the states of the last training world."""

    def __init__(self, store: RunStore) -> None:
        self.store, self.config = store, store.config
        self.base = load_backbone(store.model, device="cpu")
        self.work = store.out / "work" / f"{os.getpid()}"
        self._questions: dict[tuple[str, Marks | None], list[StateRecord]] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.work, ignore_errors=True)

    def perform(self, spec: Spec) -> None:
        """Do a run and write its result, unless it is there.

        Raises:
            DataError, ConfigError, ModelError: as the trainer does, but for numbers that are not finite: then the
                state before them is measured, and the result says so under `stopped`.
        """
        if self.store.done(spec):
            return
        began = perf_counter()
        result = self._train(spec) if spec.steps else {"right": self._answer(self.base, spec), "flops": 0.0}
        seconds = {"all": perf_counter() - began}
        write_json(self.store.path(spec), {"spec": asdict(spec), **result, "seconds": seconds})

    def _answer(self, backbone: Backbone, spec: Spec) -> Answers:
        """Under x1 and x2 the first `upper` questions alone, but for the untrained model."""
        key = (spec.on, spec.condition.marks)
        if key not in self._questions:
            self._questions[key] = split_records(self.store, spec.on, *self.config.dialogues(spec.on), key[1])
        records, answers = self._questions[key], {}
        for level in LEVELS:
            some = records[: self.config.upper] if spec.steps and level != "x0" else records
            hits = correct_answers(backbone, some, level, self.config.max_new_tokens, self.config.answer_batch)
            answers[level] = "".join(str(int(hit)) for hit in hits)
        return answers

    def _train(self, spec: Spec) -> dict[str, Any]:
        states, pseudo_labelled = self._states(spec)
        trace: list[dict[str, float]] = []

        def measure(trainer: MonitoredTrainer) -> None:
            answers = self._answer(replace(self.base, model=trainer.model), spec)
            trace.append({"step": trainer.step, **{level: accuracy(right) for level, right in answers.items()}})

        out = self.work / "run"
        shutil.rmtree(out, ignore_errors=True)
        with quiet():
            trainer = InMemoryTrainer(train_config(self.store, spec, states, out), measure, spec.trace)
            stopped = fit(trainer)
        if trainer.stopped:
            raise SystemExit(143)
        rows = read_metrics(out)
        result = {
            "right": self._answer(replace(self.base, model=trainer.model), spec),
            "steps": trainer.step,
            "flops": self._flops(trainer, pseudo_labelled),
            "stopped": stopped,
            "guard": [{"step": row["step"], "what": row["what"]} for row in rows if row["kind"] == "guard"],
            "watched": [_short(row) for row in rows if row["kind"] == "eval"],
            "trace": {
                "steps": [_short(row) for row in rows if row["kind"] == "train"] if spec.trace else [],
                "accuracy": trace,
            },
        }
        del trainer
        # models hang in circles with their hooks, and many runs share one process
        gc.collect()
        return result

    def _states(self, spec: Spec) -> tuple[Path, list[StateRecord]]:
        """The folder of the states, written unless the last run had the same; and the records with pseudo-labels."""
        folder = self.work / self.store.states_key(spec)
        if not folder.exists():
            shutil.rmtree(self.work, ignore_errors=True)
            records = training_records(self.store, spec.condition, spec.seed)
            self._pseudo_labelled: list[StateRecord] = []
            if spec.arm == "sft_pseudo":
                records, self._pseudo_labelled = self._with_pseudo_labels(records)
            write_records(records, folder, {"condition": asdict(spec.condition), "seed": spec.seed})
        return folder, self._pseudo_labelled

    def _with_pseudo_labels(self, records: Sequence[StateRecord]) -> tuple[list[StateRecord], list[StateRecord]]:
        """All records, those without a label with the answer decoded from x2; and these alone."""
        unlabelled = [record for record in records if record.target is None and record.split == "train"]
        with quiet():
            cache, most = Cache(self.work / "decoded"), self.config.max_new_tokens
            targets = decode(self.base, unlabelled, "x2", most, cache, self.store.weights, batch_size=32)
        ids = {record.question_id for record in unlabelled}
        labelled = [
            replace(record, target=targets.get(record.question_id)) if record.question_id in ids else record
            for record in records
        ]
        return labelled, [record for record in labelled if record.question_id in ids]

    def _flops(self, trainer: Trainer, pseudo_labelled: Sequence[StateRecord]) -> float:
        size, objective, passes = size_of(trainer.model), trainer.cfg.objective, trainer.parts.passes
        items = trainer.data.train.items
        total = fixed_cost(items, objective, size)
        for record in pseudo_labelled:
            example = example_of(self.base.tokenizer, record)
            answer = max(1, len(example.answer))
            total += size.forward(len(example.prompts[2]) + answer - 1, answer)
        for step in range(trainer.step):
            total += step_cost([items[index] for index in trainer.order.batch(step)], objective, passes, size)
        return total


def train_config(store: RunStore, spec: Spec, states: Path, out: Path) -> TrainConfig:
    """The run as the trainer takes it."""
    config, knobs = store.config, spec.knobs
    return TrainConfig(
        states=str(states),
        out=str(out),
        model=store.model,
        seed=spec.seed,
        objective=knobs.objective,
        data=DataConfig(
            # an arm that learns from labels alone must not be given other answers
            unlabelled="x2" if knobs.objective.active else "skip",
            max_decoded=config.max_new_tokens,
            cache=str(out.parent / "cache"),
        ),
        trainer=TrainerConfig(
            lr=knobs.lr,
            max_steps=spec.steps,
            batch_size=config.batch,
            step=knobs.step,
            eval_every=config.watch_every,
            eval_limit=None,
            save_every=10**9,
        ),
        teacher=TeacherConfig(ema_decay=knobs.ema_decay),
    )


def fit(trainer: Trainer) -> str | None:
    """Train; returns why it ended early, where numbers were not finite. Other errors are raised."""
    try:
        trainer.fit()
    except ModelError as error:
        if "not finite" not in str(error):
            raise
        return str(error).split(";")[0]
    finally:
        trainer.folder.close()
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No bars and no lines: hundreds of runs would print the same."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
        if name in _KEPT or name.startswith(_KEPT_BEGINNINGS)
    }
