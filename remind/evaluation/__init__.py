"""Answering the questions of a split, scoring the answers, and the report."""

from remind.evaluation import metrics

__all__ = ["metrics"]
