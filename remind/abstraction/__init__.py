"""Reflective Abstraction Induction (Section 4.4): x1 to x2."""

from remind.abstraction.summarise import summarise, summarise_all

__all__ = ["summarise", "summarise_all"]
