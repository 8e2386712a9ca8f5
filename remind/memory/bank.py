"""A bank: one SQLite file, in which a session is one transaction; the ranking of its memories; what its system asks.

Repeated ingesting, transactions, budgets, feedback and lost requests are the same for all systems and
implemented here. Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from remind.core.errors import ConfigError, DataError, ModelError, shown
from remind.core.processes import locked
from remind.data.dialogue import Image, Session, Turn
from remind.llm.request import ChatModel, Reply, Request, Stage, from_template
from remind.memory.base import QUESTION_STAGES, Draft, Memory, Query, Retrieval, Services, System
from remind.models.encoder import SentenceEncoder
from remind.perception.perceive import BM25, standardise
from remind.states.pyramid import turn_lines, unnumbered
from remind.text.words import stems

#: How memories are ranked. dense: by cosine. bm25: by stemmed words. hybrid: by the sum of both as z-scores over all
#: keys. A memory has the score of its best key.
Method = Literal["dense", "bm25", "hybrid"]
#: Candidates in a row that may not fit a budget before the search for smaller ones ends.
_MISSES = 64
#: Requests of a bank before its share of lost ones can end a dialogue that is being taken in.
_EARLY_CHECK = 100
_FORMAT = 3
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
#: A memory beside each of its turns.
_MEMORY = """
SELECT m.text, m.kind, m.time, m.tokens, t.number, t.id, t.speaker, t.text, t.time, t.images
FROM memories m LEFT JOIN sources ON memory = m.number LEFT JOIN turns t ON t.number = turn
WHERE m.number = ? ORDER BY t.number
"""
_CONTENT = ("sessions", "turns", "memories", "sources", "keys", "journal", "learned")
_log = logging.getLogger(__name__)


class _Keys:
    """What ranking needs of all keys, as they are between two changes."""

    def __init__(self, store: Store) -> None:
        rows = store.rows("SELECT memory, text, vector FROM keys ORDER BY row")
        self._store, self._texts = store, [(memory, text) for memory, text, _ in rows]
        #: Number of every key's memory [n].
        self.owners = np.array([memory for memory, *_ in rows], int)
        held = bytearray().join(vector for *_, vector in rows if vector is not None)
        #: Vector of every key [n, d]; of a bank either all keys have one or none.
        self.vectors = torch.from_numpy(np.frombuffer(held, np.float32).reshape(len(rows), -1)) if held else None

    @cached_property
    def bm25(self) -> BM25:
        texts = (self._store.memory(memory).text if text is None else text for memory, text in self._texts)
        return BM25([stems(unnumbered(text)) for text in texts])


class Store:
    """The file of a bank, and the ranking of its memories. One process and thread at a time.

    Args:
        folder: made if absent.
        identity: what the bank depends on; an existing one must have the same.
        encoder: of keys.

    Raises:
        DataError: the file is something else or damaged, or a bank of another format or identity, and what differs.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], encoder: SentenceEncoder) -> None:
        self.folder, self._path, self.encoder = folder, folder / "bank.sqlite", encoder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._path, isolation_level=None)
            self._prepare(json.loads(json.dumps({"format": _FORMAT, **identity})))
        except (OSError, sqlite3.Error) as error:
            raise DataError(f"cannot be used as a memory bank: {error}; choose another folder", self._path) from None
        self._changed()

    def _prepare(self, identity: Mapping[str, Any]) -> None:
        if (damage := self._one("PRAGMA quick_check(1)")) != "ok":
            raise DataError(f"is damaged ({damage}); delete the bank's folder to rebuild it", self._path)
        if not self._one("SELECT count(*) FROM sqlite_master"):
            self._db.executescript(f"BEGIN; {_TABLES} COMMIT;")
        if not (held := self.rows("SELECT value FROM about")):
            self._insert("about", json.dumps(identity))
            return
        for name, value in identity.items():
            if (other := json.loads(held[0][0]).get(name)) != value:
                message = f"the bank's {name} is {shown(other)}, not {shown(value)}; choose another folder"
                raise DataError(message, self.folder)

    def _changed(self) -> None:
        self._memories: dict[int, Memory] = {}
        self.__dict__.pop("_keys", None)

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
            self._changed()
            if isinstance(error, sqlite3.Error):
                raise DataError(f"cannot be written: {error}", self._path) from None
            raise

    def clear(self) -> None:
        """Remove everything."""
        for table in (*_CONTENT, "sqlite_sequence"):
            self._db.execute(f"DELETE FROM {table}")
        self._changed()

    def add_session(self, session: Session) -> None:
        """The session and its turns."""
        number = self._insert("sessions", None, session.id, session.time, "[]")
        for turn in session.turns:
            images = json.dumps([[image.index, image.path, image.caption, image.source] for image in turn.images])
            self._insert("turns", None, turn.id, number, turn.speaker, turn.text, turn.time, images)

    def degrade(self, session_id: str, reasons: Sequence[str]) -> None:
        """Note what was lost of a session, a line each."""
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
        turns, when = self._turns(draft.sources or ()), draft.time
        if when is None and turns:
            when = turns[0][1]
        note = None if draft.note is None else json.dumps(draft.note)
        new = self._insert("memories", number, draft.kind, draft.text, when, tokens, note)
        self._db.executemany("INSERT INTO sources VALUES (?, ?)", [(new, turn) for turn, _ in turns])
        blobs = [None] * len(draft.keys) if vectors is None else [row.numpy().tobytes() for row in vectors.float()]
        keys = [(new, key, blob) for key, blob in zip(draft.keys, blobs, strict=True)]
        self._db.executemany("INSERT INTO keys VALUES (NULL, ?, ?, ?)", keys)
        self._changed()
        return new

    def remove(self, number: int) -> None:
        """Remove a memory with its keys."""
        for table, column in (("sources", "memory"), ("memories", "number"), ("keys", "memory")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))
        self._changed()

    def log(self, entry: Any) -> None:
        """Append a JSON value to the journal."""
        self._insert("journal", None, json.dumps(entry))

    def learn(self, name: str, value: bytes) -> None:
        """Keep what was learned under a name, in place of what was there."""
        self._db.execute("REPLACE INTO learned VALUES (?, ?)", (name, value))

    # reading

    def learned(self, name: str) -> bytes | None:
        """What `learn` kept last; None: nothing."""
        return next((value for (value,) in self.rows("SELECT value FROM learned WHERE name = ?", name)), None)

    def sessions(self) -> list[Session]:
        """Every session as it was ingested."""
        names = self.rows("SELECT id FROM sessions ORDER BY number")
        return [session for (name,) in names if (session := self.session(name)) is not None]

    def session(self, session_id: str) -> Session | None:
        """A session as it was ingested; None: it is not stored."""
        for number, when in self.rows("SELECT number, time FROM sessions WHERE id = ?", session_id):
            query = "SELECT id, speaker, text, time, images FROM turns WHERE session = ? ORDER BY number"
            return Session(session_id, when, tuple(_turn(row) for row in self.rows(query, number)))
        return None

    def degraded(self) -> dict[str, list[str]]:
        """Sessions of which something was lost, with what it was."""
        rows = self.rows("SELECT id, degraded FROM sessions WHERE degraded != '[]' ORDER BY number")
        return {name: json.loads(reasons) for name, reasons in rows}

    def count(self, table: str = "memories") -> int:
        """Rows of a table."""
        return int(self._one(f"SELECT count(*) FROM {table}"))

    def numbers(self, *kinds: str) -> list[int]:
        """Of all memories, or of all of these kinds, ascending."""
        where = f"WHERE kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        return [number for (number,) in self.rows(f"SELECT number FROM memories {where} ORDER BY number", *kinds)]

    def memory(self, number: int, score: float = 0.0) -> Memory:
        """A memory by its number."""
        if number not in self._memories:
            rows = self.rows(_MEMORY, number)
            text, kind, when, tokens, position = rows[0][:5]
            turns = [_turn(row[5:]) for row in rows if row[4] is not None]
            text = "\n".join(map(turn_lines, turns)) if text is None else text
            sources = tuple(turn.id for turn in turns) or None
            self._memories[number] = Memory(f"m{number}", text, kind, sources, when, 0.0, tokens, position)
        return replace(self._memories[number], score=score)

    def words(self, turn_ids: Sequence[str]) -> str:
        """Turns in the order of the dialogue, as a prompt shows them."""
        query = "SELECT id, speaker, text, time, images FROM turns WHERE number = ?"
        numbers = [number for number, _ in self._turns(turn_ids)]
        return "\n".join(turn_lines(_turn(row)) for number in numbers for row in self.rows(query, number))

    def note(self, number: int) -> Any:
        """The system's own JSON value of a memory, or None."""
        ((note,),) = self.rows("SELECT note FROM memories WHERE number = ?", number)
        return None if note is None else json.loads(note)

    def journal(self) -> list[Any]:
        """Its entries, oldest first."""
        return [json.loads(entry) for (entry,) in self.rows("SELECT entry FROM journal ORDER BY number")]

    def rows(self, query: str, *given: Any) -> list[Any]:
        """What a query finds."""
        return self._db.execute(query, given).fetchall()

    # ranking

    @cached_property
    def _keys(self) -> _Keys:
        return _Keys(self)

    def vectors(self, numbers: Sequence[int]) -> Tensor:
        """Vectors of the first keys of these memories, all of which have some [n, d]."""
        query = "SELECT vector FROM keys WHERE memory = ? ORDER BY row LIMIT 1"
        return torch.from_numpy(np.stack([np.frombuffer(self._one(query, one), np.float32) for one in numbers]))

    def nearest(self, vector: Tensor) -> Iterator[tuple[int, float]]:
        """Memories by falling cosine of their best key with the vector [d] (ties: earlier key first), each once."""
        return self._best(self._cosines(vector))

    def rank(self, text: str, method: Method) -> Iterator[tuple[int, float]]:
        """All memories with keys as (number, score), best first; of equal ones the one with the earlier key."""
        if method == "bm25":
            return self._best(self._keys.bm25.scores(stems(text)))
        # one at a time: vectors differ in the last bits with the batch they were encoded in
        cosines = self._cosines(self.encoder.encode([text])[0])
        if method == "dense":
            return self._best(cosines)
        lexical = self._keys.bm25.scores(stems(text))
        return self._best(standardise(lexical) + standardise(cosines.astype(np.float64)))

    def _cosines(self, vector: Tensor) -> np.ndarray:
        vectors = self._keys.vectors
        return np.zeros(0) if vectors is None else (vectors @ vector).numpy()

    def _best(self, scores: np.ndarray) -> Iterator[tuple[int, float]]:
        """Memories by falling score of their best key, given the scores of all keys [n]."""
        seen, owners = set[int](), self._keys.owners
        for place in np.argsort(-scores, kind="stable").tolist():
            if (owner := int(owners[place])) not in seen:
                seen.add(owner)
                yield owner, float(scores[place])

    # inside

    def _one(self, query: str, *given: Any) -> Any:
        return self._db.execute(query, given).fetchone()[0]

    def _insert(self, table: str, *values: Any) -> int:
        marks = ", ".join("?" * len(values))
        return int(self._db.execute(f"INSERT INTO {table} VALUES ({marks})", values).lastrowid or 0)

    def _turns(self, turn_ids: Iterable[str]) -> list[tuple[int, str | None]]:
        """Numbers and times of turns, in the order of the dialogue."""
        query = (
            "SELECT turns.number, coalesce(turns.time, sessions.time) FROM turns "
            "JOIN sessions ON sessions.number = session WHERE turns.id = ?"
        )
        found: dict[int, str | None] = {}
        for name in turn_ids:
            if not (rows := self.rows(query, name)):
                raise DataError("a memory's source is not a turn of the bank", self.folder, name)
            found.update(rows)
        return sorted(found.items())


