"""Replies that were paid for, in one SQLite file that several processes may share and that outlives a killed one."""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from remind.core.errors import DataError
from remind.llm.request import Reply

#: Seconds after which the request of a process that fell silent may be asked by another.
LEASE = 30.0
#: Seconds to wait for the file while another process writes.
BUSY = 30.0
_APPLICATION = 0x524D4C43
_CLOSED = -1
_INHERITED: list[sqlite3.Connection] = []
_TABLES = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, endpoint TEXT NOT NULL, stage TEXT NOT NULL, text TEXT NOT NULL, finished INTEGER NOT NULL,
    calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL,
    made REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (
    key TEXT PRIMARY KEY, calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    seconds REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leases (
    key TEXT PRIMARY KEY, owner TEXT NOT NULL, machine TEXT NOT NULL, pid INTEGER NOT NULL, expires REAL NOT NULL
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Spent:
    """What was paid: tries that reached the server, tokens of those that were answered, seconds."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.seconds + other.seconds,
        )


def spent_on(reply: Reply) -> Spent:
    """What one reply cost."""
    return Spent(reply.calls, reply.prompt_tokens, reply.completion_tokens, reply.seconds)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the file knows of a request: its reply, if one was paid for, and all that was ever spent on it."""

    reply: Reply | None
    spent: Spent


class ReplyCache:
    """The file. One object serves all threads of a process, and works on in its forks.

    A reply is committed before `put` returns. A request under way is marked by a lease, renewed while its process
    lives, so that two processes never pay for the same request; the lease of a process that was killed ends at once on
    the same machine and after `LEASE` seconds elsewhere. WAL needs a file system with shared memory: not NFS.

    Args:
        path: made with its folders if absent.
        lease: seconds of a lease.

    Raises:
        DataError: the file is not such a cache, or cannot be opened or written.
    """

    def __init__(self, path: str | Path, lease: float = LEASE) -> None:
        self.path = Path(path).expanduser()
        self.lease = lease
        self._machine = _machine()
        self._lock = threading.RLock()
        self._pid = _CLOSED
        with self._open():
            pass

    def lookup(self, keys: Sequence[str]) -> dict[str, Entry]:
        """What is known of these requests; those the file has never seen are left out."""
        found: dict[str, Entry] = {}
        columns = "r.text, r.finished, r.calls, r.prompt_tokens, r.completion_tokens, r.seconds"
        with self._open() as db:
            for start in range(0, len(keys), 500):
                part = list(keys[start : start + 500])
                marks = ",".join("?" * len(part))
                rows = db.execute(
                    f"SELECT s.key, s.calls, s.prompt_tokens, s.completion_tokens, s.seconds, {columns} "
                    f"FROM spent s LEFT JOIN replies r ON r.key = s.key WHERE s.key IN ({marks})",
                    part,
                )
                for key, calls, prompt, completion, seconds, *reply in rows:
                    found[key] = Entry(
                        _reply(reply) if reply[0] is not None else None, Spent(calls, prompt, completion, seconds)
                    )
        return found

    def claim(self, key: str) -> Reply | bool:
        """The reply if there is one, True if the caller is now the one to ask, False while another is asking."""
        with self._writing() as db:
            row = db.execute(
                "SELECT text, finished, calls, prompt_tokens, completion_tokens, seconds FROM replies WHERE key = ?",
                (key,),
            ).fetchone()
            if row is not None:
                return _reply(row)
            now = time.time()
            held = db.execute("SELECT machine, pid, expires FROM leases WHERE key = ?", (key,)).fetchone()
            if held is not None and held[2] > now and not (held[0] == self._machine and not _alive(held[1])):
                return False
            db.execute(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)",
                (key, self._owner, self._machine, self._pid, now + self.lease),
            )
            self._renew()
            return True

    def put(self, key: str, reply: Reply, endpoint: str, stage: str) -> None:
        """Record an answered request and give back its lease; committed on return. A second reply is not kept."""
        with self._writing() as db:
            made = (reply.calls, reply.prompt_tokens, reply.completion_tokens, reply.seconds, time.time())
            db.execute(
                "INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (key, endpoint, stage, reply.text, reply.finished, *made),
            )
            self._settle(db, key, spent_on(reply))

    def release(self, key: str, spent: Spent = Spent()) -> None:
        """Give back the lease of a request that failed, and record what its tries cost."""
        with self._writing() as db:
            self._settle(db, key, spent)

    def close(self) -> None:
        """Stop renewing and close the file; the next use opens it again."""
        if self._pid != os.getpid():  # a fork has nothing of its own until it uses the cache
            return
        with self._lock:
            self._stop.set()
            self._db.close()
            self._pid = _CLOSED

    def _settle(self, db: sqlite3.Connection, key: str, spent: Spent) -> None:
        db.execute(
            "INSERT INTO spent VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET calls = calls + excluded.calls, "
            "prompt_tokens = prompt_tokens + excluded.prompt_tokens, seconds = seconds + excluded.seconds, "
            "completion_tokens = completion_tokens + excluded.completion_tokens",
            (key, spent.calls, spent.prompt_tokens, spent.completion_tokens, spent.seconds),
        )
        db.execute("DELETE FROM leases WHERE key = ? AND owner = ?", (key, self._owner))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time; made anew after a fork, which must not share one."""
        if self._pid not in (_CLOSED, os.getpid()):
            # what the parent held is left alone: its lock may be taken for ever, and closing its file is its own affair
            _INHERITED.append(self._db)
            self._lock, self._pid = threading.RLock(), _CLOSED
        with self._lock:
            try:
                if self._pid == _CLOSED:
                    self._connect()
                yield self._db
            except sqlite3.Error as error:
                hint = "" if isinstance(error, sqlite3.OperationalError) else "; name another file"
                raise DataError(f"cannot be used as a cache of replies: {error}{hint}", self.path) from None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _connect(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot be made: {error.strerror}", self.path.parent) from None
        db = sqlite3.connect(self.path, timeout=BUSY, isolation_level=None, check_same_thread=False)
        _prepare(db, self.path)
        self._db, self._pid = db, os.getpid()
        self._owner = uuid.uuid4().hex
        self._stop = threading.Event()
        self._renewer: threading.Thread | None = None

    def _renew(self) -> None:
        """A thread that renews this process's leases while it lives; a daemon, so that it keeps no process alive."""
        if self._renewer is None:
            arguments = (self._stop, self._owner)
            self._renewer = threading.Thread(target=self._keep, args=arguments, name="leases", daemon=True)
            self._renewer.start()

    def _keep(self, stop: threading.Event, owner: str) -> None:
        while not stop.wait(self.lease / 3):
            try:
                with self._lock:
                    if not stop.is_set():
                        expires = time.time() + self.lease
                        self._db.execute("UPDATE leases SET expires = ? WHERE owner = ?", (expires, owner))
            except sqlite3.Error:  # busy or full: the next round tries again, and a lease lasts three of them
                continue


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """WAL and the tables. Two processes may do so at once, and switching to WAL does not wait by itself."""
    patience = time.monotonic() + BUSY
    while True:
        try:
            kind = db.execute("PRAGMA application_id").fetchone()[0]
            empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
            if kind != _APPLICATION and not empty:
                raise DataError("is a database of something else; name another file for the cache of replies", path)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id = {_APPLICATION}; COMMIT;")
            return
        except sqlite3.OperationalError as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if "locked" not in str(error) or time.monotonic() > patience:
                db.close()
                raise
            time.sleep(0.05)
        except BaseException:
            db.close()
            raise


def _reply(row: Sequence) -> Reply:
    text, finished, calls, prompt, completion, seconds = row
    return Reply(text, None, prompt, completion, bool(finished), seconds, calls)


def _machine() -> str:
    """This machine and its process numbers: containers may share a host name and count processes on their own."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _alive(pid: int) -> bool:
    """Whether the process exists, as far as can be asked without harm."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
