"""A small SAE for those who have none yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from remind.core.files import sha256_file, sha256_json
from remind.sae_training import train
from remind.sae_training.config import TrainSAEConfig
from remind.sae_training.corpus import data_paths, files_in
from sae.config import SAETrainConfig


def quick_sae(
    backbone: str,
    data: Sequence[str],
    cache: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    steps: int = 400,
) -> Path:
    """A small SAE of one late layer for demos and first looks, kept under `cache` by model, data and settings.

    Returns:
        A folder for `sae.load_layers`.
    """
    cfg = TrainSAEConfig(
        out="",
        data=[str(path) for path in data],
        backbone=backbone,
        layers=["late"],
        limit=8000,
        trainer=SAETrainConfig(
            d_sae=2048, steps=steps, batch_size=1024, lr=1e-3, warmup_steps=20, decay_share=0.5, dead_tokens=50_000
        ),
        checkpoint_every=0,
        loss_windows=0,
        device=device,
        dtype=dtype,
    )
    parts = {
        "config": {**asdict(cfg), "data": sorted(sha256_file(path) for _, path in files_in(data_paths(cfg.data)))},
        # a model folder may be written anew under the same name
        "model": [(name, (stat := path.stat()).st_size, stat.st_mtime_ns) for name, path in files_in([Path(backbone)])]
        if Path(backbone).is_dir()
        else backbone,
        "version": version("remind-toolkit"),
    }
    cfg.out = str(Path(cache) / f"{Path(backbone).name}-{sha256_json(parts)[:16]}")
    return Path(cfg.out) if Path(cfg.out).is_dir() else train.train_sae(cfg)
