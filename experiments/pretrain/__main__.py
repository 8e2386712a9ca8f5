"""Pre-train the nano backbone on the synthetic world; the shipped checkpoint was made with the defaults."""

from experiments.pretrain.run import PretrainConfig, pretrain
from remind.core.cli import main

if __name__ == "__main__":
    main(PretrainConfig, pretrain, __doc__ or "")
