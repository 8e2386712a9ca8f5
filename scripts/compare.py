#!/usr/bin/env python
"""Compare two evaluation runs question by question: compare.py FIRST SECOND."""

import sys

from remind.core.cli import main
from remind.evaluation.compare import compare_and_show, with_options
from remind.evaluation.config import CompareConfig

if __name__ == "__main__":
    main(CompareConfig, compare_and_show, __doc__, with_options(sys.argv[1:]))
