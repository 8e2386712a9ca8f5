#!/usr/bin/env python
"""Answer the questions of a split from plain retrieved evidence and score the answers."""

from remind.cli import main
from remind.evaluation.harness import EvaluateConfig, evaluate_and_show

if __name__ == "__main__":
    main(EvaluateConfig, evaluate_and_show, __doc__)
