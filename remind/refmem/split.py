"""Train and test 2:8 by evidence cluster: no cluster, no piece of evidence and no near-duplicate on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

from remind.core.errors import DataError
from remind.data.dialogue import Corpus
from remind.refmem.filters import near_pairs
from remind.refmem.items import Item

Key = tuple[str, str | int]


def pieces(items: Sequence[Item], corpus: Corpus) -> list[set[Key]]:
    """What each item rests on: its turns and images, and the turns its images stand in."""
    stands = {
        (dialogue.id, image.index): turn.id
        for dialogue in corpus.dialogues
        for turn in dialogue.turns
        for image in turn.images
    }
    found = []
    for item in items:
        own: set[Key] = {(item.dialogue_id, turn) for turn in item.evidence}
        own |= {(item.dialogue_id, index) for index in item.images}
        own |= {(item.dialogue_id, stands[item.dialogue_id, index]) for index in item.images}
        found.append(own)
    return found


def units(items: Sequence[Item], corpus: Corpus, near_duplicate: float) -> list[list[int]]:
    """Numbers of the items that must stay together: linked by cluster, by evidence, or as near-duplicates."""
    parent = list(range(len(items)))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(keys: Iterable[tuple[object, int]]) -> None:
        first: dict[object, int] = {}
        for key, number in keys:
            parent[root(number)] = root(first.setdefault(key, number))

    join((item.cluster_id, number) for number, item in enumerate(items))
    join((piece, number) for number, own in enumerate(pieces(items, corpus)) for piece in sorted(own, key=str))
    for i, j in near_pairs(items, near_duplicate):
        parent[root(j)] = root(i)
    found: dict[int, list[int]] = {}
    for number in range(len(items)):
        found.setdefault(root(number), []).append(number)
    return list(found.values())


def split(items: Sequence[Item], corpus: Corpus, train: float, seed: int, near_duplicate: float) -> dict[str, str]:
    """Item id to "train" or "test".

    Units are dealt in an order of their ids and the seed; one goes to train while that brings its share closer to
    `train`. With two units or more, and a share that asks for both, each side gets one.
    """
    dealt = sorted(
        units(items, corpus, near_duplicate),
        key=lambda unit: sha256(f"{seed}:{min(items[number].id for number in unit)}".encode()).hexdigest(),
    )
    wanted, taken = train * len(items), 0
    chosen: set[int] = set()
    for place, unit in enumerate(dealt):
        if abs(taken + len(unit) - wanted) < abs(taken - wanted) and (train == 1 or len(chosen) < len(dealt) - 1):
            chosen.add(place)
            taken += len(unit)
    if not chosen and 0 < train < 1 and len(dealt) > 1:
        chosen = {min(range(len(dealt)), key=lambda place: (len(dealt[place]), place))}
    return {
        items[number].id: "train" if place in chosen else "test"
        for place, unit in enumerate(dealt)
        for number in sorted(unit)
    }


def check_split(items: Sequence[Item], corpus: Corpus, sides: dict[str, str], near_duplicate: float) -> None:
    """Raise DataError where train and test share a cluster, a piece of evidence, or a question but for a few words."""
    shared: dict[object, tuple[str, str]] = {}
    for item, own in zip(items, pieces(items, corpus), strict=True):
        for key in (("cluster", item.cluster_id), *sorted(own, key=str)):
            side, other = shared.setdefault(key, (sides[item.id], item.id))
            if side != sides[item.id]:
                raise DataError(f"{key[1]} serves {other} in {side} too; split by evidence cluster", record=item.id)
    for i, j in near_pairs(items, near_duplicate):
        if sides[items[i].id] != sides[items[j].id]:
            raise DataError(f"is nearly the same as {items[i].id} on the other side of the split", record=items[j].id)
