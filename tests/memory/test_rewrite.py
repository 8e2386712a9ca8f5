"""A memory that gets other content under its number, and one that a bank writes for the query alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from banks import dump, opened, talk
from words import WordEncoder

from remind.core.errors import DataError
from remind.memory.base import Bank, Memory, Query
from remind.memory.store import Draft

NEW = Draft("fact", ("S1:T1", "S2:T1"), "other words", note={"a": 1})


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[Bank]:
    with opened(tmp_path / "bank", talk(2)) as bank:
        yield bank


@pytest.mark.parametrize("encoded", [True, False])
def test_number_content_and_keys(bank: Bank, encoded: bool) -> None:
    store = bank.store
    old = store.memory(2).text
    vector = WordEncoder(16).encode(["other words"])
    with store.transaction():
        store.rewrite(2, NEW, 2, vector if encoded else None)
    memory = store.memory(2)
    assert (memory.text, memory.kind, memory.sources, memory.tokens) == ("other words", "fact", ("S1:T1", "S2:T1"), 2)
    assert store.note(2) == {"a": 1}
    assert store.numbers() == [1, 2, 3, 4, 5, 6]
    assert store.count() == store.counts()["memories"] == store.counts()["keys"] == 6
    cosines = [dict(store.nearest(asked))[2] for asked in (vector[0], WordEncoder(16).encode([old])[0])]
    assert (cosines[0] == pytest.approx(1, abs=1e-6)) == encoded
    assert (cosines[1] == pytest.approx(1, abs=1e-6)) == (not encoded)


def test_whole_or_not_at_all(bank: Bank) -> None:
    before = dump(bank)
    with pytest.raises(DataError, match="not a turn of the bank"), bank.store.transaction():
        bank.store.rewrite(2, Draft("fact", ("S9:T1",), "x"), 1, torch.ones(1, 16))
    assert dump(bank) == before
    assert bank.store.count() == 6


def test_a_memory_for_the_query_counts_like_any_other(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Memory("memory", "four words for you", "notes", None, None, 2.0, 4)
    monkeypatch.setattr(bank, "rank", lambda query, k, trace: iter([written, (1, 1.0)]))
    before = dump(bank)
    assert [memory.id for memory in bank.retrieve(Query("q"), k=2).memories] == ["memory", "m1"]
    assert bank.retrieve(Query("q"), k=1).memories == (written,)
    assert bank.retrieve(Query("q"), budget=4).memories == (written,)
    assert written not in bank.retrieve(Query("q"), budget=3).memories
    assert dump(bank) == before
