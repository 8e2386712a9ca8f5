"""What annotators may see of an item, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from remind.core.files import sha256_json
from remind.refmem.items import Item
from remind.states.pyramid import LETTERS


def letters(item: Item) -> str:
    """The letters of its options; none for direct items."""
    return LETTERS[: len(item.options)]


def fingerprint(item: Item) -> str:
    """16 hex digits over what annotators see, so that annotations of another build are told apart.

    The generated answer has no part in it: nobody can try answers against it.
    """
    shown = [item.id, item.dialogue_id, item.dimension, item.format, item.question, list(item.options)]
    return sha256_json([*shown, sorted(item.candidates), sorted(item.evidence), sorted(item.images)])[:16]


def order_for(items: Sequence[Item], annotator: str, seed: int) -> list[Item]:
    """The items in this annotator's order; another annotator or seed gives another one."""
    shuffled = sorted(items, key=lambda item: item.id)
    random.Random(f"{seed}:{annotator}").shuffle(shuffled)
    return shuffled


def candidates_for(item: Item, annotator: str, seed: int) -> list[str]:
    """The candidate answers in an order that says nothing about which one generation took for right."""
    shuffled = sorted(set(item.candidates))
    random.Random(f"{seed}:{annotator}:{item.id}").shuffle(shuffled)
    return shuffled
