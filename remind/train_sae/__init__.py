"""Training of the sparse autoencoders that grounding reads, on dialogues that share nothing with the benchmark."""

from remind.train_sae.config import CheckSAEConfig, TrainSAEConfig
from remind.train_sae.train import quick_sae, train_sae

__all__ = ["CheckSAEConfig", "TrainSAEConfig", "quick_sae", "train_sae"]
