#!/usr/bin/env python
"""Build the factual, attentional and reflective states of every question of a dialogue file."""

from remind.core.cli import main
from remind.pipeline import BuildStatesConfig, build_states

if __name__ == "__main__":
    main(BuildStatesConfig, build_states, __doc__)
