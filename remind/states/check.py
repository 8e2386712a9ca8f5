"""Whether a table of states says what states can: whole, in range and in order. On columns, so that it costs little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from remind.core.errors import shown
from remind.data.dialogue import DIMENSIONS, FORMATS, VISUAL_DIMENSIONS
from remind.data.readers.place import Place
from remind.states.pyramid import LETTERS

Ints = npt.NDArray[np.int64]

_SPLITS = ("train", "dev", "test")
_NEEDED = ("question_id", "dialogue_id", "split", "format", "question", "visual")
_LISTS = ("options", "answers", "evidence", "evidence_lines", "evidence_found", "images", "images_found", "salience")
_SPANS = ("reasoning", "anchors", "markers")


class _Level(NamedTuple):
    """Where the dialogue of each row stands in its text, [n, 2], and the markers with the row of each."""

    text: pa.Array
    dialogue: Ints
    markers: tuple[Ints, Ints]


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
        DataError: a value missing, an unknown format, split or dimension, options and answers that do not fit the
            format, evidence found that is no evidence, spans that are reversed, out of range, out of order or
            overlapping, a turn twice, a picture of no image in x0, or a dialogue that differs between the levels by
            more than markers. Names the question.
    """
    columns = {name: _whole(table[name]) for name in table.column_names}
    try:
        _plain(columns)
        found = {name: _level(columns[name], name, spans) for name in levels}
        if (base := found.get("x0")) is not None:
            _salience(columns["salience"], columns["x0"])
            if "pictures" in columns:
                _pictures(columns["pictures"], columns["x0"].field("turns"))
            for name, level in found.items():
                if level is not None and level is not base:
                    _same(base, level, name)
    except _Unsound as error:
        ids = columns["question_id"]
        question = ids[error.row].as_py() if error.row < len(ids) else None
        raise Place(path).at(question or f"row {error.row}").error(f"{error}; build the states again") from None


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
        _all(pc.is_in(column, pa.array(known)), _unknown(name, column))
    _all(pc.not_equal(pc.utf8_trim_whitespace(columns["question_id"]), ""), "the question id is blank")
    _kinds(columns["dimension"], columns["visual"])
    _choices(columns["format"], columns["options"], columns["answers"])
    lines, turns = (_lengths(columns[name]) for name in ("evidence_lines", "evidence"))
    _all((lines == 0) | (lines == turns), "evidence_lines is not of as many lines as evidence has turns")
    _least(columns["images"].flatten(), "an image index", pc.list_parent_indices(columns["images"]))
    for found, gold in (("evidence_found", "evidence"), ("images_found", "images")):
        pairs = zip(columns[found].to_pylist(), columns[gold].to_pylist(), strict=True)
        _all([set(some) <= set(every) for some, every in pairs], f"{found} names what is not gold")
    if "pictures" in columns:
        pictures = columns["pictures"]
        parents, inside = pc.list_parent_indices(pictures), pictures.flatten()
        for field in ("turn_id", "place", "path"):
            _full(inside.field(field), f"a picture's {field}", parents)
        _least(inside.field("place"), "a picture's place", parents)


def _unknown(name: str, column: pa.Array) -> Callable[[int], str]:
    return lambda row: f"unknown {name} {shown(column[row].as_py())}"


def _kinds(dimension: pa.Array, visual: pa.Array) -> None:
    known = pc.or_(pc.is_null(dimension), pc.is_in(dimension, pa.array(DIMENSIONS)))
    _all(known, _unknown("dimension", dimension))
    # evidence of the visual dimensions is images, of all others lines
    _all(pc.equal(visual, pc.is_in(dimension, pa.array(VISUAL_DIMENSIONS))), "visual does not go with the dimension")


def _choices(formats: pa.Array, options: pa.Array, answers: pa.Array) -> None:
    """What a question promises of its options and answers, as `check_question` has it."""
    direct, single = (_flags(pc.equal(formats, name)) for name in ("direct", "single"))
    count, given = _lengths(options), _lengths(answers)
    _all(~direct | (count == 0), "a direct question has no options")
    _all(
        direct | ((count >= 1) & (count <= len(LETTERS))),
        lambda row: f"a {formats[row]} question needs 1 to {len(LETTERS)} options, this one has {count[row]}",
    )
    owner, said = _owner(answers), answers.flatten()
    letter = pc.fill_null(pc.index_in(said, pa.array(list(LETTERS))), len(LETTERS)).to_numpy().astype(np.int64)
    _all(
        direct[owner] | (letter < count[owner]),
        lambda place: (
            f"gold answer {shown(said[place].as_py())} names none of its options"
            f" (A to {LETTERS[count[owner[place]] - 1]})"
        ),
        owner,
    )
    _once(owner, np.where(direct[owner], np.arange(len(said)) + len(LETTERS), letter), "an answer stands twice")
    _all(~single | (given <= 1), lambda row: f"a single question has one answer, not {given[row]}")


