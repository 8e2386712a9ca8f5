"""Banks of plain turns, and sessions."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
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


def killed_after(statements: int, opening: Callable[[], Bank], change: Callable[[Bank], object]) -> bool:
    """Change a bank in a process that kills itself at a statement to the database; whether it got that far."""

    def work() -> None:
        count = 0

        def look(_: str) -> None:
            nonlocal count
            count += 1
            if count == statements:
                os.kill(os.getpid(), signal.SIGKILL)

        # a fork has none of the threads of its parent's pool, and would wait for them
        torch.set_num_threads(1)
        connect = sqlite3.connect

        def watched(*given: Any, **options: Any) -> sqlite3.Connection:
            database = connect(*given, **options)
            database.set_trace_callback(look)
            return database

        sqlite3.connect = watched  # type: ignore[assignment]
        with opening() as bank:
            change(bank)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode in (-signal.SIGKILL, 0)
    return process.exitcode != 0
