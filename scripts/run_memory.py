#!/usr/bin/env python
"""The command `remind run-memory` as a file."""

from remind.commands import run

if __name__ == "__main__":
    run("run-memory")
