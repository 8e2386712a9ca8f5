#!/usr/bin/env python
"""Build a benchmark of reflective memory from dialogues; stages that are finished are not done again."""

from remind.core.cli import main
from remind.refmem.build import build_refmem
from remind.refmem.config import RefMemConfig

if __name__ == "__main__":
    main(RefMemConfig, build_refmem, __doc__)
