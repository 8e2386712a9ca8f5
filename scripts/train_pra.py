#!/usr/bin/env python
"""Distil the attentional and reflective states into the factual one (Progressive Reflective Alignment)."""

from remind.alignment.trainer import TrainConfig, train
from remind.core.cli import main

if __name__ == "__main__":
    main(TrainConfig, train, __doc__)
