#!/usr/bin/env python
"""The command `remind train-memory` as a file, for `accelerate launch`."""

from remind.commands import run

if __name__ == "__main__":
    run("train-memory")
