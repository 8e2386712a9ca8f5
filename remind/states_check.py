"""Whether a table of states says what states can: whole, in range and in order. On columns, so that it costs little."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from remind.dialogue import FORMATS
from remind.errors import DataError
from remind.readers.place import shown

Ints = npt.NDArray[np.int64]

_SPLITS = ("train", "dev", "test")
_NEEDED = ("question_id", "dialogue_id", "split", "format", "question", "visual")
_LISTS = ("options", "answers", "evidence", "evidence_lines", "evidence_found", "images", "images_found", "salience")
_SPANS = ("reasoning", "anchors", "markers")


class _Unsound(Exception):
    """What is wrong, and in which row."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


def check_table(table: pa.Table, levels: Sequence[str], spans: bool, path: Path) -> None:
    """Look at the columns that were read.

    Args:
        table: of the types of `SCHEMA`.
        levels: those of x0, x1 and x2 that are there, with where their parts stand if `spans`.

    Raises:
        DataError: a value missing, an unknown format or split, evidence found that is no evidence, or spans that are
            reversed, out of range, out of order or overlapping. Names the question.
    """
    columns = {name: _whole(table[name]) for name in table.column_names}
    try:
        _plain(columns)
        for name in levels:
            _level(columns[name], name, spans)
        if spans and "x0" in levels:
            _salience(columns["salience"], columns["x0"])
    except _Unsound as error:
        ids = columns["question_id"]
        question = ids[error.row].as_py() if error.row < len(ids) else None
        raise DataError(f"{error}; build the states again", path, question or f"row {error.row}") from None


def _whole(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks)


def _plain(columns: dict[str, pa.Array]) -> None:
    for name in _NEEDED:
        _full(columns[name], name)
    for name in _LISTS:
        _items(columns[name], name)
    for name, known in (("format", FORMATS), ("split", _SPLITS)):
        column = columns[name]
        values = column.to_pylist()
        _all(pc.is_in(column, pa.array(known)), [f"unknown {name} {shown(value)}" for value in values])
    for found, gold in (("evidence_found", "evidence"), ("images_found", "images")):
        pairs = zip(columns[found].to_pylist(), columns[gold].to_pylist(), strict=True)
        _all([set(some) <= set(every) for some, every in pairs], f"{found} names what is not gold")
    if "pictures" in columns:
        pictures = columns["pictures"]
        parents, inside = pc.list_parent_indices(pictures), pictures.flatten()
        for field in ("turn_id", "place", "path"):
            _full(inside.field(field), f"a picture's {field}", parents)


def _level(level: pa.StructArray, name: str, spans: bool) -> None:
    _full(level, name)
    text = level.field("text")
    _full(text, f"the text of {name}")
    if not spans:
        return
    length = pc.utf8_length(text).to_numpy(zero_copy_only=False).astype(np.int64)
    rows = np.arange(len(text))
    dialogue = _pairs(level.field("dialogue"), f"{name}: the span of the dialogue", rows)
    _inside(dialogue, np.zeros_like(length), length, rows, f"{name}: the span of the dialogue")
    for what in _SPANS:
        owner, found = _nested(level.field(what), f"{name}: {what}", rows)
        low, high = dialogue.T if what == "markers" else (np.zeros_like(length), length)
        _inside(found, low[owner], high[owner], owner, f"{name}: a span of {what}")
        if what == "markers":
            even = np.bincount(owner, minlength=len(rows)) % 2 == 0
            _all(even, f"{name}: a block of markers is not closed")
            markers = (owner, found)
    _turns(level.field("turns"), name, dialogue, markers, rows)


