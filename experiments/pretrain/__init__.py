"""Pre-training of the nano backbone on worlds without the rule."""

from experiments.pretrain.run import PretrainConfig, pretrain

__all__ = ["PretrainConfig", "pretrain"]
