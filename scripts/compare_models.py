#!/usr/bin/env python
"""The command `remind compare-models` as a file."""

from remind.commands import run

if __name__ == "__main__":
    run("compare-models")