def _turns(turns: pa.ListArray, name: str, dialogue: Ints, markers: tuple[Ints, Ints], rows: Ints) -> None:
    what = f"{name}: a turn"
    _items(turns, f"{name}: turns")
    owner, inside = pc.list_parent_indices(turns).to_numpy().astype(np.int64), turns.flatten()
    for field in ("turn_id", "start", "end"):
        _full(inside.field(field), f"{what}'s {field}", owner)
    whole = np.stack([inside.field(end).to_numpy().astype(np.int64) for end in ("start", "end")], axis=1)
    _inside(whole, dialogue[owner, 0], dialogue[owner, 1], owner, what)
    _apart(owner, whole, what)
    _apart(*markers, f"{name}: a marker")
    _apart(
        np.concatenate([owner, markers[0]]), np.concatenate([whole, markers[1]]), f"{name}: a turn or marker", sort=True
    )
    for field in ("speaker", "text"):
        part = _pairs(inside.field(field), f"{what}'s {field}", owner)
        _inside(part, whole[:, 0], whole[:, 1], owner, f"{what}'s {field}")
    of_turn, captions = _nested(inside.field("captions"), f"{what}'s captions", owner)
    _inside(captions, whole[of_turn, 0], whole[of_turn, 1], owner[of_turn], f"{what}'s caption")
    _apart(of_turn, captions, f"{what}'s caption", rows=owner[of_turn])


def _salience(salience: pa.Array, x0: pa.StructArray) -> None:
    held, turns = (pc.list_value_length(one).to_numpy(zero_copy_only=False) for one in (salience, x0.field("turns")))
    _all((held == 0) | (held == turns), "salience is not of as many values as there are turns")


def _all(fine: object, message: str | list[str]) -> None:
    """Raise for the first row that is not fine; the message, or that of the row."""
    flags = np.asarray(fine)
    if not flags.all():
        row = int(np.flatnonzero(~flags.astype(bool))[0])
        raise _Unsound(message if isinstance(message, str) else message[row], row)


def _full(column: pa.Array, what: str, owner: pa.Array | Ints | None = None) -> None:
    """Raise for a missing value. `owner`: the row each value belongs to, if not its own."""
    if column.null_count:
        place = int(np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))[0])
        raise _Unsound(f"{what} is missing", place if owner is None else int(np.asarray(owner)[place]))


def _items(lists: pa.Array, what: str) -> None:
    _full(lists, what)
    _full(lists.flatten(), f"an entry of {what}", pc.list_parent_indices(lists))


def _pairs(lists: pa.Array, what: str, owner: Ints) -> Ints:
    """Spans as [n, 2]."""
    _full(lists, what, owner)
    flat = lists.flatten()
    if len(flat) != 2 * len(lists) or flat.null_count or pc.any(pc.not_equal(pc.list_value_length(lists), 2)).as_py():
        wrong = pc.not_equal(pc.list_value_length(lists), 2).to_numpy(zero_copy_only=False)
        row = int(np.asarray(owner)[np.flatnonzero(wrong)[0]]) if wrong.any() else 0
        raise _Unsound(f"{what} is no pair of numbers", row)
    return np.asarray(flat.to_numpy(), dtype=np.int64).reshape(-1, 2)


def _nested(lists: pa.Array, what: str, rows: Ints) -> tuple[Ints, Ints]:
    """Spans of spans, and for each the outer list it is of."""
    _full(lists, what, rows)
    owner = pc.list_parent_indices(lists).to_numpy().astype(np.int64)
    return owner, _pairs(lists.flatten(), what, np.asarray(rows)[owner])


def _inside(spans: Ints, low: Ints, high: Ints, owner: Ints, what: str) -> None:
    start, end = spans[:, 0], spans[:, 1]
    fine = (low <= start) & (start <= end) & (end <= high)
    if not fine.all():
        bad = int(np.flatnonzero(~fine)[0])
        raise _Unsound(f"{what} [{start[bad]}, {end[bad]}) lies outside [{low[bad]}, {high[bad]})", int(owner[bad]))


def _apart(owner: Ints, spans: Ints, what: str, sort: bool = False, rows: Ints | None = None) -> None:
    """Raise where spans of one owner overlap, or (unless sorted here) are out of order."""
    if sort:
        order = np.lexsort((spans[:, 1], spans[:, 0], owner))
        owner, spans = owner[order], spans[order]
    wrong = (owner[1:] == owner[:-1]) & (spans[1:, 0] < spans[:-1, 1])
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0]) + 1
        raise _Unsound(
            f"{what} [{spans[bad, 0]}, {spans[bad, 1]}) overlaps another", int((owner if rows is None else rows)[bad])
        )