def _level(level: pa.StructArray, name: str, spans: bool) -> _Level | None:
    _full(level, name)
    text = level.field("text")
    _full(text, f"the text of {name}")
    if not spans:
        return None
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
    return _Level(text, dialogue, markers)


def _turns(turns: pa.ListArray, name: str, dialogue: Ints, markers: tuple[Ints, Ints], rows: Ints) -> None:
    what = f"{name}: a turn"
    _items(turns, f"{name}: turns")
    owner, inside = pc.list_parent_indices(turns).to_numpy().astype(np.int64), turns.flatten()
    for field in ("turn_id", "start", "end"):
        _full(inside.field(field), f"{what}'s {field}", owner)
    _once(owner, _codes(inside.field("turn_id")), f"{name}: a turn stands twice")
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


def _pictures(pictures: pa.ListArray, turns: pa.ListArray) -> None:
    """A picture stands for a caption of a turn in x0."""
    if not len(pictures.flatten()):
        return
    inside = turns.flatten()
    captions = dict(
        zip(
            zip(_owner(turns).tolist(), inside.field("turn_id").to_pylist(), strict=True),
            _lengths(inside.field("captions")).tolist(),
            strict=True,
        )
    )
    owner, held = _owner(pictures), pictures.flatten()
    places = zip(owner.tolist(), held.field("turn_id").to_pylist(), held.field("place").to_pylist(), strict=True)
    _all([place < captions.get((row, turn), 0) for row, turn, place in places], "a picture is of no image in x0", owner)


def _same(base: _Level, level: _Level, name: str) -> None:
    """A level shows x0's dialogue, with markers."""
    pairs = zip(_unmarked(base), _unmarked(level), strict=True)
    _all([one == other for one, other in pairs], f"{name}: its dialogue without markers is not that of x0")


def _unmarked(level: _Level) -> list[str]:
    owner, spans = level.markers
    ends = np.searchsorted(owner, np.arange(len(level.text) + 1)).tolist()
    marks = spans.tolist()
    found = []
    for row, (text, (start, end)) in enumerate(zip(level.text.to_pylist(), level.dialogue.tolist(), strict=True)):
        parts = []
        for opens, closes in marks[ends[row] : ends[row + 1]]:
            parts.append(text[start:opens])
            start = closes
        found.append("".join([*parts, text[start:end]]))
    return found


def _flags(column: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=bool)


def _lengths(lists: pa.Array) -> Ints:
    return np.asarray(pc.list_value_length(lists).to_numpy(zero_copy_only=False), dtype=np.int64)


def _owner(lists: pa.Array) -> Ints:
    """The row that each value of lists belongs to."""
    return np.asarray(pc.list_parent_indices(lists).to_numpy(), dtype=np.int64)


def _codes(column: pa.Array) -> Ints:
    """Equal numbers for equal values."""
    return np.asarray(column.dictionary_encode().indices.to_numpy(), dtype=np.int64)


def _once(owner: Ints, codes: Ints, message: str) -> None:
    """Raise where a row holds a code twice."""
    keys = owner * (int(codes.max(initial=0)) + 1) + codes
    order = np.argsort(keys, kind="stable")
    again = keys[order][1:] == keys[order][:-1]
    if again.any():
        raise _Unsound(message, int(owner[order[1:][again]].min()))


def _least(values: pa.Array, what: str, owner: pa.Array) -> None:
    """Raise for a negative number."""
    _all(pc.greater_equal(values, 0), lambda place: f"{what} is {values[place].as_py()}", owner)


def _all(fine: object, message: str | Callable[[int], str], owner: pa.Array | Ints | None = None) -> None:
    """Raise for the first value that is not fine. `owner`: the row each value belongs to, if not its own."""
    flags = np.asarray(fine)
    if not flags.all():
        place = int(np.flatnonzero(~flags.astype(bool))[0])
        row = place if owner is None else int(np.asarray(owner)[place])
        raise _Unsound(message if isinstance(message, str) else message(place), row)


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
