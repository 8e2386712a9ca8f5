#!/usr/bin/env python
"""Answer the questions of a split under one or more conditions, judge the answers, and write the report."""

from remind.core.cli import main
from remind.evaluation.harness import EvaluateConfig, evaluate_and_show

if __name__ == "__main__":
    main(EvaluateConfig, evaluate_and_show, __doc__)
