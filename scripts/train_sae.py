#!/usr/bin/env python
"""Train Top-K sparse autoencoders on dialogues, one per layer of a backbone."""

from remind.core.cli import main
from remind.sae_training import TrainSAEConfig, train_sae

if __name__ == "__main__":
    main(TrainSAEConfig, train_sae, __doc__)
