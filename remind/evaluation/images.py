"""How an evaluation shows images."""

from __future__ import annotations

from dataclasses import replace

from remind.core.errors import ConfigError
from remind.evaluation.config import EvaluateConfig
from remind.models import BUILT_IN
from remind.models.backbone import Backbone
from remind.models.images import Pictures
from remind.train_pra.export import images_in_training


def with_images(cfg: EvaluateConfig) -> EvaluateConfig:
    """With `images` and `image_tokens` as the model was trained, where they are None.

    Raises:
        DataError: a damaged training.json. ConfigError: pixels for a model that is asked in text alone.
    """
    # the model of a server is a name
    named = cfg.answers == "server" or cfg.model in BUILT_IN
    images, tokens = images_in_training(None if named else cfg.model)
    cfg = replace(cfg, images=cfg.images or images, image_tokens=cfg.image_tokens or tokens)
    if cfg.images == "pixels" and cfg.answers != "local":
        raise ConfigError(f"images pixels: answers {cfg.answers} takes text only; set images captions")
    return cfg


def pictures_for(cfg: EvaluateConfig, backbone: Backbone) -> Pictures | None:
    """What shows images to the model that answers; None: captions do. Raises ConfigError where it takes none."""
    if cfg.images != "pixels":
        return None
    assert cfg.image_tokens is not None
    return Pictures(backbone, cfg.image_tokens, cfg.image_root)
