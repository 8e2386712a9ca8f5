#!/usr/bin/env python
"""Answer the questions of a split under one or more conditions, judge the answers, and write the report."""

from remind.core.cli import main
from remind.evaluation.config import EvaluateConfig


def run(cfg: EvaluateConfig) -> None:
    from remind.evaluation.run import evaluate_and_show

    evaluate_and_show(cfg)


if __name__ == "__main__":
    main(EvaluateConfig, run, __doc__)
