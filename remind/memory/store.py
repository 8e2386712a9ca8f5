"""A bank on disk: one SQLite file, in which a session is one transaction; and the ranking of its memories for a text.

Nothing is pickled.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from remind.core.errors import DataError, shown
from remind.data.dialogue import Image, Session, Turn
from remind.models.encoder import SentenceEncoder
from remind.perception.perceive import BM25, standardise
from remind.states.pyramid import turn_text
from remind.text.words import stems

if TYPE_CHECKING:
    from remind.memory.base import Memory

#: How memories are ranked. dense: by cosine. bm25: by stemmed words. hybrid: by the sum of both as z-scores over all
#: keys. A memory has the score of its best key.
Method = Literal["dense", "bm25", "hybrid"]
_APPLICATION, _FORMAT = 0x524D4D42, 3
_SOURCES = "FROM turns JOIN sources ON turn = number WHERE memory = ? ORDER BY number"
_TABLES = """
CREATE TABLE about (value TEXT NOT NULL);
CREATE TABLE sessions (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, time TEXT, degraded TEXT NOT NULL);
CREATE TABLE turns (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session INTEGER NOT NULL, speaker TEXT NOT NULL,
    text TEXT NOT NULL, time TEXT, images TEXT NOT NULL
);
CREATE TABLE memories (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, text TEXT, time TEXT, tokens INTEGER NOT NULL,
    note TEXT
);
CREATE TABLE sources (memory INTEGER, turn INTEGER, PRIMARY KEY (memory, turn)) WITHOUT ROWID;
CREATE TABLE keys (row INTEGER PRIMARY KEY, memory INTEGER NOT NULL, text TEXT, vector BLOB);
CREATE TABLE journal (number INTEGER PRIMARY KEY, entry TEXT NOT NULL);
CREATE TABLE learned (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE INDEX keys_of ON keys (memory);
"""
#: What a bank is rebuilt of and holds then; what was learned stays.
_CONTENT = ("sessions", "turns", "memories", "sources", "keys", "journal")


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
    """A session that is stored: number from 1, its turns less those forgotten, and why a stand-in had a part in it."""

    number: int
    session: Session
    degraded: tuple[str, ...]


class Store:
    """The file of a bank. One process and thread at a time.

    Args:
        folder: made if absent.
        identity: what the bank depends on; an existing one must have the same.

    Raises:
        DataError: the file is something else or damaged, or a bank of another format or identity, and what differs.

    Attributes:
        version: another number after every change of memories.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder, self._path, self.version = folder, folder / "bank.sqlite", 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._path, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise DataError(f"cannot be used as a memory bank: {error}", folder) from None
        try:
            self._prepare({"format": _FORMAT, **identity})
            self._load()
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.Error):
                raise DataError(f"cannot be used as a memory bank: {error}", self._path) from None
            raise

    def _prepare(self, identity: Mapping[str, Any]) -> None:
        new = not self._one("SELECT count(*) FROM sqlite_master")
        if not new and self._one("PRAGMA application_id") != _APPLICATION:
            raise DataError("is not a memory bank; choose another folder", self._path)
        if (damage := self._one("PRAGMA quick_check(1)")) != "ok":
            raise DataError(f"is damaged ({damage}); delete the bank's folder to rebuild it", self._path)
        # what is forgotten is overwritten
        self._db.execute("PRAGMA secure_delete = ON")
        if new:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA application_id = {_APPLICATION}; COMMIT;")
        wanted = json.loads(json.dumps(identity))
        held = self._db.execute("SELECT value FROM about").fetchone()
        if held is None:
            self._db.execute("INSERT INTO about VALUES (?)", (json.dumps(wanted),))
            return
        for name, value in wanted.items():
            if (other := json.loads(held[0]).get(name)) != value:
                message = f"the bank's {name} is {shown(other)}, not {shown(value)}; choose another folder"
                raise DataError(message, self.folder)

    def _load(self) -> None:
        """Take what the database has for what is held in memory: when it is opened, and after a rollback."""
        found = self._db.execute("SELECT row, memory, vector FROM keys WHERE vector IS NOT NULL ORDER BY row")
        #: Memory and vector of every key that has one.
        self._keys = {row: (memory, _vector(blob)) for row, memory, blob in found}
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._memories: dict[int, Memory] = {}
        self._matrix: Tensor | None = None

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
            self._load()
            if isinstance(error, sqlite3.Error):
                raise DataError(f"cannot be written: {error}", self._path) from None
            raise

    def clear(self) -> None:
        """Remove everything but what was learned."""
        for table in (*_CONTENT, "sqlite_sequence"):
            self._db.execute(f"DELETE FROM {table}")
        self._load()

    def add_session(self, session: Session) -> None:
        """The session and its turns."""
        number = self._insert("sessions", None, session.id, session.time, "[]")
        for turn in session.turns:
            images = json.dumps([[image.index, image.path, image.caption, image.source] for image in turn.images])
            self._insert("turns", None, turn.id, number, turn.speaker, turn.text, turn.time, images)

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
            DataError: a source that is no stored turn.
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
            for key, vector in zip(draft.keys, vectors.float(), strict=True):
                row = self._insert("keys", None, number, key, blob := vector.numpy().tobytes())
                self._keys[row] = (number, _vector(blob))
        elif new:
            self._db.executemany("INSERT INTO keys VALUES (NULL, ?, ?, NULL)", [(number, key) for key in draft.keys])
        self._changed()
        return number

    def remove(self, number: int) -> None:
        """Remove a memory with its keys."""
        for (row,) in self._db.execute("SELECT row FROM keys WHERE memory = ?", (number,)):
            self._keys.pop(row, None)
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

    def learn(self, name: str, value: bytes) -> None:
        """Keep what was learned under a name, in place of what was there."""
        self._db.execute("REPLACE INTO learned VALUES (?, ?)", (name, value))

    # reading

    def learned(self, name: str) -> bytes | None:
        """What `learn` kept last; None: nothing."""
        row = self._db.execute("SELECT value FROM learned WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def session(self, session_id: str) -> Held | None:
        """What is known of a session; None: it is not stored."""
        row = self._db.execute("SELECT number, time, degraded FROM sessions WHERE id = ?", (session_id,)).fetchone()
        if row is None:
            return None
        number, when, degraded = row
        return Held(number, Session(session_id, when, self._turns_of(number)), tuple(json.loads(degraded)))

    def sessions(self) -> Iterator[Session]:
        """Every session as it was ingested, less what was forgotten."""
        for number, name, when in self._db.execute("SELECT number, id, time FROM sessions ORDER BY number").fetchall():
            yield Session(name, when, self._turns_of(number))

    def degraded(self) -> dict[str, list[str]]:
        """Sessions that a stand-in had a part in, with the reasons."""
        rows = self._db.execute("SELECT id, degraded FROM sessions WHERE degraded != '[]' ORDER BY number")
        return {name: json.loads(reasons) for name, reasons in rows}

    def holds_turn(self, turn_id: str) -> bool:
        return self._db.execute("SELECT 1 FROM turns WHERE id = ?", (turn_id,)).fetchone() is not None

    def last_time(self) -> str | None:
        """Time of the last session with an ISO time."""
        query = "SELECT time FROM sessions WHERE time GLOB '[0-9][0-9][0-9][0-9]-*' ORDER BY number DESC LIMIT 1"
        row = self._db.execute(query).fetchone()
        return None if row is None else row[0]

    def count(self) -> int:
        """Number of memories."""
        return int(self._one("SELECT count(*) FROM memories"))

    def logged(self) -> int:
        """Entries of the journal."""
        return self._one("SELECT max(number) FROM journal") or 0

    def counts(self) -> dict[str, int]:
        """Rows of sessions, turns, memories, keys and journal."""
        return {name: self._one(f"SELECT count(*) FROM {name}") for name in _CONTENT if name != "sources"}

    def numbers(self, *kinds: str) -> list[int]:
        """Of all memories, or of all of these kinds, ascending."""
        where = "WHERE kind IN (SELECT value FROM json_each(?)) " if kinds else ""
        given = (json.dumps(kinds),) if kinds else ()
        return [number for (number,) in self._db.execute(f"SELECT number FROM memories {where}ORDER BY number", given)]

    def memory(self, number: int, score: float = 0.0) -> Memory:
        """A memory by its number."""
        from remind.memory.base import Memory

        if number not in self._memories:
            query = "SELECT text, kind, time, tokens FROM memories WHERE number = ?"
            text, kind, when, tokens = self._db.execute(query, (number,)).fetchone()
            if text is None:
                rows = self._db.execute(f"SELECT id, speaker, text, time, images {_SOURCES}", (number,))
                text = "\n".join(turn_text(_turn(row)) for row in rows)
            found = self._db.execute(f"SELECT id, number {_SOURCES}", (number,)).fetchall()
            sources, position = tuple(name for name, _ in found) or None, found[0][1] if found else None
            self._memories[number] = Memory(f"m{number}", text, kind, sources, when, 0.0, tokens, position)
        return replace(self._memories[number], score=score)

    def note(self, number: int) -> Any:
        """The system's own JSON value of a memory, or None."""
        (note,) = self._db.execute("SELECT note FROM memories WHERE number = ?", (number,)).fetchone()
        return None if note is None else json.loads(note)

    def journal(self) -> list[Any]:
        """Its entries, oldest first."""
        return [json.loads(entry) for (entry,) in self._db.execute("SELECT entry FROM journal ORDER BY number")]

    def keys(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Of every key: its row [n], number of its memory [n], its text."""
        found = self._db.execute("SELECT row, memory, text FROM keys ORDER BY row").fetchall()
        texts = [self.memory(memory).text if text is None else text for _, memory, text in found]
        return np.array([row for row, *_ in found], int), np.array([owner for _, owner, _ in found], int), texts

    def rows(self, memories: Sequence[int]) -> list[int]:
        """Row of the first key of each of these memories, all of which have keys with vectors."""
        first: dict[int, int] = {}
        for row, (owner, _) in self._keys.items():
            first.setdefault(owner, row)
        return [first[number] for number in memories]

    def vectors(self, rows: Iterable[int]) -> Tensor:
        """Vectors of keys [n, d]."""
        return torch.stack([self._keys[int(row)][1] for row in rows])

    def cosines(self, vector: Tensor) -> np.ndarray:
        """Cosine of every key's vector with this one [d], in the order of `keys` [n]."""
        if self._matrix is None:
            self._matrix = self.vectors(self._keys) if self._keys else torch.zeros(0, len(vector))
        cosines: np.ndarray = (self._matrix @ vector).numpy()
        return cosines

    def nearest(self, vector: Tensor) -> Iterator[tuple[int, float]]:
        """Memories by falling cosine of their best key with the vector [d] (ties: earlier key first), each once."""
        return best(self.cosines(vector), [owner for owner, _ in self._keys.values()])

    def dump(self) -> Iterator[str]:
        """All that the bank holds, a line per row, the same for banks with the same content however they came about."""
        for table in _CONTENT:
            for row in self._db.execute(f"SELECT * FROM {table} ORDER BY 1, 2"):
                yield f"{table} {json.dumps(row, default=bytes.hex)}"

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
        self._db.execute("DELETE FROM memories WHERE number = ?", (memory,))
        self._changed()

    def _turn_numbers(self, turn_ids: Iterable[str]) -> Iterator[int]:
        for name in dict.fromkeys(turn_ids):
            row = self._db.execute("SELECT number FROM turns WHERE id = ?", (name,)).fetchone()
            if row is None:
                raise DataError("a memory's source is not a turn of the bank", self.folder, name)
            yield row[0]

    def _turns_of(self, session: int) -> tuple[Turn, ...]:
        query = "SELECT id, speaker, text, time, images FROM turns WHERE session = ? ORDER BY number"
        return tuple(map(_turn, self._db.execute(query, (session,))))


class Ranker:
    """Ranks the memories of one bank; what it needs of all keys is read once for each state of the bank.

    Args:
        store: the bank's.
        encoder: of the keys.
    """

    def __init__(self, store: Store, encoder: SentenceEncoder) -> None:
        self.store, self.encoder, self._version = store, encoder, -1

    def rank(self, text: str, method: Method) -> Iterator[tuple[int, float]]:
        """All memories with keys as (number, score), best first; of equal ones the one with the earlier key."""
        if method == "dense":
            # one at a time: vectors differ in the last bits with the batch they were encoded in
            return self.store.nearest(self.encoder.encode([text])[0])
        return self.best(self.scores(text, method))

    def scores(self, text: str, method: Method) -> np.ndarray:
        """Score of every key, in the order of `Store.keys` [n]."""
        self._read()
        lexical = self._bm25.scores(stems(text))
        if method == "bm25":
            return lexical
        cosines = self.cosines(text)
        return cosines if method == "dense" else standardise(lexical) + standardise(cosines)

    def cosines(self, text: str) -> np.ndarray:
        """Cosine of every key's vector with the text's [n]."""
        return self.store.cosines(self.encoder.encode([text])[0]).astype(np.float64)

    def best(self, scores: np.ndarray) -> Iterator[tuple[int, float]]:
        """Memories by falling score of their best key, given the scores of all keys [n]."""
        return best(scores, self.owners)

    @property
    def owners(self) -> np.ndarray:
        """Number of every key's memory [n]."""
        self._read()
        return self._owners

    def _read(self) -> None:
        if self._version != self.store.version:
            _, self._owners, texts = self.store.keys()
            self._bm25 = BM25([stems(text) for text in texts])
            self._version = self.store.version


def best(scores: np.ndarray, owners: Sequence[int] | np.ndarray) -> Iterator[tuple[int, float]]:
    """Memories by falling score of their best key (ties: earlier key first), each once, given the scores of all keys
    and the memories that these are of [n]."""
    seen: set[int] = set()
    for place in np.argsort(-scores, kind="stable").tolist():
        if (owner := int(owners[place])) not in seen:
            seen.add(owner)
            yield owner, float(scores[place])


def _vector(blob: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(blob, np.float32).copy())


def _turn(row: Sequence[Any]) -> Turn:
    name, speaker, text, when, images = row
    return Turn(name, speaker, text, when, tuple(Image(*image) for image in json.loads(images)))
