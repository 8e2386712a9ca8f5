"""The words of the synthetic world, from lexicon.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@cache
def lexicon() -> dict[str, Any]:
    """The content of lexicon.yaml; not to be changed."""
    words: dict[str, Any] = yaml.safe_load((files("remind.testbed") / "lexicon.yaml").read_text(encoding="utf-8"))
    return words


@cache
def statements(dimension: str) -> dict[str, frozenset[str]]:
    """The options of multiple choice in a dimension, and the values that each of them goes with."""
    words = lexicon()["dimensions"][dimension]
    if "fits" in words:
        return {text: frozenset(values) for text, values in words["fits"].items()}
    return {text: frozenset([value]) for value, entry in words["values"].items() for text in entry["fits"]}


def wordings(items: Sequence[str], split: str | None) -> list[str]:
    """The wordings a split may use: the first ones are for training, the last for dev and test; None: all."""
    cut = max(1, len(items) * 2 // 3)
    return list(items) if split is None else list(items[:cut] if split == "train" else items[cut:] or items[-1:])


def fill(text: str, **values: str) -> str:
    """`text` with each `{name}` in it replaced."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text
