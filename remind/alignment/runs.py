"""Runs of a `transformers.Trainer`: one writer, an end where a signal asks for it, and the same bits after a kill.

`PRATrainer` and the trainers of `remind.memory_training` are made of it.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from contextlib import nullcontext
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from safetensors import SafetensorError
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from remind.alignment.metrics import METRICS, checkpoints, kept, newest, read_metrics, record
from remind.core.errors import ConfigError, ModelError
from remind.core.files import write_rows
from remind.core.processes import Termination
from remind.core.progress import without_loading_bars
from remind.core.run_folder import RunFolder


class RunTrainer(Trainer):
    """A trainer with a run folder: metrics.jsonl with a row of each step, and checkpoints to go on from.

    A subclass says what a run must keep (`_settings`), what of the model accelerate wraps (`_module`), adds a row to
    `_rows` before each step of the optimiser, and sets `_stop` where a process was sent a signal.
    """

    model: Any
    _wrapped: Any = None
    _sharded, _stop = False, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(RunState(self))
        #: Metrics of the steps since the last line of the log.
        self._rows: list[dict[str, Any]] = []
        self._signals = Termination()

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must keep, as JSON values or sets."""
        return {}

    def _more(self) -> dict[str, Any]:
        """What a checkpoint keeps besides, as JSON values."""
        return {}

    def _module(self, model: nn.Module) -> nn.Module:
        """What is run in a step, of which the model is a part."""
        return model

    def _begin(self, start: Path | None) -> None:
        """Before training from a checkpoint, or from the start; the folder is ours."""

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; or go on with a run.

        SIGTERM and Ctrl-C end the step under way on all processes, save, and raise SystemExit (143, 130).

        Args:
            resume_from_checkpoint: a checkpoint, or True: the newest whole one in `output_dir`, the start if there is
                none.

        Raises:
            ConfigError: the folder is in use or holds a run, or a resumed run differs from the one it goes on with.
            ModelError: no memory, or a loss or gradient that is not finite, with the newest checkpoint. A checkpoint
                that cannot be read or written.
        """
        out, leads = Path(self.args.output_dir), self.is_world_process_zero()
        signals = Termination(signal.SIGTERM, signal.SIGINT)
        with RunFolder(out).held() if leads else nullcontext(), signals as self._signals:
            start = self._start(out, resume_from_checkpoint)
            self._begin(start)
            try:
                result = super().train(str(start) if start else None, **kwargs)
            except Exception as error:  # of safetensors, and of torch's restricted unpickler
                if type(error).__name__ not in ("SafetensorError", "UnpicklingError"):
                    raise
                reason = " ".join(str(error).split())[:200]
                raise ModelError(f"{start}: a file of it cannot be read ({reason}); remove it, and resume") from None
        if self._stop and self.state.global_step < self.state.max_steps:
            if leads:
                step = f"step {self.state.global_step} of {self.state.max_steps}"
                print(f"stopped by {signal.Signals(self._stop).name} at {step}; resume to continue", file=sys.stderr)
            raise SystemExit(128 + self._stop)
        return result

    def _start(self, out: Path, resume: str | bool | None) -> Path | None:
        """The checkpoint to go on from; those that are not whole are removed."""
        leads, found = self.is_world_process_zero(), checkpoints(out)
        broken = [folder for folder in found if not kept(folder)]
        # those of another trainer have no mark either, but their runs have no metrics of ours
        if (found and not resume) or (broken and not (out / METRICS).is_file()):
            raise ConfigError(f"{out} already holds a run; choose another output_dir, or resume it if it is ours")
        self.accelerator.wait_for_everyone()
        if leads:
            for folder in broken:
                print(f"warning: {folder} was not written to its end, and is removed", file=sys.stderr)
                shutil.rmtree(folder)
            (out / METRICS).touch()
        self.accelerator.wait_for_everyone()
        start = newest(out) if resume is True else Path(resume) if resume else None
        step, self._kept = -1, json.loads(json.dumps(self._settings(), default=sorted))
        if start is not None:
            if (saved := kept(start)) is None:
                raise ConfigError(f"{start}: not a checkpoint of {type(self).__name__}, or not written to its end")
            if changed := sorted(name for name, value in self._kept.items() if saved["settings"].get(name) != value):
                raise ConfigError(f"{start} is of a run with other settings ({', '.join(changed)}); start a new run")
            step = int(start.name.rpartition("-")[2])
        if leads:
            # steps after the checkpoint are run again
            write_rows(out / METRICS, [row for row in read_metrics(out) if row["step"] <= step])
        return start

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        model = self.model
        self.model = self.model_wrapped = self._module(model)
        self._wrapped, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        self.model = self.callback_handler.model = model
        if resume_from_checkpoint is not None:
            if self._sharded:
                self._load_from_checkpoint(resume_from_checkpoint, model)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return self._wrapped, loader

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        norm = super()._get_grad_norm(model, grad_norm)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not isfinite(value):
            self._fail("the gradient is not finite")
        self._rows[-1]["grad_norm"] = value
        return value

    def _fail(self, what: str, about: str = "") -> NoReturn:
        where, saved = f"step {self.state.global_step + 1}", newest(self.args.output_dir)
        raise ModelError(f"{what} in {where}{about}; the newest checkpoint is {saved}")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The terms of the steps since the last line are averaged beside transformers' numbers."""
        if "loss" in logs and self._rows:
            names = [name for name, value in self._rows[-1].items() if isinstance(value, float)]
            logs = {name: fmean(row[name] for row in self._rows if name in row) for name in names} | logs
            self._rows = []
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (SafetensorError, RuntimeError, OSError) as error:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"{folder} cannot be written ({reason}); checkpoints before it are as they were") from None

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # what comes next, trainer_state.json, says that all is there
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with without_loading_bars():
            super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save and folder.is_dir():
            (folder / "training_args.bin").unlink(missing_ok=True)
            for file in folder.glob("*.safetensors"):
                file.chmod((folder / "config.json").stat().st_mode if (folder / "config.json").exists() else 0o644)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: a step reads several prompts; `tokens` in the metrics counts what it reads."""
        return 0


class RunState(TrainerCallback, ExportableState):
    """What happens between steps, and what trainer_state.json keeps of a run besides transformers' own."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"settings": self.trainer._kept, **self.trainer._more()}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            record(args.output_dir, self.trainer._rows[-1])
        if self.trainer._stop:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
