#!/usr/bin/env python
"""Write a trained checkpoint as a plain Hugging Face folder."""

from remind.cli import main
from remind.export import ExportConfig, export

if __name__ == "__main__":
    main(ExportConfig, export, __doc__)
