"""Hostile input for everything that reads files: seeds, mutations, targets, and the loops that try them."""

from fuzzing.run import FuzzConfig, fuzz

__all__ = ["FuzzConfig", "fuzz"]
