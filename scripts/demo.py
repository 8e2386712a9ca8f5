#!/usr/bin/env python
"""Run everything once in a small synthetic world whose answers are known: states, alignment, export and a report."""

from remind.core.cli import main
from remind.demo import DemoConfig, demo

if __name__ == "__main__":
    main(DemoConfig, demo, __doc__)
