"""Hostile input for everything that reads files: valid seeds, strategies that change them, and what reads them."""
