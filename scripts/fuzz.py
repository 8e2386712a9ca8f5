#!/usr/bin/env python
"""Try hostile inputs on everything that reads files: each must end in one typed line of error, or be read rightly."""

from remind.cli import main
from remind.fuzzing import FuzzConfig, fuzz

if __name__ == "__main__":
    main(FuzzConfig, fuzz, __doc__)
