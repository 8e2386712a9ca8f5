"""Training of the sparse autoencoders that grounding reads, on dialogues that share nothing with the benchmark."""

from remind.core import lazy_names
from remind.train_sae.config import CheckSAEConfig, TrainSAEConfig

__all__ = ["CheckSAEConfig", "TrainSAEConfig", "quick_sae", "train_sae"]

__getattr__ = lazy_names(__name__, {"quick_sae": "run", "train_sae": "run"})
