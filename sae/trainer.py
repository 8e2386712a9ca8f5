"""Training of Top-K SAEs: several layers in one pass over the same tokens, on one process or many."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sae import checkpoint, files, step
from sae.config import SAETrainConfig
from sae.errors import ActivationError, ConfigError, FormatError, LayerError, ShapeError, Stopped
from sae.parallel import Processes
from sae.step import LayerState
from sae.topk import TopKSAE

_COUNTS = ("steps", "tokens", "drawn", "skipped")
#: Called with (steps done, steps in all, layer to its latest figures).
Progress = Callable[[int, int, Mapping[int, Mapping[str, float]]], None]


@dataclass(frozen=True)
class Checkpoints:
    """Where a run keeps what it resumes from (a folder of its own), and the steps between checkpoints."""

    folder: Path
    every: int = 500


@dataclass
class TrainerState:
    """All that changes in training. `drawn` counts the batches taken, `skipped` those left out."""

    layers: dict[int, LayerState]
    steps: int = 0
    tokens: int = 0
    drawn: int = 0
    skipped: int = 0
    figures: dict[int, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """Finished coders, which take raw hidden states, and the last figures of each layer."""

    coders: dict[int, TopKSAE]
    steps: int
    tokens: int
    skipped: int
    figures: dict[int, dict[str, float]]


def train(
    batches: Iterable[Any],
    config: SAETrainConfig,
    *,
    device: torch.device | str = "cpu",
    metrics: str | Path | None = None,
    progress: Progress | None = None,
    checkpoints: Checkpoints | None = None,
    accelerator: Any = None,
    stop: Callable[[], bool] | None = None,
) -> Trained:
    """Train one coder per layer. The seed and the batches fix the result bit for bit on CPU.

    Args:
        batches: layer to activations [N, d_in], as a mapping or as `.activations` of an object; the same layers in
            each. With several processes, this process's part of each batch.
        config: settings shared by the layers.
        device: where the coders are trained.
        metrics: a JSONL file to write: one line per layer every `log_every` steps (loss, aux, fvu, l0, dead, lr).
        progress: called after each step, and with no figures just before the first one.
        checkpoints: None: a killed run is lost. Otherwise it resumes from its last checkpoint, to the same bits on CPU;
            batches without `load_state_dict` are drawn again.
        accelerator: an `accelerate.Accelerator` that joined the processes; its trackers get the figures, too.
        stop: asked after each step; where it is true in any process, all of them end with a checkpoint.

    Returns:
        Coders with the normalisation folded in, without gradient.

    Raises Stopped where `stop` ended it before the last step; ActivationError, ShapeError or LayerError for values that
    are not finite or batches that do not fit; ConfigError for checkpoints of another configuration; FormatError or
    StorageError for files.
    """
    trainer = Trainer(config, device, metrics, Processes(accelerator))
    source = iter(batches)
    # batches the start was computed from, still to be trained on
    first: list[dict[int, Tensor]] = []
    if not (checkpoints and trainer.resume(checkpoints.folder, source)):
        first = trainer.begin(source)
    total = config.total_steps
    if progress is not None:
        progress(trainer.state.steps, total, {})
    while trainer.state.steps < total:
        batch = first.pop(0) if first else trainer.draw(source)
        if batch is None:
            break
        latest = trainer.step(batch)
        done = trainer.state.steps
        if progress is not None:
            progress(done, total, latest)
        stopping = stop is not None and trainer.processes.totals([int(stop())], trainer.device)[0] > 0
        # what the start was computed from is not in a checkpoint, and is trained on first
        if checkpoints and (stopping or done % checkpoints.every == 0) and done < total and not first:
            trainer.save(checkpoints.folder, source)
        if stopping and done < total and not (checkpoints and first):
            raise Stopped(f"after step {done} of {total}")
    return trainer.finish()


class Trainer:
    """The parts of `train`: starting, drawing batches, one step for all layers, checkpoints. All state in `state`."""

    def __init__(
        self,
        config: SAETrainConfig,
        device: torch.device | str,
        metrics: str | Path | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        # bfloat16 is for the encoder product alone
        self.dtype = torch.float64 if config.dtype == "float64" else torch.float32
        self.processes = processes or Processes()
        self.metrics = Path(metrics) if metrics is not None and self.processes.main else None
        self.state = TrainerState({})
        self._widths: dict[int, int] = {}
        self._workspace: dict[str, Tensor] = {}

    def begin(self, source: Iterator[Any]) -> list[dict[int, Tensor]]:
        """Start the coders from the first batches, which are returned: they are still to be trained on."""
        batches: list[dict[int, Tensor]] = []
        tokens = 0
        if self.metrics is not None:
            self.metrics.parent.mkdir(parents=True, exist_ok=True)
            self.metrics.write_bytes(b"")
        while tokens < self.config.init_tokens and (batch := self.draw(source)) is not None:
            batches.append(batch)
            tokens += self._tokens(batch)
        if not batches:
            raise ActivationError("there are no activations to train on")
        sizes = [len(next(iter(batch.values()))) for batch in batches]
        for number in list(batches[0]):
            # the batches become parts of what is joined, so that no token is held twice but those of one layer
            joined = torch.cat([batch.pop(number) for batch in batches])
            for batch, part in zip(batches, joined.split(sizes), strict=True):
                batch[number] = part
            self.start({number: self.processes.gather(joined)})
        return batches

    def start(self, sample: Mapping[int, Tensor]) -> None:
        """Fix normalisation and loss scale and start the coders, from [N, d_in] raw activations per layer."""
        self.state.layers |= {number: step.start(h, self.config, number) for number, h in sample.items()}

    def draw(self, source: Iterator[Any]) -> dict[int, Tensor] | None:
        """The next batch all processes can use; None when the data of one of them, or the steps, are at an end."""
        state = self.state
        while state.drawn - state.skipped < self.config.total_steps:
            batch, number = next(source, None), state.drawn
            accepted, failure = None, None
            if batch is not None:
                try:
                    accepted = self.accept(number, getattr(batch, "activations", batch))
                except ActivationError as error:
                    failure = error
            available, usable = self.processes.totals([batch is not None, accepted is not None], self.device)
            if available < self.processes.count:
                return None
            state.drawn += 1
            if usable == self.processes.count:
                return accepted
            if not self.config.skip_nonfinite:
                raise failure or ActivationError(f"batch {number}: activations of another process are not finite")
            state.skipped += 1
        return None

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
                raise ActivationError(f"batch {number}, layer {key}: activations are not finite (see skip_nonfinite)")
            accepted[key] = h
        return accepted

    def step(self, batch: Mapping[int, Tensor]) -> Mapping[int, Mapping[str, float]]:
        """One optimiser step for every layer on raw activations; returns the latest logged figures."""
        state, config = self.state, self.config
        lr = config.rate(state.steps)
        log = state.steps in (0, config.total_steps - 1) or (state.steps + 1) % config.log_every == 0
        tokens = self._tokens(batch)
        state.tokens += tokens
        for number, h in batch.items():
            current = state.layers[number]
            common = (tokens, state.tokens, lr, config, self.processes, self._workspace, log)
            if (figures := step.train_step(current, h, *common)) is not None:
                state.figures[number] = figures
        state.steps += 1
        if log:
            self._log()
        return state.figures

    def finish(self) -> Trained:
        """Fold the normalisation into the coders."""
        coders = {}
        for number, current in self.state.layers.items():
            coder = current.coder.finalize(current.scale, current.mean)
            coder.W_enc = torch.nn.Parameter(coder.W_enc.detach().contiguous())
            coders[number] = coder.requires_grad_(False).eval()
        state = self.state
        return Trained(coders, state.steps, state.tokens, state.skipped, state.figures)

    def save(self, folder: Path, source: Iterator[Any]) -> None:
        """Write a checkpoint. Raises ActivationError, and keeps the last one, where a parameter is not finite."""
        state = self.state
        for number, current in state.layers.items():
            if not all(bool(torch.isfinite(p.sum())) for p in current.coder.parameters()):
                raise ActivationError(f"layer {number}: not finite after step {state.steps}; a lower lr may help")
        plain = {
            **{name: getattr(state, name) for name in _COUNTS},
            "figures": {str(number): values for number, values in state.figures.items()},
            "config": asdict(self.config),
            "logged": self.metrics.stat().st_size if self.metrics is not None else 0,
        }
        data = source.state_dict() if hasattr(source, "state_dict") else None
        checkpoint.save(folder, state.steps, state.layers, plain, data, self.processes)

    def resume(self, folder: Path, source: Iterator[Any]) -> bool:
        """Restore the newest checkpoint in the folder; False where there is none."""
        path = checkpoint.newest(folder)
        if path is None:
            return False
        try:
            saved = files.read_json(path / checkpoint.STATE)
            config = {**saved["config"], "betas": tuple(saved["config"]["betas"])}
            if changed := [name for name, value in asdict(self.config).items() if config.get(name) != value]:
                raise ConfigError(f"{path}: from a run with another {changed[0]} ({config.get(changed[0])})")
            if saved["processes"] != self.processes.count:
                raise ConfigError(f"{path}: from a run of {saved['processes']} processes, not {self.processes.count}")
            layers = checkpoint.load(path, saved, self.config, self.device)
            figures = {int(number): values for number, values in saved["figures"].items()}
            counts = {name: int(saved[name]) for name in _COUNTS}
        except (KeyError, TypeError) as error:
            raise FormatError(f"is not a checkpoint of this version ({error!r})", path) from None
        self.state = TrainerState(layers, figures=figures, **counts)
        self._widths = {number: current.coder.d_in for number, current in layers.items()}
        data = checkpoint.load_data(path, self.processes.rank)
        if data is not None and hasattr(source, "load_state_dict"):
            source.load_state_dict(data)
        else:
            for _ in range(self.state.drawn):
                next(source, None)
        if self.metrics is not None and self.metrics.exists():
            with self.metrics.open("r+b") as file:
                file.truncate(saved["logged"])
        return True

    def _tokens(self, batch: Mapping[int, Tensor]) -> int:
        """Tokens of the batch over all processes."""
        return self.processes.totals([len(next(iter(batch.values())))], self.device)[0]

    def _log(self) -> None:
        """Append the latest figures to the metrics file, and give them to the trackers."""
        state = self.state
        if self.metrics is not None:
            with self.metrics.open("a", encoding="utf-8") as file:
                for number, figures in state.figures.items():
                    row = {"step": state.steps, "tokens": state.tokens, "layer": number, **figures}
                    file.write(json.dumps(row) + "\n")
        if self.processes.accelerator is not None:
            rows = state.figures.items()
            flat = {f"layer_{number:02d}/{name}": value for number, row in rows for name, value in row.items()}
            self.processes.accelerator.log(flat, step=state.steps)
