"""Replies that were paid for, in one SQLite table that several processes may share and that outlives a killed one."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from remind.core.errors import DataError
from remind.llm.request import Reply

#: Seconds to wait for the file while another process writes.
_BUSY = 30.0
_TABLE = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, endpoint TEXT NOT NULL, stage TEXT NOT NULL, text TEXT NOT NULL, finished INTEGER NOT NULL,
    calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL,
    made REAL NOT NULL
) WITHOUT ROWID
"""


class ReplyCache:
    """The file. Threads, processes and forks may share it: each operation opens a connection of its own.

    Args:
        path: made with its folders if absent.

    Raises:
        DataError: the file is not such a cache, or cannot be opened or written. OSError: its folder cannot be made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as db:
            db.execute(_TABLE)

    def get(self, key: str) -> Reply | None:
        """The reply to this request, with what it cost; None: there is none."""
        columns = "text, finished, calls, prompt_tokens, completion_tokens, seconds"
        with self._open() as db:
            row: Any = db.execute(f"SELECT {columns} FROM replies WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        text, finished, calls, prompt, completion, seconds = row
        # older files have -1 where the server did not count
        return Reply(text, None, max(prompt, 0), max(completion, 0), bool(finished), seconds, calls, cached=True)

    def put(self, key: str, reply: Reply, endpoint: str, stage: str) -> None:
        """Record an answered request, committed on return. A second reply is not kept."""
        counts = (reply.calls, reply.prompt_tokens, reply.completion_tokens, reply.seconds, time.time())
        values = (key, endpoint, stage, reply.text, reply.finished, *counts)
        with self._open() as db:
            db.execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    @contextmanager
    def claim(self, key: str) -> Iterator[None]:
        """The time of the block is the caller's alone to ask for this key, over all threads and processes.

        Those who wait look for the reply first. The system frees the claim of a process that dies.
        """
        lock = self.path.with_name(f"{self.path.name}.{key[:16]}.lock")
        with FileLock(lock):
            yield
            # those who wait hold what was removed: the reply is there by now, so that nobody asks beside them
            lock.unlink(missing_ok=True)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection whose transaction is committed at the end of the block, or rolled back on an error."""
        try:
            with closing(sqlite3.connect(self.path, timeout=_BUSY)) as db, db:
                yield db
        except sqlite3.Error as error:
            hint = "" if isinstance(error, sqlite3.OperationalError) else "; name another file"
            raise DataError(f"cannot be used as a cache of replies: {error}{hint}", self.path) from None
