"""The trainer as the runs of a queue use it: told in one place, silent, and with nothing saved."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.proof.bench import Shelf, Spec
from remind.core.errors import ModelError

if TYPE_CHECKING:
    from remind.alignment.trainer import TrainConfig, Trainer


def fit(trainer: Trainer) -> str | None:
    """Train; returns why it ended early, where numbers were not finite. Memory and disk are not what is studied."""
    try:
        trainer.fit()
    except ModelError as error:
        if "not finite" not in str(error):
            raise
        return str(error).split(";")[0]
    finally:
        trainer.folder.close()
    return None


def train_config(shelf: Shelf, spec: Spec, states: Path, out: Path) -> TrainConfig:
    """The run as the trainer is told of it."""
    from remind.alignment.data import DataConfig
    from remind.alignment.teachers import TeacherConfig
    from remind.alignment.trainer import TrainConfig, TrainerConfig

    bench, knobs = shelf.bench, spec.knobs
    return TrainConfig(
        states=str(states),
        out=str(out),
        model=bench.model,
        seed=spec.seed,
        objective=knobs.objective,
        data=DataConfig(
            # an arm that learns from labels alone must not be given other answers
            unlabelled="x2" if knobs.objective.active else "skip",
            max_decoded=bench.max_new_tokens,
            cache=str(out.parent / "cache"),
        ),
        trainer=TrainerConfig(
            lr=knobs.lr,
            max_steps=spec.steps,
            batch_size=bench.batch,
            step=knobs.step,
            eval_every=bench.watch_every,
            eval_limit=None,
            save_every=10**9,
        ),
        teacher=TeacherConfig(ema_decay=knobs.ema_decay),
    )


def in_memory(cfg: TrainConfig) -> Any:
    """The trainer, but that nothing is saved: the model is measured where it is.

    Its `probe` is called every `probe_every` steps, from before the first one on, and what it says is kept in `probed`.
    """
    from remind.alignment.checkpoint import folder_of
    from remind.alignment.trainer import Trainer

    class InMemory(Trainer):
        probe: Callable[[], dict[str, float]] | None = None
        probe_every = 1

        def __init__(self, cfg: TrainConfig) -> None:
            self.probed: list[dict[str, float]] = []
            super().__init__(cfg)

        def save(self) -> Path:
            return folder_of(self.folder.path, self.step)

        def train_step(self) -> dict[str, Any]:
            if self.step == 0:
                self._look()
            return super().train_step()

        def _evaluate_if_due(self) -> None:
            super()._evaluate_if_due()
            if self.step and (self.step % self.probe_every == 0 or self.step == self.parts.total):
                self._look()

        def _look(self) -> None:
            if self.probe is not None and (not self.probed or self.probed[-1]["step"] < self.step):
                self.probed.append({"step": self.step, **self.probe()})

    return InMemory(cfg)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No bars and no lines: hundreds of runs would say the same."""
    before = os.environ.get("REMIND_QUIET")
    os.environ["REMIND_QUIET"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["REMIND_QUIET"]
        else:
            os.environ["REMIND_QUIET"] = before
