"""The model of a training run, to be looked at without exporting it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from remind.alignment import checkpoint as checkpoints
from remind.alignment.config import read_config
from remind.alignment.model import fingerprint, load, prepare
from remind.core.errors import ModelError
from remind.models.backbone import Backbone


def trained_backbone(run: str | Path, device: str = "cpu") -> Backbone:
    """What a run has learned so far: its base model with the weights of the newest whole checkpoint, in eval mode.

    Raises:
        ConfigError: no run folder. ModelError: no checkpoint, or another base model than the run's.
    """
    cfg = read_config(run)
    folder = checkpoints.newest(Path(run), say=False)
    if folder is None:
        raise ModelError(f"{run}: no checkpoints")
    backbone = load(cfg)
    if fingerprint(backbone.model) != checkpoints.read_state(folder)["base_fingerprint"]:
        raise ModelError(f"{cfg.model} is not the model that {run} was trained from")
    model = prepare(backbone, cfg)
    checkpoints.restore_model(folder, model)
    return replace(backbone, name=str(run), model=model.to(device).eval())
