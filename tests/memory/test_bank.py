"""What all banks have in common: ingesting, budgets, lost requests, kills, and input that cannot be used."""

from __future__ import annotations

import dataclasses
import random
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from scripted import dump, session
from words import WordEncoder, services

from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import Question, Session, Turn
from remind.memory.bank import Bank
from remind.memory.base import Query, Services
from remind.memory.plain import PlainSystem

QUERY = Query("word3 said2 once more")


#: No turn is like another.
TALK = [
    session(f"S{n}", f"2024-01-{n:02}", *(f"Ann: word{n} said{t} once{n}{t} more" for t in "123")) for n in range(1, 11)
]


def opened(folder: Path, sessions: Iterable[Session] = ()) -> Bank:
    """A bank of plain turns that holds the sessions."""
    bank: Bank = PlainSystem("dense").open(folder, "d", services())
    for each in sessions:
        bank.ingest(each)
    return bank


@pytest.fixture
def bank(tmp_path: Path) -> Iterable[Bank]:
    with opened(tmp_path / "bank", TALK) as made:
        yield made


def test_a_query_knows_no_gold() -> None:
    """Every field of a question is either passed on or gold; a new field has to be put on one of the lists."""
    gold = {"answers", "evidence", "images", "dimension", "category", "split", "dialogue_id"}
    passed = {field.name for field in dataclasses.fields(Query)} - {"visual"}
    assert passed | gold == {field.name for field in dataclasses.fields(Question)}
    assert not passed & gold
    question = Question("q7_abs", "d", "When?", "single", ("May", "June"), ("A",), ("S1:T1",), time="2024")
    assert Query.of(question) == Query("When?", "q7", "2024", "single", ("May", "June"))


def test_the_order_is_the_dialogues_not_that_of_the_times(bank: Bank) -> None:
    bank.ingest(session("S11", "2019", "Ann: a", "Bob: b"))
    assert [memory.text for memory in map(bank.store.memory, bank.store.numbers())][30:] == ["Ann: a", "Bob: b"]


@pytest.mark.parametrize(
    ("wrong", "record", "words"),
    [
        (session("S11", None), "S11", "no turns"),
        (replace(TALK[3], time="2031"), "S4", "other content"),
        (Session("S11", None, (Turn("S2:1", "Ann", "a"),)), None, "UNIQUE"),
    ],
)
def test_sessions_that_cannot_be_ingested(bank: Bank, wrong: Session, record: str | None, words: str) -> None:
    before = dump(bank)
    with pytest.raises(DataError, match=words) as error:
        bank.ingest(wrong)
    assert (str(bank.folder) in str(error.value), error.value.record) == (True, record)
    assert dump(bank) == before


def by_hand(bank: Bank, k: int | None, budget: int | None) -> list[str]:
    """All memories by rank; the next one is taken if it fits."""
    chosen, left = [], budget
    for memory in bank.retrieve(QUERY, k=10**6).memories:
        if len(chosen) != k and (left is None or memory.tokens <= left):
            chosen.append(memory.id)
            left = None if left is None else left - memory.tokens
    return chosen


def test_k_and_budget(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = [[f"Ann: {'word ' * draw.randint(0, 9)}end{n}{t}" for t in "abc"] for n in range(10)]
    told = [session(f"S{n}", None, *own) for n, own in enumerate(lines)]
    with opened(tmp_path / "bank", told) as bank:
        before = (bank.folder / "bank.sqlite").read_bytes()
        for k, budget in product([None, 1, 4, 29, 30, 31], [None, 1, 4, 17, 60, 149, 150, 10_000]):
            if k or budget:
                found = bank.retrieve(QUERY, k, budget).memories
                assert [memory.id for memory in found] == by_hand(bank, k, budget)
                assert all(memory.tokens == len(memory.text.split()) for memory in found)
        assert (bank.folder / "bank.sqlite").read_bytes() == before


def test_two_writers_and_a_bank_of_something_else(bank: Bank) -> None:
    with pytest.raises(ConfigError, match=f"another process is at work in {bank.folder};"):
        opened(bank.folder)
    bank.close()
    for system, dialogue, encoder, words in (
        (PlainSystem("dense"), "e", "words", "dialogue is 'd', not 'e'"),
        (PlainSystem("dense", unit="round"), "d", "words", "system is"),
        (PlainSystem("dense"), "d", "minilm", "encoder is 'words', not 'minilm'"),
    ):
        with pytest.raises(DataError, match=words) as error:
            system.open(bank.folder, dialogue, Services(WordEncoder(name=encoder)))  # type: ignore[arg-type]
        assert error.value.path == bank.folder
    # and a failed attempt holds no lock
    opened(bank.folder).close()


def test_files_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "bank.sqlite").write_bytes(b"noise" * 1000)
    opened(tmp_path / "older").close()
    with sqlite3.connect(tmp_path / "older" / "bank.sqlite") as db:
        db.execute("UPDATE about SET value = json_set(value, '$.format', 2)")
    db.close()
    for name, words in {
        "noise": "not a database",
        "older": "the bank's format is 2, not 3; choose another folder",
    }.items():
        with pytest.raises(DataError, match=words) as error:
            opened(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
