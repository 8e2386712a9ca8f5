#!/usr/bin/env python
"""Compare two evaluation runs question by question: compare.py FIRST SECOND."""

import sys

from remind.core.cli import main
from remind.evaluation.compare import CompareConfig, compare_and_show, named

if __name__ == "__main__":
    main(CompareConfig, compare_and_show, __doc__, named(sys.argv[1:]))
