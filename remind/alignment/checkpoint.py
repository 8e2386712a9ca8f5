"""Training checkpoints: safetensors and JSON, written whole or not at all, checked before they are read.

A folder `step-00000123` holds `model.safetensors` (the trained parameters alone), `optimizer.safetensors`,
`random.safetensors`, `state.json` and `checksums.json`; and `ema.safetensors` where teachers are running averages.
Weights that are not trained are the base model's.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from remind.core.errors import ModelError, RemindError
from remind.core.files import atomic_folder, read_json, sha256_file, write_json, write_tensors

FOLDER = "checkpoints"
CHECKSUMS = "checksums.json"
_MODEL, _OPTIMIZER, _RANDOM, _STATE = "model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"
_EMA = "ema.safetensors"


@contextmanager
def saving(path: Path, remaining: str = "") -> Iterator[None]:
    """Make one typed line of a write that fails.

    Args:
        remaining: what is still there and can be gone on with.

    Raises:
        ModelError: no space, no permission, a file too large.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        hint = f"; {remaining}" if remaining else ""
        raise ModelError(f"{path}: cannot be written: {reason}; make room there{hint}") from None


def folder_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08d}"


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def whole(value: Tensor) -> Tensor:
    """The full tensor, detached; gathers the shards of FSDP2 (every process must call it)."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _on_disk(value: Tensor, writes: bool) -> Tensor:
    """The full tensor on the CPU; an empty one where nothing is written, which still takes part in the gathering."""
    value = whole(value)
    return value.cpu().contiguous() if writes else torch.empty(0)


def random_state(device: torch.device) -> Tensor:
    """Torch's generators of the CPU and, where there is one, the accelerator: [n] bytes."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def set_random_state(state: Tensor, device: torch.device) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    if device.type == "cuda" and len(state) > size:
        torch.cuda.set_rng_state(state[size:], device)


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    states: Tensor,
    extra: Mapping[str, Any],
    writes: bool = True,
    ema: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the checkpoint of `step` finished optimiser steps.

    Every process calls it, since shards are gathered; only the one with `writes` writes.

    Args:
        states: [processes, n] bytes of `random_state`.
        extra: plain values for `state.json`.
        ema: running averages of the trained parameters by name, where there are any.

    Raises:
        ModelError: it cannot be written (no disk space); then there is nothing of it.
    """
    weights, moments, averages = {}, {}, {}
    for name, parameter in trained_parameters(model).items():
        weights[name] = _on_disk(parameter, writes)
        for key, moment in optimizer.state.get(parameter, {}).items():
            moments[f"{key}/{name}"] = _on_disk(moment, writes)
    for name, value in (ema or {}).items():
        averages[name] = _on_disk(value, writes)
    if not writes:
        return
    with (
        saving(folder, "the checkpoints before it are as they were; set resume to continue"),
        atomic_folder(folder) as temporary,
    ):
        write_tensors(temporary / _MODEL, weights)
        write_tensors(temporary / _OPTIMIZER, moments)
        write_tensors(temporary / _RANDOM, {"torch": states.cpu()})
        write_json(temporary / _STATE, {"step": step, **extra})
        names = [_MODEL, _OPTIMIZER, _RANDOM, _STATE]
        if ema is not None:
            write_tensors(temporary / _EMA, averages)
            names.append(_EMA)
        write_json(temporary / CHECKSUMS, {name: sha256_file(temporary / name) for name in names})


def verify(folder: Path) -> None:
    """Raise ModelError if a file of the checkpoint is missing or not what was written."""
    try:
        sums = read_json(folder / CHECKSUMS)
    except RemindError as error:
        raise ModelError(f"checkpoint is incomplete: {error}") from None
    for name in {_MODEL, _OPTIMIZER, _RANDOM, _STATE} | set(sums if isinstance(sums, dict) else ()):
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{path}: missing from the checkpoint")
        if not isinstance(sums, dict) or sums.get(name) != sha256_file(path):
            raise ModelError(f"{path}: its checksum does not match; the checkpoint is damaged")


def read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = read_json(folder / _STATE)
    return state


def checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first."""
    return sorted(path for path in (run / FOLDER).glob("step-*") if path.is_dir())


def newest(run: Path, report: bool = True) -> Path | None:
    """The newest checkpoint that is whole, None if there never was one; prints which damaged ones it passes over.

    Raises:
        ModelError: there are checkpoints and all are damaged.
    """
    folders = checkpoints(run)
    for folder in reversed(folders):
        try:
            verify(folder)
        except ModelError as error:
            if report:
                print(f"warning: {error}; falling back to the previous checkpoint", file=sys.stderr)
            continue
        return folder
    if folders:
        raise ModelError(f"{run / FOLDER}: every checkpoint is damaged; remove them to start over")
    return None


def prune(run: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one, and what killed runs left half-written."""
    folders = checkpoints(run)
    for leftover in (run / FOLDER).glob(".step-*"):
        shutil.rmtree(leftover)
    for folder in folders[:-keep]:
        if best is None or folder != folder_of(run, best):
            shutil.rmtree(folder)


@contextmanager
def _tensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as safetensors: {error}") from None


def like(value: Tensor, reference: Tensor) -> Tensor:
    """`value` where and as `reference` lives: on its device, sharded as it is."""
    if isinstance(reference, DTensor):
        return distribute_tensor(value.to(reference.device), reference.device_mesh, reference.placements)
    return value.to(reference.device)


@torch.no_grad()
def _restore(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with _tensors(path) as file:
        names = set(file.keys())
        if names != tensors.keys():
            odd = sorted(names ^ tensors.keys())[0]
            raise ModelError(f"{path}: its parameters are not those of the model; the first that differs is {odd}")
        for name, tensor in tensors.items():
            value = file.get_tensor(name)
            if value.shape != tensor.shape:
                raise ModelError(f"{path}: {name} has shape {tuple(value.shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(like(value.to(tensor.dtype), tensor))


def restore_model(folder: Path, model: nn.Module) -> None:
    """Put the trained parameters of a checkpoint into the model. Raises ModelError if they do not fit it."""
    _restore(folder / _MODEL, trained_parameters(model))


def restore_ema(folder: Path, shadow: Mapping[str, Tensor]) -> None:
    """Put the running averages of a checkpoint back. Raises ModelError if it has none or others."""
    _restore(folder / _EMA, shadow)


@torch.no_grad()
def restore_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the optimiser's moments of a checkpoint back. Hyperparameters come from the config."""
    parameters = trained_parameters(model)
    optimizer.state.clear()
    with _tensors(folder / _OPTIMIZER) as file:
        for entry in file.keys():  # noqa: SIM118  (not a dict)
            key, name = entry.split("/", 1)
            value, parameter = file.get_tensor(entry), parameters[name]
            # step counters are scalars and live on the CPU
            optimizer.state[parameter][key] = value if value.ndim == 0 else like(value, parameter)


def restore_random(folder: Path, rank: int, device: torch.device) -> None:
    with _tensors(folder / _RANDOM) as file:
        # torch crashes on a state that begins in the middle of a mapped file
        states = [row.clone() for row in file.get_tensor("torch")]
    if rank < len(states):
        set_random_state(states[rank], device)
