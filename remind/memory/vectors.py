"""The vectors of a bank's keys, in its database and in memory; the nearest of them, exactly."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from remind.core.errors import DataError

#: So many of the nearest are sorted before the others.
_FEW = 1000
TABLE = "CREATE TABLE vectors (row INTEGER PRIMARY KEY, vector BLOB NOT NULL);"


class Vectors:
    """Unit vectors numbered from 0 in the order they came. The caller owns the transactions.

    Args:
        db: has `TABLE`.
        place: of the bank, for errors.
    """

    def __init__(self, db: sqlite3.Connection, place: object) -> None:
        self._db, self._place = db, str(place)
        self.load()

    def load(self) -> None:
        """Read what the database has: when it is opened, and after a rollback."""
        count = "SELECT count(*), coalesce(max(length(vector)), 0) FROM vectors"
        self._count, size = self._db.execute(count).fetchone()
        rows = np.empty((self._count, size // 4), dtype=np.float32)
        for place, (blob,) in enumerate(self._db.execute("SELECT vector FROM vectors ORDER BY row")):
            rows[place] = np.frombuffer(blob, dtype=np.float32)
        self._rows = torch.from_numpy(rows)

    def __len__(self) -> int:
        return self._count

    def append(self, vectors: Tensor, record: str) -> range:
        """Add rows [n, d] and return their numbers.

        Args:
            record: whose they are, for errors.

        Raises:
            DataError: another dimension than that of the bank, or a row that is zero or not finite.
        """
        first, rows = self._count, vectors.float()
        if first and rows.shape[1] != self._rows.shape[1]:
            raise DataError(f"a vector has {rows.shape[1]} numbers, not {self._rows.shape[1]}", self._place, record)
        lengths = rows.norm(dim=-1)
        if not bool((lengths.isfinite() & (lengths > 0)).all()):
            raise DataError("a vector is zero or not finite", self._place, record)
        blobs = [(first + place, row.tobytes()) for place, row in enumerate(rows.numpy())]
        self._db.executemany("INSERT INTO vectors VALUES (?, ?)", blobs)
        self._count += len(rows)
        if self._count > len(self._rows):
            # room for as many again, so that adding one by one does not copy all of them each time
            room = torch.empty(2 * self._count, rows.shape[1])
            room[:first] = self._rows[:first] if first else room[:0]
            self._rows = room
        self._rows[first : self._count] = rows
        return range(first, self._count)

    def take(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """The rows of these numbers [n, d]."""
        return self._rows[torch.as_tensor(np.asarray(rows, dtype=np.int64))]

    def nearest(self, vector: Tensor) -> Iterator[tuple[int, float]]:
        """All rows as (number, cosine with the vector [d]) by falling cosine; ties: earlier first."""
        if not self._count:
            return
        cosines = (self._rows[: self._count] @ vector).numpy()
        # few are read: the others are sorted only where they are asked for
        level = np.partition(cosines, -_FEW)[-_FEW] if self._count > _FEW else -np.inf
        for part in (cosines >= level, cosines < level):
            places = np.flatnonzero(part)
            for row in places[np.argsort(-cosines[places], kind="stable")].tolist():
                yield row, float(cosines[row])
