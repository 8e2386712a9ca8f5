"""A bank on disk: one SQLite file.

A session is one transaction. Nothing is pickled.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from remind.core.errors import DataError, shown
from remind.core.files import sweep
from remind.data.dialogue import Image, Session, Turn
from remind.memory.vectors import TABLE, Vectors
from remind.states.pyramid import turn_text

if TYPE_CHECKING:
    from remind.memory.base import Memory

_APPLICATION = 0x524D4D42
#: Memories that stay in memory until the bank changes.
_HELD = 10_000
_FORMAT = 2
_SOURCES = "FROM turns JOIN sources ON turn = number WHERE memory = ? ORDER BY number"
_DATED = "time GLOB '[0-9][0-9][0-9][0-9]-*'"
_TABLES = f"""{TABLE}
CREATE TABLE about (value TEXT NOT NULL);
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, hash TEXT NOT NULL, time TEXT, degraded TEXT NOT NULL
);
CREATE TABLE turns (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session INTEGER NOT NULL, speaker TEXT NOT NULL,
    text TEXT NOT NULL, time TEXT, images TEXT
);
CREATE TABLE memories (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, text TEXT, time TEXT, tokens INTEGER NOT NULL,
    note TEXT
);
CREATE TABLE sources (memory INTEGER, turn INTEGER, PRIMARY KEY (memory, turn)) WITHOUT ROWID;
CREATE TABLE keys (row INTEGER PRIMARY KEY, memory INTEGER NOT NULL, text TEXT);
CREATE TABLE journal (number INTEGER PRIMARY KEY, entry TEXT NOT NULL);
CREATE INDEX keys_of ON keys (memory);
CREATE INDEX shortest ON memories (tokens);
CREATE INDEX kinds ON memories (kind);
CREATE INDEX dated ON sessions (number) WHERE {_DATED};
"""


@dataclass(frozen=True, slots=True)
class Draft:
    """A memory to be stored.

    Attributes:
        kind: as in `Memory`.
        sources: ids of stored turns; None: cannot be told.
        text: None: the turns' own words, which are not stored twice.
        keys: texts it is found by. None as a key: the memory's own text.
        time: None: that of the first source.
        note: the system's own, as JSON.
    """

    kind: str
    sources: tuple[str, ...] | None
    text: str | None = None
    keys: tuple[str | None, ...] = (None,)
    time: str | None = None
    note: Any = None


@dataclass(frozen=True, slots=True)
class Held:
    """A session that is stored: number from 1, hash of its content, and why a stand-in had a part in it."""

    number: int
    hash: str
    degraded: tuple[str, ...]


class Store:
    """The files of a bank. One process and thread at a time.

    Args:
        folder: made if absent.
        identity: what the bank depends on; an existing one must have the same.

    Raises:
        DataError: the folder holds something else, or a bank that is damaged or has another identity, and what differs.

    Attributes:
        version: another number after every change of memories.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder, self._path = folder, folder / "bank.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # a bank's folder is exchanged as a whole: nothing else may be in it
            if not self._path.exists() and (other := next(folder.iterdir(), None)) is not None:
                raise DataError(f"holds {shown(other.name)} but no memory bank; choose another folder", folder)
            self._db = sqlite3.connect(self._path, isolation_level=None)
        except OSError as error:
            raise DataError(f"cannot be used as a memory bank: {error.strerror}", folder) from None
        except sqlite3.Error as error:
            raise DataError(f"cannot be used as a memory bank: {error}", self._path) from None
        try:
            self._prepare(identity)
            self._vectors = Vectors(self._db, folder)
            sweep(folder)
            self.version, self._count = 0, self._one("SELECT count(*) FROM memories")
            self._read: tuple[int, dict[int, Memory]] = (-1, {})
            #: Memories by the rows of their keys.
            self._owners: tuple[int, dict[int, int]] = (-1, {})
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.Error):
                raise DataError(f"cannot be used as a memory bank: {error}", self._path) from None
            raise

    def _prepare(self, identity: Mapping[str, Any]) -> None:
        wanted = json.loads(json.dumps({"format": _FORMAT, **identity}))
        new = not self._one("SELECT count(*) FROM sqlite_master")
        if not new and self._one("PRAGMA application_id") != _APPLICATION:
            raise DataError("is not a memory bank; choose another folder", self._path)
        if (damage := self._one("PRAGMA quick_check(1)")) != "ok":
            raise DataError(f"is damaged ({damage}); delete the bank's folder to rebuild it", self._path)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        if new:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA application_id = {_APPLICATION}; COMMIT;")
        row = self._db.execute("SELECT value FROM about").fetchone()
        if row is None:
            self._db.execute("INSERT INTO about VALUES (?)", (json.dumps(wanted),))
            return
        held = json.loads(row[0])
        for name, value in wanted.items():
            if held.get(name) != value:
                message = f"the bank's {name} is {shown(held.get(name))}, not {shown(value)}; choose another folder"
                raise DataError(message, self.folder)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    # writing

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside the block, or none of them.

        Raises:
            DataError: the database cannot be written.
        """
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            self._vectors.load()
            self.version, self._count = self.version + 1, self._one("SELECT count(*) FROM memories")
            if isinstance(error, sqlite3.Error):
                raise DataError(f"cannot be written: {error}", self._path) from None
            raise

    def add_session(self, session: Session, digest: str) -> None:
        """The session and its turns."""
        number = self._insert("sessions", None, session.id, digest, session.time, "[]")
        for turn in session.turns:
            images = [[image.index, image.path, image.caption, image.source] for image in turn.images]
            pictures = json.dumps(images) if images else None
            self._insert("turns", None, turn.id, number, turn.speaker, turn.text, turn.time, pictures)

    def degrade(self, session_id: str, reasons: Sequence[str]) -> None:
        """Note why a stand-in had a part in a session; no reasons: none had."""
        self._db.execute("UPDATE sessions SET degraded = ? WHERE id = ?", (json.dumps(reasons), session_id))

    def add(self, draft: Draft, tokens: int, vectors: Tensor | None = None, number: int | None = None) -> int:
        """Store a memory and return its number.

        Args:
            tokens: of its text.
            vectors: of its keys [keys, d], unit rows; None: they have none, and are searched for words alone. Of a bank
                either all keys have vectors or none.
            number: one that was given before and is free; None: a new one.

        Raises:
            DataError: a source that is no stored turn, or a vector that is not finite or of another dimension.
        """
        turns = sorted(self._turn_numbers(draft.sources or ()))
        when = draft.time
        if when is None and turns:
            (when,) = self._db.execute(
                "SELECT coalesce(turns.time, sessions.time) FROM turns JOIN sessions ON sessions.number = session "
                "WHERE turns.number = ?",
                (turns[0],),
            ).fetchone()
        note, new = None if draft.note is None else json.dumps(draft.note), number is None
        number = self._insert("memories", number, draft.kind, draft.text, when, tokens, note)
        self._db.executemany("INSERT INTO sources VALUES (?, ?)", [(number, turn) for turn in turns])
        if vectors is not None:
            if len(draft.keys) != len(vectors):
                raise DataError(f"{len(draft.keys)} keys and {len(vectors)} vectors", self.folder, f"m{number}")
            rows = self._vectors.append(vectors, f"m{number}")
            keys = [(row, number, key) for row, key in zip(rows, draft.keys, strict=True)]
            self._db.executemany("INSERT INTO keys VALUES (?, ?, ?)", keys)
        elif new:
            self._db.executemany("INSERT INTO keys VALUES (NULL, ?, ?)", [(number, key) for key in draft.keys])
        self.version, self._count = self.version + 1, self._count + 1
        return number

    def remove(self, number: int) -> None:
        """Remove a memory with its keys. Vectors in a shard stay in its file until the bank is rebuilt."""
        self._db.execute("DELETE FROM keys WHERE memory = ?", (number,))
        self._drop(number)

    def rewrite(self, number: int, draft: Draft, tokens: int, vectors: Tensor | None = None) -> None:
        """Give a memory other content under its number. Without vectors it is found by the keys it has.

        Raises:
            DataError: as `add`.
        """
        if vectors is not None:
            self.remove(number)
        else:
            self._drop(number)
        self.add(draft, tokens, vectors, number)

    def log(self, entry: Any) -> None:
        """Append a JSON value to the journal."""
        self._insert("journal", None, json.dumps(entry))

    # reading

    def session(self, session_id: str) -> Held | None:
        """What is known of a session; None: it is not stored."""
        row = self._db.execute("SELECT number, hash, degraded FROM sessions WHERE id = ?", (session_id,)).fetchone()
        return None if row is None else Held(row[0], row[1], tuple(json.loads(row[2])))

    def sessions(self) -> Iterator[Session]:
        """Every session as it was ingested, less what was forgotten."""
        for number, name, when in self._db.execute("SELECT number, id, time FROM sessions ORDER BY number").fetchall():
            turns = self._db.execute(
                "SELECT id, speaker, text, time, images FROM turns WHERE session = ? ORDER BY number", (number,)
            )
            yield Session(name, when, tuple(map(_turn, turns)))

    def degraded(self) -> dict[str, list[str]]:
        """Sessions that a stand-in had a part in, with the reasons."""
        rows = self._db.execute("SELECT id, degraded FROM sessions WHERE degraded != '[]' ORDER BY number")
        return {name: json.loads(reasons) for name, reasons in rows}

    def holds_turn(self, turn_id: str) -> bool:
        return self._db.execute("SELECT 1 FROM turns WHERE id = ?", (turn_id,)).fetchone() is not None

    def last_time(self) -> str | None:
        """Time of the last session with an ISO time."""
        row = self._db.execute(f"SELECT time FROM sessions WHERE {_DATED} ORDER BY number DESC LIMIT 1").fetchone()
        return None if row is None else row[0]

    def count(self) -> int:
        """Number of memories."""
        return self._count

    def logged(self) -> int:
        """Entries of the journal."""
        return self._one("SELECT max(number) FROM journal") or 0

    def counts(self) -> dict[str, int]:
        """Rows of sessions, turns, memories, keys and journal."""
        names = ("sessions", "turns", "memories", "keys", "journal")
        return {name: self._one(f"SELECT count(*) FROM {name}") for name in names}

    def shortest(self) -> int:
        """Tokens of the shortest memory; 0 for none."""
        return self._one("SELECT min(tokens) FROM memories") or 0

    def numbers(self, *kinds: str) -> list[int]:
        """Of all memories, or of all of these kinds, ascending."""
        where = "WHERE kind IN (SELECT value FROM json_each(?)) " if kinds else ""
        given = (json.dumps(kinds),) if kinds else ()
        return [number for (number,) in self._db.execute(f"SELECT number FROM memories {where}ORDER BY number", given)]

    def memory(self, number: int, score: float = 0.0) -> Memory:
        """A memory by its number."""
        from remind.memory.base import Memory

        if self._read[0] != self.version or len(self._read[1]) == _HELD:
            self._read = (self.version, {})
        if (held := self._read[1].get(number)) is not None:
            return replace(held, score=score)
        row = self._db.execute("SELECT text, kind, time, tokens FROM memories WHERE number = ?", (number,)).fetchone()
        text, kind, when, tokens = row
        if text is None:
            text = self._words(number)
        found = self._db.execute(f"SELECT id, number {_SOURCES}", (number,)).fetchall()
        sources = tuple(name for name, _ in found)
        made = Memory(f"m{number}", text, kind, sources or None, when, score, tokens, found[0][1] if found else None)
        return self._read[1].setdefault(number, made)

    def kind(self, number: int) -> str:
        """Of a memory."""
        return str(self._db.execute("SELECT kind FROM memories WHERE number = ?", (number,)).fetchone()[0])

    def note(self, number: int) -> Any:
        """The system's own JSON value of a memory, or None."""
        (note,) = self._db.execute("SELECT note FROM memories WHERE number = ?", (number,)).fetchone()
        return None if note is None else json.loads(note)

    def journal(self) -> list[Any]:
        """Its entries, oldest first."""
        return [json.loads(entry) for (entry,) in self._db.execute("SELECT entry FROM journal ORDER BY number")]

    def rows(self, memories: Sequence[int]) -> list[int]:
        """Row of the first key of each of these memories, all of which have keys."""
        query = "SELECT memory, min(row) FROM keys WHERE memory IN (SELECT value FROM json_each(?)) GROUP BY memory"
        first = dict(self._db.execute(query, (json.dumps(list(memories)),)))
        return [first[number] for number in memories]

    def keys(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Of every key: row of its vector [n], number of its memory [n], its text."""
        rows = self._db.execute(
            "SELECT row, memory, coalesce(keys.text, memories.text) FROM keys "
            "JOIN memories ON memories.number = memory ORDER BY row"
        ).fetchall()
        texts = [self.memory(memory).text if text is None else text for _, memory, text in rows]
        return np.array([row for row, *_ in rows], int), np.array([owner for _, owner, _ in rows], int), texts

    def vectors(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Vectors of these rows [n, d]."""
        return self._vectors.take(rows)

    def nearest(self, vector: Tensor) -> Iterator[tuple[int, float]]:
        """Memories by falling cosine of their best key with the vector [d] (ties: earlier key first), each once."""
        if self._owners[0] != self.version:
            self._owners = self.version, dict(self._db.execute("SELECT row, memory FROM keys"))
        seen: set[int] = set()
        for row, cosine in self._vectors.nearest(vector):
            # keys of removed memories are gone, their vectors are not
            if (owner := self._owners[1].get(row)) is not None and owner not in seen:
                seen.add(owner)
                yield owner, cosine

    def dump(self) -> Iterator[str]:
        """All that the bank holds, a line per row, the same for banks with the same content however they came about."""
        orders = {"sessions": "number", "turns": "number", "memories": "number", "sources": "memory, turn"}
        for table, order in {**orders, "keys": "row", "journal": "number"}.items():
            for row in self._db.execute(f"SELECT * FROM {table} ORDER BY {order}"):
                yield f"{table} {json.dumps(row)}"
        with_vectors = "SELECT row FROM keys WHERE row < ? ORDER BY row"
        for (row,) in self._db.execute(with_vectors, (len(self._vectors),)).fetchall():
            yield f"vector {row} {self.vectors([row]).numpy().tobytes().hex()}"

    # inside

    def _one(self, query: str) -> Any:
        return self._db.execute(query).fetchone()[0]

    def _insert(self, table: str, *values: Any) -> int:
        marks = ", ".join("?" * len(values))
        cursor = self._db.execute(f"INSERT INTO {table} VALUES ({marks})", values)
        return int(cursor.lastrowid or 0)

    def _drop(self, memory: int) -> None:
        """Remove a memory without its keys."""
        self._db.execute("DELETE FROM sources WHERE memory = ?", (memory,))
        removed = self._db.execute("DELETE FROM memories WHERE number = ?", (memory,)).rowcount
        self.version, self._count = self.version + 1, self._count - removed

    def _turn_numbers(self, turn_ids: Iterable[str]) -> Iterator[int]:
        for name in dict.fromkeys(turn_ids):
            row = self._db.execute("SELECT number FROM turns WHERE id = ?", (name,)).fetchone()
            if row is None:
                raise DataError("a memory's source is not a turn of the bank", self.folder, name)
            yield row[0]

    def _words(self, memory: int) -> str:
        """The turns of a memory as a reader sees them."""
        query = f"SELECT id, speaker, text, time, images {_SOURCES}"
        return "\n".join(turn_text(_turn(row)) for row in self._db.execute(query, (memory,)))


def _turn(row: Sequence[Any]) -> Turn:
    name, speaker, text, when, images = row
    return Turn(name, speaker, text, when, tuple(Image(*image) for image in json.loads(images or "[]")))
