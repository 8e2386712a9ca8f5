#!/usr/bin/env python
"""Write a trained checkpoint as a plain Hugging Face folder."""

from remind.alignment.export import ExportConfig, export
from remind.core.cli import main

if __name__ == "__main__":
    main(ExportConfig, export, __doc__)
