#!/usr/bin/env python
"""The command `remind feature-pages` as a file, for `accelerate launch`."""

from remind.commands import run

if __name__ == "__main__":
    run("feature-pages")
