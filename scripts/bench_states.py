#!/usr/bin/env python
"""Dialogues and questions a minute by stage, peak memory by the number of dialogues, and what a second run takes."""

from remind.cli import main
from remind.pipeline.bench import BenchStatesConfig, bench_states

if __name__ == "__main__":
    main(BenchStatesConfig, bench_states, __doc__)
