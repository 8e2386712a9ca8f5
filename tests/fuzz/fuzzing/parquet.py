"""Mutations of a Parquet part: of the values in its rows, within its schema, and of its bytes."""

from __future__ import annotations

import io
import random

import pyarrow as pa
import pyarrow.parquet as pq

from fuzzing.mutate import change_bytes, change_value
from remind.states.parquet import SCHEMA


def mutate_part(data: bytes, rng: random.Random) -> bytes:
    """One to four mutations of a part of states."""
    if rng.random() < 0.7:
        try:
            rows = pq.read_table(io.BytesIO(data)).to_pylist()
        except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError):
            rows = []
        for _ in range(20 if rows else 0):
            made = _rows([dict(row) for row in rows], rng)
            if made is not None:
                return made
    for _ in range(rng.randint(1, 4)):
        data = change_bytes(data, rng)
    return data


def _rows(rows: list[dict[str, object]], rng: random.Random) -> bytes | None:
    """None where the values do not fit the schema."""
    holder = [rows]
    for _ in range(rng.randint(1, 3)):
        change_value(holder, rng)
    out = io.BytesIO()
    try:
        pq.write_table(pa.Table.from_pylist(holder[0], schema=SCHEMA), out)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError, KeyError):
        return None
    return out.getvalue()
