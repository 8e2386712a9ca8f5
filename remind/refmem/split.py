"""Train and test 2:8 by evidence cluster: no cluster, no piece of evidence and no near-duplicate in both splits."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from scipy.cluster.hierarchy import DisjointSet  # type: ignore[import-untyped]

from remind.data.dialogue import Corpus
from remind.refmem.filters import near_pairs
from remind.refmem.items import Item


def _keys(item: Item, turn_of: dict[tuple[str, int], str]) -> list[tuple[str, ...]]:
    """What no item of the other split may share: the cluster, evidence turns, images and the turns that share them."""
    turns = {*item.evidence, *(turn_of[item.dialogue_id, index] for index in item.images)}
    images = {("image", item.dialogue_id, str(index)) for index in item.images}
    return [("cluster", item.cluster_id), *(("turn", item.dialogue_id, turn) for turn in turns), *images]


def units(items: Sequence[Item], corpus: Corpus, near_duplicate: float) -> list[list[int]]:
    """Indices of the items that must stay together: linked by cluster, by evidence, or as near-duplicates."""
    turn_of = {
        (dialogue.id, image.index): turn.id
        for dialogue in corpus.dialogues
        for turn in dialogue.turns
        for image in turn.images
    }
    groups = DisjointSet(range(len(items)))
    first: dict[tuple[str, ...], int] = {}
    for number, item in enumerate(items):
        for key in _keys(item, turn_of):
            groups.merge(number, first.setdefault(key, number))
    for i, j in near_pairs(items, near_duplicate):
        groups.merge(i, j)
    return [sorted(group) for group in groups.subsets()]


def split(items: Sequence[Item], corpus: Corpus, train: float, seed: int, near_duplicate: float) -> dict[str, str]:
    """Item id to "train" or "test".

    Units are dealt in an order of their ids and the seed; one goes to train while that brings its share closer to
    `train`. With two units or more, and 0 < `train` < 1, each split gets at least one.
    """
    dealt = sorted(
        units(items, corpus, near_duplicate),
        key=lambda unit: sha256(f"{seed}:{min(items[number].id for number in unit)}".encode()).hexdigest(),
    )
    target, taken = train * len(items), 0
    chosen: set[int] = set()
    for place, unit in enumerate(dealt):
        if abs(taken + len(unit) - target) < abs(taken - target) and (train == 1 or len(chosen) < len(dealt) - 1):
            chosen.add(place)
            taken += len(unit)
    if not chosen and 0 < train < 1 and len(dealt) > 1:
        chosen = {min(range(len(dealt)), key=lambda place: (len(dealt[place]), place))}
    return {
        items[number].id: "train" if place in chosen else "test" for place, unit in enumerate(dealt) for number in unit
    }
