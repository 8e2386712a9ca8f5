#!/usr/bin/env python
"""The command `remind check-sae` as a file."""

from remind.commands import run

if __name__ == "__main__":
    run("check-sae")
