#!/usr/bin/env python
"""Show what grounding saw of a question, or of every one: a page that opens from disk."""

from remind.core.cli import main
from remind.viewing.inspector import InspectConfig, inspect_grounding

if __name__ == "__main__":
    main(InspectConfig, inspect_grounding, __doc__)
