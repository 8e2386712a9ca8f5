"""The optimiser of a run, and checkpoints: written whole or not at all, checked before they are read.

A folder `step-00000123` holds `model.safetensors` (the trained parameters alone), `optimizer.safetensors` and
`checksums.json`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, cos, pi
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from remind.core.errors import ModelError, RemindError
from remind.core.files import atomic_folder, read_json, sha256_file, sweep, write_json, write_tensors

FOLDER = "checkpoints"
_MODEL, _OPTIMIZER, _CHECKSUMS = "model.safetensors", "optimizer.safetensors", "checksums.json"


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW, with decay on matrices alone: not on norms, biases, embeddings and a head tied to them."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed, plain = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in _trained(model).values():
        (plain if parameter.ndim < 2 or parameter in embeddings else decayed).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr, weight_decay=weight_decay)


def rate(step: int, total: int, warmup: float, schedule: Literal["cosine", "constant"]) -> float:
    """Share of the peak rate in step `step` (0-based) of `total`: a linear rise over the share `warmup`, then cosine to
    0 or constant. Other than with transformers' schedules, the first step moves the weights already."""
    rise = ceil(warmup * total)
    if step < rise:
        return (step + 1) / rise
    return 1.0 if schedule == "constant" else (1 + cos(pi * (step - rise) / max(total - rise, 1))) / 2


@contextmanager
def saving(path: Path, remaining: str = "") -> Iterator[None]:
    """Make a ModelError of a write that fails; it says what is `remaining` and can be gone on with."""
    try:
        yield
    except OSError as error:
        hint = remaining and f"; {remaining}"
        raise ModelError(f"{path}: cannot be written: {error.strerror or error}; make room there{hint}") from None


def save(run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 1) -> Path:
    """Write the checkpoint of `step` finished steps; remove all but the newest `keep`, and what killed runs left.

    Raises:
        ModelError: it cannot be written (no disk space); then there is nothing of it.
    """
    folder, parameters = run / FOLDER / f"step-{step:08d}", _trained(model)
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    files = {
        _MODEL: {name: parameter.detach() for name, parameter in parameters.items()},
        _OPTIMIZER: {f"{key}/{name}": value for name, state in states.items() for key, value in state.items()},
    }
    with (
        saving(folder, "the checkpoints before it are as they were; set resume to continue"),
        atomic_folder(folder) as temporary,
    ):
        for name, tensors in files.items():
            write_tensors(temporary / name, tensors)
        write_json(temporary / _CHECKSUMS, {name: sha256_file(temporary / name) for name in files})
    sweep(run / FOLDER)
    for old in _folders(run)[:-keep]:
        shutil.rmtree(old)
    return folder


def newest(run: Path, report: bool = True) -> Path | None:
    """The newest checkpoint that is whole, None if there never was one; prints which damaged ones it passes over.

    Raises:
        ModelError: there are checkpoints and all are damaged.
    """
    folders = _folders(run)
    for folder in reversed(folders):
        try:
            _verify(folder)
        except ModelError as error:
            if report:
                print(f"warning: {error}; falling back to the previous checkpoint", file=sys.stderr)
            continue
        return folder
    if folders:
        raise ModelError(f"{run / FOLDER}: every checkpoint is damaged; remove them to start over")
    return None


def step_of(folder: Path | None) -> int:
    """Finished steps of a checkpoint; 0 without one."""
    return 0 if folder is None else int(folder.name.removeprefix("step-"))


@torch.no_grad()
def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put trained parameters and the optimiser's moments back. Raises ModelError if they do not fit the model."""
    parameters, path = _trained(model), folder / _MODEL
    weights = _read(path)
    if odd := sorted(weights.keys() ^ parameters.keys()):
        raise ModelError(f"{path}: its parameters are not those of the model; the first that differs is {odd[0]}")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise ModelError(f"{path}: {name} has shape {tuple(weights[name].shape)}, not {tuple(parameter.shape)}")
        parameter.copy_(weights[name])
    for entry, value in _read(folder / _OPTIMIZER).items():
        key, name = entry.split("/", 1)
        # step counters are scalars and live on the CPU
        optimizer.state[parameters[name]][key] = value.to(parameters[name].device) if value.ndim else value


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _folders(run: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted((run / FOLDER).glob(f"step-{'[0-9]' * 8}"))


def _verify(folder: Path) -> None:
    """Raise ModelError if a file of the checkpoint is missing or not what was written."""
    try:
        sums = read_json(folder / _CHECKSUMS)
    except RemindError as error:
        raise ModelError(f"checkpoint is incomplete: {error}") from None
    for path in (folder / _MODEL, folder / _OPTIMIZER):
        if not path.is_file():
            raise ModelError(f"{path}: missing from the checkpoint")
        if not isinstance(sums, dict) or sums.get(path.name) != sha256_file(path):
            raise ModelError(f"{path}: its checksum does not match; the checkpoint is damaged")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as safetensors: {error}") from None
