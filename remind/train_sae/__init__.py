"""Training of the sparse autoencoders that grounding reads, on dialogues that share nothing with the benchmark."""

from typing import Any

from remind.train_sae.config import CheckSAEConfig, TrainSAEConfig

__all__ = ["CheckSAEConfig", "TrainSAEConfig", "quick_sae", "train_sae"]


def __getattr__(name: str) -> Any:
    if name not in ("quick_sae", "train_sae"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from remind.train_sae import run  # needs torch

    return getattr(run, name)
