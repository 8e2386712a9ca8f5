#!/usr/bin/env python
"""Pre-train the nano backbone on the synthetic world; the shipped checkpoint was made with the defaults."""

from remind.cli import main
from remind.testbed.pretrain import PretrainConfig, pretrain

if __name__ == "__main__":
    main(PretrainConfig, pretrain, __doc__ or "")
