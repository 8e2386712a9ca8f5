"""Train one SAE per layer on dialogues and save them with what grounding needs (Eq. 2)."""

from __future__ import annotations

import atexit
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import ConfigError, ModelError
from remind.core.files import input_hashes, read_json, sha256_json, write_json
from remind.data.readers import mapping_files
from remind.train_sae.config import TrainSAEConfig, default_layers
from remind.train_sae.corpus import data_paths, read_corpus
from sae.config import SAETrainConfig
from sae.errors import LayerError, SAEError

if TYPE_CHECKING:
    from remind.models.backbone import Backbone
    from sae.parallel import Processes

#: Settings in which a resumed run may differ from the one it continues.
_FREE = {"out", "resume", "overwrite", "trackers", "checkpoint_every", "cache", "device", "buffer_on"}
_FREE |= {"idf_turns", "loss_windows"}


def train_sae(cfg: TrainSAEConfig) -> Path:
    """Train, evaluate and save one SAE per layer, alone or under `accelerate launch`, on a part of each batch each.

    After SIGTERM to any process all of them end the step under way, save, and raise SystemExit with status 143.

    Returns the folder with `metrics.jsonl` and one SAE per layer, each with `training.json` and `idf.safetensors`.

    Raises:
        ConfigError, DataError, FormatError: settings or data that cannot be used.
        ModelError: the backbone, its layers or its activations; a disk that is full.
    """
    from remind.models.backbone import load_backbone
    from remind.train_sae.run import CHECKPOINTS, Run
    from sae.checkpoint import LATEST

    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    processes = _processes(cfg)
    if processes.count > 1:
        cfg.device = str(processes.accelerator.device)
    training, held_out = read_corpus(cfg)
    backbone = load_backbone(cfg.backbone, dtype=cfg.dtype, device=cfg.device)
    layers = _layers(cfg, backbone)
    hashes = input_hashes([*data_paths(cfg.data), *mapping_files(cfg.format)])
    partial = out.with_name(f"{out.name}.partial")
    _claim(partial, cfg, hashes, processes)
    try:
        run = Run(cfg, backbone, layers, processes, partial)
        run.train(training)
        run.evaluate(held_out)
        if processes.main:
            run.save(out, hashes)
            shutil.rmtree(partial)
        processes.wait()
    except SAEError as error:
        raise ModelError(f"{cfg.backbone}: {error}") from None
    finally:
        # a run without a checkpoint cannot be resumed and leaves nothing
        if processes.main and not (partial / CHECKPOINTS / LATEST).exists():
            shutil.rmtree(partial, ignore_errors=True)
    if cfg.trackers:
        processes.accelerator.end_training()
    if processes.main:
        print(f"SAEs: {out}")
    return out


def quick_sae(
    backbone: str,
    data: Sequence[str],
    cache: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    steps: int = 400,
    **settings: Any,
) -> Path:
    """Train a small SAE of one late layer for demos, kept under `cache` by model, data and settings.

    Args:
        settings: fields of `TrainSAEConfig` in place of the small ones; layers may also be "middle" and "late".

    Returns:
        A folder for `sae.load_layers`.
    """
    trainer = SAETrainConfig(
        d_sae=2048,
        steps=steps,
        batch_size=1024,
        lr=1e-3,
        warmup_steps=20,
        decay_share=0.5,
        dead_tokens=50_000,
    )
    small = {"layers": ["late"], "trainer": trainer, "limit": 8000, "loss_windows": 0, "checkpoint_every": 0}
    fields = {**small, "backbone": backbone, "device": device, "dtype": dtype, **settings}
    cfg = TrainSAEConfig("", [str(path) for path in data], **fields)
    folder = Path(backbone)
    # a model folder or GGUF file may be written anew under the same name
    files = [(path, path.stat()) for path in sorted([folder, *folder.rglob("*")]) if path.is_file()]
    parts = {
        "config": {**asdict(cfg), "data": sorted(input_hashes(data_paths(cfg.data)).values())},
        "model": [(str(path.relative_to(folder.parent)), stat.st_size, stat.st_mtime_ns) for path, stat in files]
        or backbone,
        "version": version("remind-toolkit"),
    }
    out = Path(cache) / f"{folder.name}-{sha256_json(parts)[:16]}"
    cfg.out = str(out)
    return out if out.is_dir() else train_sae(cfg)


def _processes(cfg: TrainSAEConfig) -> Processes:
    from sae.parallel import Processes

    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not cfg.trackers:
        return Processes()
    import torch
    from accelerate import Accelerator
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    if unknown := [name for name in cfg.trackers if name not in LOGGER_TYPE_TO_CLASS]:
        raise ConfigError(f"trackers: no tracker {unknown[0]!r}; there are {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
    device = torch.accelerator.current_accelerator(check_available=True)
    # without `cpu`, processes on a machine without a GPU would each train alone; Apple's GPUs have no float64
    accelerator = Accelerator(
        cpu=device is None or device.type == "mps",
        log_with=cfg.trackers or None,
        project_dir=f"{cfg.out}.trackers",
    )
    if int(os.environ.get("WORLD_SIZE", "1")) != accelerator.num_processes:
        raise ConfigError("launched as processes that did not connect; see configs/accelerate/cpu_2.yaml")
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ConfigError("SAEs are trained data-parallel; launch with a DDP configuration, not FSDP or DeepSpeed")
    if accelerator.num_processes > 1:
        atexit.register(accelerator.state.destroy_process_group)
    if cfg.trackers:
        accelerator.init_trackers("remind-sae", config={name: str(value) for name, value in asdict(cfg).items()})
    return Processes(accelerator)


def _layers(cfg: TrainSAEConfig, backbone: Backbone) -> list[int]:
    from sae.hooks import resolve_layers

    # late: after the last block but one, where grounding gains most on real text; middle: where steering changes most
    named = {"late": max(1, backbone.n_layers - 1), "middle": max(1, backbone.n_layers // 2)}
    names = default_layers(backbone.n_layers) if cfg.layers is None else cfg.layers
    try:
        return resolve_layers(backbone.model, [named.get(str(name), name) for name in names])
    except LayerError as error:
        raise ModelError(f"{cfg.backbone}: {error}") from None


def _claim(partial: Path, cfg: TrainSAEConfig, hashes: dict[str, str], processes: Processes) -> None:
    """Make the folder of the run, or raise ConfigError where there is one that is not to be, or cannot be, resumed."""
    path = partial / "run.json"
    config = {name: value for name, value in asdict(cfg).items() if name not in _FREE}
    # as it comes back from JSON
    run = json.loads(json.dumps({"data": hashes, "processes": processes.count, "config": config}))
    if path.exists():
        if not cfg.resume and not cfg.overwrite:
            raise ConfigError(f"{partial} holds an interrupted run; set resume to continue it, or overwrite")
        if cfg.resume and (name := _difference(read_json(path), run)):
            raise ConfigError(f"{partial} is of a run with another {name}; set overwrite to replace it")
    processes.wait()
    if processes.main:
        if not cfg.resume:
            shutil.rmtree(partial, ignore_errors=True)
        write_json(path, run)
    processes.wait()


def _difference(one: Any, other: Any, name: str = "") -> str | None:
    """The first name under which two JSON values differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None if one == other else name
    names = (_difference(one.get(key), other.get(key), f"{name}.{key}".lstrip(".")) for key in sorted({*one, *other}))
    return next(filter(None, names), None)
