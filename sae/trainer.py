"""Training of Top-K SAEs: several layers in one pass over the same tokens, on one process or many."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sae import checkpoint as checkpoints
from sae import layer as layers
from sae.config import SAETrainConfig
from sae.errors import ActivationError, ConfigError, FormatError, LayerError, ShapeError
from sae.layer import LayerState, geometric_median
from sae.parallel import Processes
from sae.topk import TopKSAE

__all__ = ["Checkpoints", "SAETrainConfig", "Trained", "Trainer", "TrainerState", "geometric_median", "train"]

#: Called after each step with (steps done, steps in all, layer to its latest figures).
Progress = Callable[[int, int, Mapping[int, Mapping[str, float]]], None]


@dataclass(frozen=True)
class Checkpoints:
    """Where a run keeps what it needs to go on after it was killed.

    Attributes:
        folder: of this run alone; a run goes on from what it finds there.
        every: steps between checkpoints.
    """

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
) -> Trained:
    """Train one coder per layer. The seed and the batches fix the result bit for bit on CPU.

    Args:
        batches: layer to activations [N, d_in], as a mapping or as `.activations` of an object; the same layers in
            each. They may end before all steps are done. With several processes, this process's part of each batch.
        config: settings shared by the layers.
        device: where the coders are trained.
        metrics: a JSONL file to write: one line per layer every `log_every` steps (loss, aux, fvu, l0, dead, lr).
        progress: called after each step.
        checkpoints: None: a killed run is lost. Otherwise it goes on from its last checkpoint, to the same bits on CPU:
            batches with `state_dict` and `load_state_dict` (`sae.buffer`) are put back, others drawn again.
        accelerator: an `accelerate.Accelerator` that joined the processes; its trackers are told the figures, too.

    Returns:
        Coders with the normalisation folded in, without gradient.

    Raises:
        ActivationError: values that are not finite (batch and layer are named), or no batch at all.
        ShapeError, LayerError: batches that do not fit together.
        ConfigError: checkpoints of another configuration or number of processes.
        FormatError, StorageError: checkpoints or metrics that cannot be read or written.
    """
    trainer = Trainer(config, device, metrics, Processes(accelerator))
    source = iter(batches)
    # what was looked at for the start and is still to be trained on
    waiting: list[dict[int, Tensor]] = []
    if not (checkpoints and trainer.resume(checkpoints.folder, source)):
        waiting = trainer.begin(source)
    total = config.total_steps
    while trainer.state.steps < total:
        ready = waiting.pop(0) if waiting else trainer.draw(source)
        if ready is None:
            break
        latest = trainer.step(ready)
        done = trainer.state.steps
        if progress is not None:
            progress(done, total, latest)
        if checkpoints and done % checkpoints.every == 0 and done < total and not waiting:
            trainer.save(checkpoints.folder, source)
    return trainer.finish()


class Trainer:
    """The loop body of `train`, with all that changes in `state`."""

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

    # data

    def begin(self, source: Iterator[Any]) -> list[dict[int, Tensor]]:
        """Start the coders from the first batches, which are returned: they are to be trained on."""
        config, first, seen = self.config, [], 0
        if self.metrics is not None:
            self.metrics.parent.mkdir(parents=True, exist_ok=True)
            self.metrics.write_bytes(b"")
        while seen < config.init_tokens:
            if (ready := self.draw(source)) is None:
                break
            first.append(ready)
            seen += self._tokens(ready)
        if not first:
            raise ActivationError("there is not a single batch of activations to train on")
        gather = self.processes.gather
        self.start({layer: gather(torch.cat([ready[layer] for ready in first])) for layer in first[0]})
        return first

    def start(self, sample: Mapping[int, Tensor]) -> None:
        """Fix normalisation and loss scale and start the coders, from [N, d_in] raw activations per layer."""
        for layer, h in sample.items():
            self.state.layers[layer] = layers.start(h, self.config, layer)

    def draw(self, source: Iterator[Any]) -> dict[int, Tensor] | None:
        """The next batch all processes can use; None when the data of one of them, or the steps, are at an end."""
        state = self.state
        while state.drawn - state.skipped < self.config.total_steps:
            batch, number = next(source, None), state.drawn
            ready, failure = None, None
            if batch is not None:
                try:
                    ready = self.accept(number, getattr(batch, "activations", batch))
                except ActivationError as error:
                    failure = error
            there, usable = self.processes.totals([batch is not None, ready is not None], self.device)
            if there < self.processes.count:
                return None
            state.drawn += 1
            if usable == self.processes.count:
                return ready
            if not self.config.skip_nonfinite:
                raise failure or ActivationError(f"batch {number}: activations of another process are not finite")
            state.skipped += 1
        return None

    def accept(self, number: int, batch: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The batch on the device in the training dtype.

        Raises:
            ActivationError: values that are not finite.
            LayerError, ShapeError: another set of layers, or shapes that do not fit.
        """
        widths = self._widths or {layer: h.shape[-1] for layer, h in batch.items()}
        if not batch or set(batch) != set(widths):
            raise LayerError(f"batch {number} holds layers {sorted(batch)}, expected {sorted(widths) or 'some'}")
        self._widths = widths
        ready = {}
        for layer, h in batch.items():
            width = widths[layer]
            if h.ndim != 2 or h.shape[1] != width or len(h) != len(next(iter(batch.values()))) or not len(h):
                raise ShapeError(f"batch {number}, layer {layer}: {list(h.shape)} must be [N, {width}], N >= 1 for all")
            h = h.to(self.device, self.dtype)
            # a sum is finite only if all its terms are (or overflows, with terms no coder could be trained on)
            if not bool(torch.isfinite(h.sum())):
                raise ActivationError(f"batch {number}, layer {layer}: activations are not finite (see skip_nonfinite)")
            ready[layer] = h
        return ready

    # training

    def step(self, batch: Mapping[int, Tensor]) -> Mapping[int, Mapping[str, float]]:
        """One optimiser step for every layer on raw activations; returns the latest logged figures."""
        state, config = self.state, self.config
        rate = config.rate(state.steps)
        last = state.steps + 1 == config.total_steps
        log = last or (state.steps + 1) % config.log_every == 0 or state.steps == 0
        tokens = self._tokens(batch)
        state.tokens += tokens
        for layer, h in batch.items():
            one = state.layers[layer]
            out, x = layers.train_step(one, h, tokens, state.tokens, rate, config, self.processes, self._workspace)
            if log:
                state.figures[layer] = layers.figures(out, x, one, tokens, rate, config, self.processes)
        state.steps += 1
        if log:
            self._log()
        return state.figures

    def finish(self) -> Trained:
        """Fold the normalisation into the coders."""
        coders = {}
        for layer, one in self.state.layers.items():
            coder = one.coder.finalize(one.scale, one.mean)
            coder.W_enc = torch.nn.Parameter(coder.W_enc.detach().contiguous())
            coders[layer] = coder.requires_grad_(False).eval()
        state = self.state
        return Trained(coders, state.steps, state.tokens, state.skipped, state.figures)

    def _tokens(self, batch: Mapping[int, Tensor]) -> int:
        """Tokens of the batch over all processes."""
        return self.processes.totals([len(next(iter(batch.values())))], self.device)[0]

    # records

    def save(self, folder: Path, source: Iterator[Any]) -> None:
        """Write a checkpoint. Raises ActivationError, and keeps the last one, where a parameter is not finite."""
        state = self.state
        for layer, one in state.layers.items():
            if not all(bool(torch.isfinite(p.sum())) for p in one.coder.parameters()):
                raise ActivationError(f"layer {layer}: not finite after step {state.steps}; a lower lr may help")
        plain = {
            "steps": state.steps,
            "tokens": state.tokens,
            "drawn": state.drawn,
            "skipped": state.skipped,
            "figures": {str(layer): values for layer, values in state.figures.items()},
            "config": asdict(self.config),
            "logged": self.metrics.stat().st_size if self.metrics is not None else 0,
        }
        data = source.state_dict() if hasattr(source, "state_dict") else None
        checkpoints.save(folder, state.steps, state.layers, plain, data, self.processes)

    def resume(self, folder: Path, source: Iterator[Any]) -> bool:
        """Go on from the newest checkpoint in the folder; False where there is none."""
        found = checkpoints.newest(folder)
        if found is None:
            return False
        try:
            saved = checkpoints.read_state(found)
            was = {**saved["config"], "betas": tuple(saved["config"]["betas"])}
            if odd := [name for name, value in asdict(self.config).items() if was.get(name) != value]:
                raise ConfigError(f"{found}: of a run with another {odd[0]} ({was.get(odd[0])})")
            if saved["processes"] != self.processes.count:
                raise ConfigError(f"{found}: of a run of {saved['processes']} processes, not {self.processes.count}")
            state_layers = checkpoints.load(found, saved, self.config, self.device)
            figures = {int(layer): values for layer, values in saved["figures"].items()}
            counts = {name: int(saved[name]) for name in ("steps", "tokens", "drawn", "skipped")}
        except (KeyError, TypeError) as error:
            raise FormatError(f"is not a checkpoint of this version ({error!r})", found) from None
        self.state = TrainerState(state_layers, figures=figures, **counts)
        self._widths = {layer: one.coder.d_in for layer, one in state_layers.items()}
        data = checkpoints.load_data(found, self.processes.rank)
        if data is not None and hasattr(source, "load_state_dict"):
            source.load_state_dict(data)
        else:
            for _ in range(self.state.drawn):
                next(source, None)
        if self.metrics is not None and self.metrics.exists():
            with self.metrics.open("r+b") as file:
                file.truncate(saved["logged"])
        return True

    def _log(self) -> None:
        """Append the latest figures to the metrics, and tell the trackers."""
        state = self.state
        if self.metrics is not None:
            with self.metrics.open("a", encoding="utf-8") as file:
                for layer, figures in state.figures.items():
                    row = {"step": state.steps, "tokens": state.tokens, "layer": layer, **figures}
                    file.write(json.dumps(row) + "\n")
        if self.processes.accelerator is not None:
            rows = state.figures.items()
            flat = {f"layer_{layer:02d}/{name}": value for layer, row in rows for name, value in row.items()}
            self.processes.accelerator.log(flat, step=state.steps)
