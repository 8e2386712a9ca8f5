#!/usr/bin/env python
"""The command `remind score-memory` as a file."""

from remind.commands import run

if __name__ == "__main__":
    run("score-memory")
