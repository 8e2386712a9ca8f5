"""Banks of plain turns, and sessions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from words import WordEncoder

from remind.data.dialogue import Session, Turn
from remind.memory.bank import Bank
from remind.memory.base import Services
from remind.memory.plain import PlainSystem


def services(**options: Any) -> Services:
    return Services(WordEncoder(**{"dimension": 16, **options}))  # type: ignore[arg-type]


def session(number: int, *texts: str, time: str | None = "") -> Session:
    """Session S<number>, a day after the one before; the speakers take turns."""
    turns = [Turn(f"S{number}:T{n}", "Ann" if n % 2 else "Bob", text) for n, text in enumerate(texts, 1)]
    return Session(f"S{number}", f"2024-01-01T{number:04}" if time == "" else time, tuple(turns))


def talk(count: int, turns: int = 3) -> list[Session]:
    """Sessions in which no turn is like another."""
    return [
        session(n, *(f"word{n} said{t} once{n * t} more" for t in range(1, turns + 1))) for n in range(1, count + 1)
    ]


def opened(folder: Path, sessions: Iterable[Session] = (), **options: Any) -> Bank:
    """A bank of plain turns that holds the sessions."""
    bank = PlainSystem("dense", **options).open(folder, "d", services())
    for each in sessions:
        bank.ingest(each)
    return bank
