#!/usr/bin/env python
"""Write the pages on which people check draft items: one local HTML file for each annotator."""

from remind.core.cli import main
from remind.refmem.annotate import AnnotateConfig, write_pages

if __name__ == "__main__":
    main(AnnotateConfig, write_pages, __doc__)
