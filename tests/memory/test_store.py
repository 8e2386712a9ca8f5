"""The store: exact search, whole transactions, and folders that cannot be used."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from banks import opened
from words import WordEncoder

from remind.core.errors import DataError
from remind.memory.bank import Store
from remind.memory.base import Draft


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "bank", {"dialogue": "d"}, WordEncoder())  # type: ignore[arg-type]
    yield made
    made.close()


CONTENT = "SELECT number, kind, text FROM memories UNION SELECT row, memory, hex(vector) FROM keys"


def fill(store: Store, rows: torch.Tensor, keys: int = 1) -> list[list[int]]:
    """Memories of so many keys each, a transaction for every five; the rows of each."""
    groups = [list(range(at, min(at + keys, len(rows)))) for at in range(0, len(rows), keys)]
    for at in range(0, len(groups), 5):
        with store.transaction():
            for group in groups[at : at + 5]:
                store.add(Draft("turn", None, "text", ("key",) * len(group)), 1, rows[group])
    return groups


def expected(rows: torch.Tensor, groups: dict[int, list[int]], asked: torch.Tensor) -> list[tuple[int, float]]:
    """By brute force in float64: memories by the cosine of their best key, then by the place of that key."""
    wide, vector = rows.double().numpy(), asked.double().numpy()
    cosines = (wide * vector).sum(axis=1) / np.sqrt((wide * wide).sum(axis=1) * (vector * vector).sum())
    best = {number: min((-cosines[row], row) for row in group) for number, group in groups.items()}
    return [(number, -best[number][0]) for number in sorted(best, key=best.__getitem__)]


@pytest.mark.parametrize("kind", ["random", "alike"])
@pytest.mark.parametrize(("count", "keys", "dimension"), [(5, 1, 8), (150, 3, 192)])
def test_search_is_brute_force(store: Store, kind: str, count: int, keys: int, dimension: int) -> None:
    draw = torch.Generator().manual_seed(count + keys)
    rows = torch.randn(count, dimension, generator=draw)
    if kind == "alike":
        rows = rows[torch.randint(0, 4, (count,), generator=draw)]
    rows = torch.nn.functional.normalize(rows, dim=-1)
    groups = dict(enumerate(fill(store, rows, keys), start=1))
    for number in list(groups)[1::4]:
        with store.transaction():
            store.remove(number)
        del groups[number]
    for asked in (rows[count // 2] + 0.1, -rows[0], torch.randn(dimension, generator=draw)):
        asked = asked / asked.norm()
        found, wanted = list(store.nearest(asked)), expected(rows, groups, asked)
        # sums in float32 may exchange neighbours
        np.testing.assert_allclose([score for _, score in found], [score for _, score in wanted], atol=1e-6)
        scores = dict(wanted)
        np.testing.assert_allclose([scores[number] for number, _ in found], [score for _, score in found], atol=1e-6)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "bank.sqlite").write_bytes(b"noise" * 1000)
    opened(tmp_path / "older").close()
    with sqlite3.connect(tmp_path / "older" / "bank.sqlite") as db:
        db.execute("UPDATE about SET value = json_set(value, '$.format', 2)")
    db.close()
    for name, words in {
        "file": "cannot be used",
        "noise": "not a database",
        "older": "the bank's format is 2, not 3; choose another folder",
    }.items():
        with pytest.raises(DataError, match=words) as error:
            opened(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
        assert "\n" not in str(error.value)
