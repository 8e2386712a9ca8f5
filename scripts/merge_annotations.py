#!/usr/bin/env python
"""Merge annotators' files: agreement before discussion, conflicts, removal rates and the adjudicated items."""

from remind.core.cli import main
from remind.refmem.merge import MergeConfig, merge_and_show

if __name__ == "__main__":
    main(MergeConfig, merge_and_show, __doc__)
