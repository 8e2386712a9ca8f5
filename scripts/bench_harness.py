#!/usr/bin/env python
"""Seconds an evaluation takes around the model: per question, and for a run whose answers are all known."""

from remind.cli import main
from remind.evaluation.bench import HarnessBenchConfig, bench

if __name__ == "__main__":
    main(HarnessBenchConfig, bench, __doc__)
