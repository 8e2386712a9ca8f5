#!/usr/bin/env python
"""Have people check draft items: one local page for each annotator, or a sitting in the terminal."""

from remind.core.cli import main
from remind.refmem.annotation.run import AnnotateConfig, run

if __name__ == "__main__":
    main(AnnotateConfig, run, __doc__)
