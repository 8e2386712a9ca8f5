"""Training of the sparse autoencoders that grounding reads, on dialogues that share nothing with the benchmark."""

from remind.sae_training.config import TrainSAEConfig, default_layers
from remind.sae_training.corpus import Harvester, read_dialogues, split_dialogues
from remind.sae_training.quick import quick_sae
from remind.sae_training.train import train_sae

__all__ = [
    "Harvester",
    "TrainSAEConfig",
    "default_layers",
    "quick_sae",
    "read_dialogues",
    "split_dialogues",
    "train_sae",
]
