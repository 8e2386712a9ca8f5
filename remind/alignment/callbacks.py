"""Callbacks of a training run: the collapse guard, and probes.

Live targets can drift: a student is drawn to a teacher that shares its weights, and both lose what they knew. The loss
then falls while the held-out cross-entropy of the teachers rises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback

from remind.alignment.config import N_LEVELS
from remind.alignment.metrics import record
from remind.core.progress import warn

REMEDY = "set teacher_model_kind ema or base, or hard_levels [0, 1, 2], or lower learning_rate, in a new run"


class CollapseGuard(TrainerCallback):
    """Compares each measurement of the held-out loss with those before it.

    `PRATrainer` adds one with the settings of its `PRAConfig` (`guard`, `guard_ce_rise`, `guard_entropy_share`).

    Attributes:
        first: `ce0`, … and `entropy0`, … as first measured; empty before.
        lowest: the lowest `ce0`, … so far.
        collapse: what was found in mode stop; the trainer saves, stops and raises it.
    """

    def __init__(self, mode: str = "warn", ce_rise: float = 0.8, entropy_share: float = 0.2) -> None:
        self.mode, self.ce_rise, self.entropy_share = mode, ce_rise, entropy_share
        self.first: dict[str, float] = {}
        self.lowest: dict[str, float] = {}
        self.collapse: str | None = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        metrics = {name.removeprefix("eval_"): value for name, value in kwargs["metrics"].items()}
        if not (found := self.collapses(metrics)) or self.mode == "off":
            return
        what = f"collapse on held-out questions at step {state.global_step}: {'; '.join(found)}"
        if state.is_world_process_zero:
            record(args.output_dir, {"step": state.global_step, "kind": "guard", "what": found})
        if self.mode == "stop":
            self.collapse = what
            control.should_save = control.should_training_stop = True
        elif state.is_world_process_zero:
            warn(f"{what}; {REMEDY}")

    def collapses(self, metrics: Mapping[str, float]) -> list[str]:
        """What in a measurement looks like a collapse, one sentence each; remembers the measurement.

        Args:
            metrics: held-out means; of them `ce0`, `ce1`, `ce2` and `entropy0`, … are read, where they are there.
        """
        collapses: list[str] = []
        for level in range(N_LEVELS):
            ce, entropy = f"ce{level}", f"entropy{level}"
            if ce not in metrics or entropy not in metrics:
                continue
            self.first.setdefault(ce, metrics[ce])
            self.first.setdefault(entropy, metrics[entropy])
            lowest = self.lowest[ce] = min(self.lowest.get(ce, metrics[ce]), metrics[ce])
            if not metrics[ce] - lowest <= self.ce_rise:
                collapses.append(f"cross-entropy under x{level} has risen from {lowest:.3f} to {metrics[ce]:.3f}")
            before, now = self.first[entropy], metrics[entropy]
            if now < self.entropy_share * before and metrics[ce] >= self.first[ce]:
                collapses.append(f"entropy under x{level} has fallen from {before:.3f} to {now:.3f}, but not {ce}")
        return collapses


class Probe(TrainerCallback):
    """Measures the model before the first step, after every `steps` and after the last; rows go into metrics.jsonl.

    Args:
        measure: gives numbers by name from the model, e.g. log p of gold answers; called on every process.
        kind: of the rows.
    """

    def __init__(self, measure: Callable[[Any], Mapping[str, float]], steps: int, kind: str = "probe") -> None:
        self.measure, self.steps, self.kind = measure, steps, kind

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._probe(args, state, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0 or state.global_step == state.max_steps:
            self._probe(args, state, kwargs["model"])

    def _probe(self, args: Any, state: Any, model: Any) -> None:
        row = self.measure(model)
        if state.is_world_process_zero:
            record(args.output_dir, {"step": state.global_step, "kind": self.kind, **row})