def _turn(row: Sequence[Any]) -> Turn:
    name, speaker, text, when, images = row
    return Turn(name, speaker, text, when, tuple(Image(*image) for image in json.loads(images)))


class Bank(ABC):
    """The memory of one dialogue, in a folder that only this process writes to.

    Args:
        folder: made if absent.
        dialogue_id: whose memory it is.
        system: the system it belongs to.
        services: encoder and chat models.

    Raises:
        DataError, ConfigError: as `System.open`.
    """

    def __init_subclass__(cls, of: type[System] | None = None) -> None:
        """Make this class that of the banks of a system."""
        if of is not None:
            of.banks = cls

    def __init__(self, folder: str | Path, dialogue_id: str, system: System, services: Services) -> None:
        self.folder, self.dialogue_id, self.system, self.services = Path(folder), dialogue_id, system, services
        self.encoder = services.encoder
        #: Requests made to take sessions in, since the bank was opened or made anew.
        self.asked = 0
        #: What was lost for the session or query at hand, one line each.
        self.lost: list[str] = []
        with ExitStack() as held:
            lock = self.folder.with_name(f".{self.folder.name}.lock")
            held.enter_context(locked(lock, wait=False, place=self.folder))
            identity = {"dialogue": dialogue_id, "system": system.about(), "encoder": self.encoder.name}
            self.store = Store(self.folder, identity, self.encoder)
            held.callback(self.store.close)
            self._held = held.pop_all()

    def ingest(self, session: Session) -> None:
        """Store a session, completely or not at all. One that is already stored is not ingested again.

        Args:
            session: the one after the last in the dialogue, whatever its time says.

        Raises:
            DataError: a session of no turns, an id of another turn, or the same id with other content.
            ModelError: as `finish`, where many requests were made.
        """
        if (held := self.store.session(session.id)) is not None:
            if held != session:
                raise DataError("the bank holds a session of this id with other content", self.folder, session.id)
            return
        if not session.turns:
            raise DataError("the session has no turns", self.folder, session.id)
        with self.store.transaction():
            self._store(session)
        self._check_lost(done=False)

    def finish(self) -> None:
        """Compute what depends on the whole dialogue. Call it after the last session, and again after more.

        A line of the log tells how many requests were lost.

        Raises:
            ModelError: more than the share `Services.max_failed` of the requests were lost: they failed, or the reply
                cannot be read. `repair` makes them again.
        """
        self.complete()
        self._check_lost(done=True)

    def retrieve(self, query: Query, k: int | None = None, budget: int | None = None) -> Retrieval:
        """The best memories for a query; without a limit all that the system gives. Does not change the bank.

        Args:
            k: maximum number of memories; None: no limit.
            budget: maximum number of tokens in all. A memory that does not fit is skipped, and lower ones may follow.

        Raises:
            ConfigError: k or budget below 1.
        """
        if min(value for value in (k, budget, 1) if value is not None) < 1:
            raise ConfigError(f"k and budget must be at least 1, not {k} and {budget}")
        trace, chosen, self.lost = dict[str, Any](), list[Memory](), []
        spent = misses = 0
        for item in self.rank(query, k, trace):
            memory = item if isinstance(item, Memory) else self.store.memory(*item)
            if budget is None or spent + memory.tokens <= budget:
                chosen.append(memory)
                misses, spent = 0, spent + memory.tokens
            else:
                misses += 1
            if len(chosen) == k or misses == _MISSES:
                break
        return Retrieval(query, tuple(chosen), {**trace, "failed": self.lost} if self.lost else trace)

    def feedback(self, retrieval: Retrieval, cited: Collection[int]) -> None:
        """Report which memories of a retrieval an answer cited, by their positions from 0. By default nothing is
        learned from it."""
        return

    def repair(self) -> bool:
        """Make the bank anew if something was lost; earlier replies come from the run's cache.

        Returns:
            Whether there was anything to do.
        """
        if not self.store.degraded():
            return False
        sessions, self.asked = self.store.sessions(), 0
        with self.store.transaction():
            self.store.clear()
            for session in sessions:
                self._store(session)
        return True

    def report(self) -> dict[str, Any]:
        """Counts of sessions, turns, memories and lost requests, bytes; what was lost, by session."""
        size = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        counts = {name: self.store.count(name) for name in _CONTENT if name not in ("sources", "learned")}
        degraded = self.store.degraded()
        lost = sum(map(len, degraded.values())) if self.asked else 0
        return {**counts, "bytes": size, "degraded": degraded, "asked": self.asked, "lost": lost}

    def close(self) -> None:
        """Close the bank and release its folder."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # what a system is

    @abstractmethod
    def remember(self, session: Session) -> None:
        """Store memories of the session in `store`, and in `lost` what was lost; runs inside the session's
        transaction."""

    @abstractmethod
    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterable[tuple[int, float] | Memory]:
        """Numbers of memories with their scores, best first; read only as far as needed. A memory that is written for
        the query and not stored is given itself instead of a number.

        Args:
            k: how many will be read, if known.
            trace: for explanations, as JSON.
        """

    def complete(self) -> None:
        """What `finish` computes; by default nothing."""
        return

    @property
    def learns(self) -> bool:
        """Whether `feedback` changes anything."""
        return False

    # what systems use

    def put(self, draft: Draft, number: int | None = None) -> int:
        """Store a memory that has a text, under a number that there is or a new one. Returns the number."""
        assert draft.text is not None
        if number is not None:
            self.store.remove(number)
        return self.put_all([draft], [draft.text], number=number)[0]

    def put_all(
        self, drafts: Sequence[Draft], texts: Sequence[str], encoded: bool = True, number: int | None = None
    ) -> list[int]:
        """Store memories, whose keys are encoded together. Returns their numbers.

        Args:
            texts: of each as a reader sees it.
            encoded: whether keys get vectors.
            number: of a single one, as in `Store.add`.
        """
        keys = [[unnumbered(key or text) for key in draft.keys] for draft, text in zip(drafts, texts, strict=True)]
        vectors = self.encoder.encode_apart([key for own in keys for key in own]) if encoded else None
        parts = [None] * len(keys) if vectors is None else vectors.split([len(own) for own in keys])
        counted = zip(drafts, self.encoder.count_many(texts), parts, strict=True)
        return [self.store.add(draft, tokens, part, number) for draft, tokens, part in counted]

    def put_turns(self, turns: Sequence[Turn]) -> None:
        """Store turns as memories of their own."""
        self.put_all([Draft("turn", (turn.id,)) for turn in turns], [turn_lines(turn) for turn in turns])

    def written(self, kind: str, text: str, sources: Iterable[str], time: str | None = None) -> Memory:
        """A memory that is written for a query and not stored."""
        tokens = self.encoder.count_tokens(text)
        return Memory(kind, text, kind, tuple(dict.fromkeys(sources)) or None, time, 1.0, tokens)

    def chat(self, stage: Stage) -> ChatModel | None:
        """The chat model for a stage of this system and dialogue; None without an endpoint."""
        source = self.services.chat
        return None if source is None else source(self.system.name, self.dialogue_id, stage)

    def send(self, *requests: Request, salvaged: bool = False) -> list[Reply]:
        """Replies of the model that the run names for the requests' stage. One that did not come or cannot be read gets
        a line in `lost`.

        Args:
            salvaged: replies in another form than asked for are of use, too.

        Raises:
            ConfigError: it names none.
        """
        stage = requests[0].stage
        if (model := self.chat(stage)) is None:
            raise ConfigError(f"{self.system.name} needs a chat model ({stage}); name one: --llm.default.base_url URL")
        if stage not in QUESTION_STAGES:
            self.asked += len(requests)
        replies = model.complete(requests)
        failed = [one for one in replies if one.failure not in ((None, "invalid") if salvaged else (None,))]
        self.lost += (f"{stage}: {one.failure}: {one.message}" for one in failed)
        return replies

    def ask(
        self,
        stage: Stage,
        template: str,
        data: Mapping[str, str],
        room: int,
        schema: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> Reply:
        """The reply to a filled template (`from_template`); errors as `send`."""
        return self.send(from_template(stage, template, self.dialogue_id, schema, room, data, **values))[0]

    # inside

    def _check_lost(self, done: bool) -> None:
        """Raise where too many requests were lost; in the end tell of them in any case."""
        lost, most = [line for lines in self.store.degraded().values() for line in lines], self.services.max_failed
        if not lost or self.asked < (1 if done else _EARLY_CHECK):
            return
        told = f"{self.system.name}: {len(lost)} of {self.asked} requests for dialogue {self.dialogue_id} were lost"
        if len(lost) > most * self.asked:
            raise ModelError(f"{told}, more than max_failed {most:g}; the last: {lost[-1]}")
        if done:
            _log.warning("%s; the last: %s", told, lost[-1])

    def _store(self, session: Session) -> None:
        self.lost = []
        self.store.add_session(session)
        self.remember(session)
        self.store.degrade(session.id, self.lost)


def mapping(reply: Reply) -> Mapping[str, Any]:
    """A reply's JSON object; an empty one where it is none."""
    return reply.value if isinstance(reply.value, Mapping) else {}
