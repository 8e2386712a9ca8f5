"""Training of Top-K SAEs: several layers in one pass over the same tokens, on one process or many.

A run may have a folder: `metrics.jsonl`, and `checkpoint-<step>` with `data-<rank>.pt` (where each process is in its
data) and `trainer.pt`, which is written last and makes a checkpoint whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sae import files, step
from sae.config import SAETrainConfig
from sae.errors import ActivationError, ConfigError, FormatError, LayerError, ShapeError
from sae.parallel import Processes
from sae.step import LayerState
from sae.topk import TopKSAE

if TYPE_CHECKING:
    from transformers import TrainerCallback

METRICS, CHECKPOINTS, _STATE = "metrics.jsonl", "checkpoint-*", "trainer.pt"


@dataclass(frozen=True)
class Trained:
    """Finished coders, which take raw hidden states, and the last figures of each layer."""

    coders: dict[int, TopKSAE]
    steps: int
    tokens: int
    figures: dict[int, dict[str, float]]


def train(
    batches: Iterable[Any],
    config: SAETrainConfig,
    *,
    device: torch.device | str = "cpu",
    folder: str | Path | None = None,
    save_steps: int = 0,
    accelerator: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trained:
    """Train one coder per layer. The seed and the batches fix the result bit for bit on CPU.

    Args:
        batches: layer to activations [N, d_in], as a mapping or as `.activations` of an object; the same layers in
            each. With several processes, this process's part of each batch.
        config: settings shared by the layers.
        device: where the coders are trained.
        folder: of the run: metrics.jsonl has one line per layer every `log_every` steps (loss, aux, fvu, l0, dead, lr).
        save_steps: steps between checkpoints in the folder, of which the newest is kept; 0: none. From a checkpoint
            that is there the run goes on, to the same bits on CPU; batches without `load_state_dict` are drawn again.
        accelerator: an `accelerate.Accelerator` that joined the processes; its trackers get the figures, too.
        callbacks: of transformers. Of their events there are on_train_begin, on_log, on_step_end, on_save and
            on_train_end, with this config for `args` and layer to coder for `model`; of what they may set in `control`,
            should_save and should_training_stop, which count where any process sets them.

    Returns:
        Coders with the normalisation folded in, without gradient.

    Raises ActivationError, ShapeError or LayerError for values that are not finite or batches that do not fit;
    ConfigError for a checkpoint of another configuration; FormatError or StorageError for files.
    """
    from transformers import TrainerControl, TrainerState

    trainer = Trainer(config, device, folder, Processes(accelerator))
    processes, source, total = trainer.processes, iter(batches), config.total_steps
    # batches the start was computed from, still to be trained on
    first = [] if save_steps and trainer.resume(source) else trainer.begin(source)
    state, control = TrainerState(max_steps=total, is_world_process_zero=processes.main), TrainerControl()

    def tell(event: str, **more: Any) -> None:
        state.global_step = trainer.steps
        coders = {number: layer.coder for number, layer in trainer.layers.items()}
        for callback in callbacks:
            getattr(callback, event)(config, state, control, model=coders, **more)

    tell("on_train_begin")
    while trainer.steps < total and (drawn := first.pop(0) if first else trainer.draw(source)) is not None:
        if trainer.step(drawn.batch):
            logs = trainer.log()
            tell("on_log", logs=logs)
        control.should_save = bool(save_steps) and trainer.steps % save_steps == 0
        tell("on_step_end")
        save, stop = processes.totals([control.should_save, control.should_training_stop], trainer.device)
        if save and save_steps and trainer.steps < total:
            trainer.save(drawn)
            tell("on_save")
        if stop:
            break
    tell("on_train_end")
    return trainer.finish()


class Drawn(NamedTuple):
    """A batch, and the state of the source after it."""

    batch: dict[int, Tensor]
    source: Any


class Trainer:
    """The parts of `train`: starting, drawing batches, one step for all layers, checkpoints."""

    def __init__(
        self,
        config: SAETrainConfig,
        device: torch.device | str,
        folder: str | Path | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        # bfloat16 is for the encoder product alone
        self.dtype = torch.float64 if config.dtype == "float64" else torch.float32
        self.folder, self.processes = None if folder is None else Path(folder), processes or Processes()
        self.layers: dict[int, LayerState] = {}
        self.figures: dict[int, dict[str, float]] = {}
        self.steps = self.tokens = self.drawn = 0
        self._widths: dict[int, int] = {}

    def begin(self, source: Iterator[Any]) -> list[Drawn]:
        """Start the coders from the first batches, which are returned: they are still to be trained on."""
        first: list[Drawn] = []
        tokens = 0
        while tokens < self.config.init_tokens and (drawn := self.draw(source)) is not None:
            first.append(drawn)
            tokens += self._tokens(drawn.batch)
        if not first:
            raise ActivationError("there are no activations to train on")
        if self.folder is not None and self.processes.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / METRICS).write_bytes(b"")
        batches = [drawn.batch for drawn in first]
        sizes = [len(next(iter(batch.values()))) for batch in batches]
        for number in list(batches[0]):
            # the batches become parts of what is joined, so that no token is held twice but those of one layer
            joined = torch.cat([batch.pop(number) for batch in batches])
            for batch, part in zip(batches, joined.split(sizes), strict=True):
                batch[number] = part
            self.start({number: self.processes.gather(joined)})
        return first

    def start(self, sample: Mapping[int, Tensor]) -> None:
        """Fix normalisation and loss scale and start the coders, from [N, d_in] raw activations per layer."""
        self.layers |= {number: step.start(h, self.config, number) for number, h in sample.items()}

    def draw(self, source: Iterator[Any]) -> Drawn | None:
        """The next batch; None when the data of one of the processes, or the steps, are at an end."""
        batch = next(source, None) if self.drawn < self.config.total_steps else None
        if self.processes.totals([batch is not None], self.device)[0] < self.processes.count or batch is None:
            return None
        accepted = self.accept(self.drawn, getattr(batch, "activations", batch))
        self.drawn += 1
        return Drawn(accepted, source.state_dict() if hasattr(source, "state_dict") else None)

    def accept(self, number: int, batch: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The batch on the device in the training dtype, or an ActivationError, LayerError or ShapeError."""
        widths = self._widths or {key: h.shape[-1] for key, h in batch.items()}
        if not batch or set(batch) != set(widths):
            raise LayerError(f"batch {number} holds layers {sorted(batch)}, expected {sorted(widths) or 'some'}")
        self._widths = widths
        accepted = {}
        for key, h in batch.items():
            width = widths[key]
            if h.ndim != 2 or h.shape[1] != width or len(h) != len(next(iter(batch.values()))) or not len(h):
                raise ShapeError(f"batch {number}, layer {key}: {list(h.shape)} must be [N, {width}], N >= 1 for all")
            # first moved, then widened: what is widened where it lies takes twice as long on its way to a GPU
            h = h.to(self.device).to(self.dtype)
            # a sum is finite only if all its terms are
            if not bool(torch.isfinite(h.sum())):
                raise ActivationError(f"batch {number}, layer {key}: activations are not finite")
            accepted[key] = h
        return accepted

    def step(self, batch: Mapping[int, Tensor]) -> bool:
        """One optimiser step for every layer on raw activations; returns whether there are new `figures`."""
        config, lr, tokens = self.config, self.config.rate(self.steps), self._tokens(batch)
        log = self.steps in (0, config.total_steps - 1) or (self.steps + 1) % config.log_every == 0
        self.tokens += tokens
        for number, h in batch.items():
            common = (tokens, self.tokens, lr, config, self.processes, log)
            if (figures := step.train_step(self.layers[number], h, *common)) is not None:
                self.figures[number] = figures
        self.steps += 1
        return log

    def log(self) -> dict[str, float]:
        """Add the latest figures to the metrics file and the trackers; returns them by `layer_04/fvu` and so on."""
        if self.folder is not None and self.processes.main:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                for number, figures in self.figures.items():
                    row = {"step": self.steps, "tokens": self.tokens, "layer": number, **figures}
                    file.write(json.dumps(row) + "\n")
        rows = self.figures.items()
        flat = {f"layer_{number:02d}/{name}": value for number, row in rows for name, value in row.items()}
        if self.processes.accelerator is not None:
            self.processes.accelerator.log(flat, step=self.steps)
        return flat

    def finish(self) -> Trained:
        """Fold the normalisation into the coders."""
        coders = {}
        for number, layer in self.layers.items():
            coder = layer.coder.finalize(layer.scale, layer.mean)
            coder.W_enc = torch.nn.Parameter(coder.W_enc.detach().contiguous())
            coders[number] = coder.requires_grad_(False).eval()
        return Trained(coders, self.steps, self.tokens, self.figures)

    def save(self, last: Drawn) -> None:
        """Write a checkpoint in place of the one before; `last` is the batch of the step that has ended.

        Raises ActivationError, and keeps the one before, where a parameter is not finite.
        """
        assert self.folder is not None
        for number, layer in self.layers.items():
            if not all(bool(torch.isfinite(p.sum())) for p in layer.coder.parameters()):
                raise ActivationError(f"layer {number}: not finite after step {self.steps}; a lower lr may help")
        target = self.folder / CHECKPOINTS.replace("*", str(self.steps))
        files.write_torch(target / f"data-{self.processes.rank}.pt", last.source)
        self.processes.wait()
        if self.processes.main:
            layers = {number: layer.state_dict() for number, layer in self.layers.items()}
            counts = {"steps": self.steps, "tokens": self.tokens, "figures": self.figures, "layers": layers}
            run = {"config": asdict(self.config), "processes": self.processes.count}
            files.write_torch(target / _STATE, {**run, **counts})
            for old in self.folder.glob(CHECKPOINTS):
                if old != target:
                    shutil.rmtree(old, ignore_errors=True)
        self.processes.wait()

    def resume(self, source: Iterator[Any]) -> bool:
        """Go on from the newest checkpoint in the folder; False where there is none."""
        found = [] if self.folder is None else [*self.folder.glob(f"{CHECKPOINTS}/{_STATE}")]
        if self.folder is None or not found:
            return False
        path = max(found, key=lambda state: int(state.parent.name.rpartition("-")[2]))
        saved = files.read_torch(path, self.device)
        drawn = files.read_torch(path.parent / f"data-{self.processes.rank}.pt")
        try:
            config = saved["config"] | {"processes": saved["processes"]}
            for name, value in {**asdict(self.config), "processes": self.processes.count}.items():
                if config.get(name) != value:
                    raise ConfigError(f"{path.parent} is of a run with {name} {config.get(name)}, not {value}")
            self.layers = {number: LayerState.load(one, self.config) for number, one in saved["layers"].items()}
            self.steps, self.tokens, self.figures = saved["steps"], saved["tokens"], saved["figures"]
            self.drawn = self.steps
        except (KeyError, TypeError) as error:
            raise FormatError(f"is not a checkpoint of this version ({error!r})", path) from None
        self._widths = {number: layer.coder.d_in for number, layer in self.layers.items()}
        if drawn is not None and hasattr(source, "load_state_dict"):
            source.load_state_dict(drawn)
        else:
            for _ in range(self.drawn):
                next(source, None)
        log = self.folder / METRICS
        if self.processes.main and log.exists():
            # steps after the checkpoint are run again
            lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.steps]
            with files.atomic(log) as temporary:
                temporary.write_text("".join(kept), encoding="utf-8")
        return True

    def _tokens(self, batch: Mapping[int, Tensor]) -> int:
        """Tokens of the batch over all processes."""
        return self.processes.totals([len(next(iter(batch.values())))], self.device)[0]
