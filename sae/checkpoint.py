"""Checkpoints of a run, from which training resumes bit for bit: safetensors and JSON, whole or absent.

A folder holds `latest.json`, which names the newest folder `step-00000123` beside it: one `layer_<LL>.safetensors` per
coder (parameters, moments, silent counts), `data-<rank>.safetensors` and `.json` (position of each process in its data)
and `state.json`. `latest.json` is replaced last, so it never names a checkpoint that is half written.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sae import files
from sae.config import SAETrainConfig
from sae.errors import FormatError
from sae.parallel import Processes
from sae.step import LayerState, feature_major, make_optimizer, stored
from sae.topk import TopKSAE

LATEST = "latest.json"
STATE = "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    folder: Path,
    step: int,
    layers: Mapping[int, LayerState],
    state: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    processes: Processes,
) -> None:
    """Write the state after `step` finished steps and delete older ones. Every process calls it.

    `state` is plain values; `data`, tensors and plain values, is the position of this process in its data. Raises
    StorageError for a file that cannot be written; an older checkpoint stays as it was.
    """
    target = folder / f"step-{step:08d}"
    if processes.main and target.exists():
        shutil.rmtree(target)
    processes.wait()
    if data is not None:
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        files.write_tensors(target / f"data-{processes.rank}.safetensors", tensors)
        plain = {name: value for name, value in data.items() if name not in tensors}
        files.write_json(target / f"data-{processes.rank}.json", plain)
    if processes.main:
        scalars = {}
        for number, layer in layers.items():
            files.write_tensors(target / f"layer_{number:02d}.safetensors", _tensors(layer))
            scalars[str(number)] = {"scale": layer.scale, "mse_scale": layer.mse_scale, "d_in": layer.coder.d_in}
        files.write_json(target / STATE, {**state, "layers": scalars, "processes": processes.count})
    processes.wait()
    if processes.main:
        files.write_json(folder / LATEST, {"folder": target.name})
        for old in folder.glob("step-*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder, if there is one."""
    if not (folder / LATEST).exists():
        return None
    name = files.read_json(folder / LATEST).get("folder")
    if not isinstance(name, str) or not re.fullmatch(r"step-\d+", name):
        raise FormatError(f"names no checkpoint: {name!r}", folder / LATEST)
    return folder / name


def load(folder: Path, state: Mapping[str, Any], config: SAETrainConfig, device: torch.device) -> dict[int, LayerState]:
    """Read the layers of a checkpoint with this `STATE`.

    Raises FormatError for a file that is missing, damaged or not of this configuration.
    """
    layers: dict[int, LayerState] = {}
    for number, scalars in state["layers"].items():
        path = folder / f"layer_{int(number):02d}.safetensors"
        tensors = {name: value.to(device) for name, value in files.read_tensors(path).items()}
        coder = TopKSAE(scalars["d_in"], config.d_sae, config.k).to(tensors["W_dec"])
        feature_major(coder)
        optimizer = make_optimizer(coder, config)
        memory = stored(coder)
        if any(name not in tensors or tensors[name].shape != value.shape for name, value in memory.items()):
            raise FormatError("does not match this configuration (d_sae or d_in differ)", path)
        for (name, value), parameter in zip(memory.items(), optimizer.param_groups[0]["params"], strict=True):
            value.copy_(tensors[name])
            moments = {moment: tensors[f"{moment}/{name}"].clone() for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": tensors["step"].clone(), **moments}
        layers[int(number)] = LayerState(
            coder, optimizer, scalars["scale"], tensors.get("mean"), scalars["mse_scale"], tensors["silent"].clone()
        )
    return layers


def load_data(folder: Path, rank: int) -> dict[str, Any] | None:
    """`data` as the process of this rank gave it to `save`."""
    path = folder / f"data-{rank}.json"
    if not path.exists():
        return None
    return {**files.read_json(path), **files.read_tensors(path.with_suffix(".safetensors"))}


def _tensors(layer: LayerState) -> dict[str, Tensor]:
    tensors = {"silent": layer.silent} | ({} if layer.mean is None else {"mean": layer.mean})
    parameters = layer.optimizer.param_groups[0]["params"]
    for (name, tensor), parameter in zip(stored(layer.coder).items(), parameters, strict=True):
        moments = layer.optimizer.state[parameter]
        tensors |= {name: tensor, "step": moments["step"]}
        tensors |= {f"{moment}/{name}": moments[moment] for moment in _MOMENTS}
    return tensors
