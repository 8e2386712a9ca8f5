#!/usr/bin/env python
"""Make a synthetic world with known answers: dialogues, questions, what is latent behind them, and their states."""

from remind.core.cli import main
from remind.testbed.write import MakeWorldConfig, write_world

if __name__ == "__main__":
    main(MakeWorldConfig, write_world, __doc__)
