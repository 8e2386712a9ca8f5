"""Replies that were paid for, in one SQLite file that several processes may share and that outlives a killed one."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from remind.core.errors import DataError
from remind.llm.request import Reply, usage

_log = logging.getLogger(__name__)
#: Seconds to wait for the file while another process writes.
_BUSY = 30.0
#: Stands for a count of tokens that the server did not give.
_UNKNOWN = -1
_APPLICATION = 0x524D4C43
_TABLE = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, endpoint TEXT NOT NULL, stage TEXT NOT NULL, text TEXT NOT NULL, finished INTEGER NOT NULL,
    calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL,
    made REAL NOT NULL
) WITHOUT ROWID
"""


def _reply(row: Sequence[Any]) -> Reply:
    """A row as a reply. Raises ValueError if its text or one of its numbers is not valid."""
    kind, text, finished, calls, prompt_tokens, completion_tokens, seconds = row
    if kind != b"text":
        raise ValueError("its text is not valid")
    if type(finished) is not int or type(calls) is not int or calls < 0:
        raise ValueError("a count is not valid")
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise ValueError("its time is not valid")
    spent = usage(prompt_tokens, completion_tokens)
    return Reply(text.decode(), finished=bool(finished), seconds=seconds, calls=calls, **spent)


class ReplyCache:
    """The file. Threads, processes and forks may share it: each operation opens a connection of its own.

    A reply is committed before `put` returns. While a request is under way its key is locked by a file in the folder
    `<path>.locks`, so that it is paid for once; the system frees the lock of a process that dies.

    Args:
        path: made with its folders if absent.

    Raises:
        DataError: the file is not such a cache, or cannot be opened or written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._locks = self.path.with_name(f"{self.path.name}.locks")
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot be made: {error.strerror}", self._locks) from None
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            application = db.execute("PRAGMA application_id").fetchone()[0]
            if application != _APPLICATION and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise DataError("is a database of something else; name another file for the cache of replies", path)
            db.execute(_TABLE)
            db.execute(f"PRAGMA application_id = {_APPLICATION}")

    def get(self, key: str) -> Reply | None:
        """The reply to this request, with what it cost; None: there is none, or a damaged one, which is removed."""
        columns = "typeof(text), text, finished, calls, prompt_tokens, completion_tokens, seconds"
        with self._open() as db:
            db.text_factory = bytes
            row = db.execute(f"SELECT {columns} FROM replies WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            try:
                return _reply(row)
            except ValueError as error:
                db.execute("DELETE FROM replies WHERE key = ?", (key,))
                _log.warning("%s: the reply %s is damaged (%s); it is asked for again", self.path, key[:12], error)
                return None

    def put(self, key: str, reply: Reply, endpoint: str, stage: str) -> None:
        """Record an answered request, committed on return. A second reply is not kept."""
        tokens = (reply.prompt_tokens, reply.completion_tokens) if reply.usage_known else (_UNKNOWN, _UNKNOWN)
        spent = (reply.calls, *tokens, reply.seconds)
        values = (key, endpoint, stage, reply.text, reply.finished, *spent, time.time())
        with self._open() as db:
            db.execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """For the time of the block, whether the caller alone may ask for this key, over all threads and processes."""
        path = self._locks / key
        try:
            handle = path.open("w")
        except OSError as error:
            raise DataError(f"cannot be locked: {error.strerror}", path) from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            # a holder that removed the file after this one was opened: others lock another file of that name
            if os.fstat(handle.fileno()).st_nlink == 0:
                yield False
                return
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection whose transaction is committed at the end of the block, or rolled back on an error."""
        try:
            with closing(sqlite3.connect(self.path, timeout=_BUSY)) as db, db:
                yield db
        except sqlite3.Error as error:
            hint = "" if isinstance(error, sqlite3.OperationalError) else "; name another file"
            raise DataError(f"cannot be used as a cache of replies: {error}{hint}", self.path) from None
