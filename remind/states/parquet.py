"""States on disk: one Parquet part per dialogue and a manifest. Text, so that one build serves any backbone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from remind.core.errors import DataError, FormatError, named, shown
from remind.core.files import atomic_path, read_json, sha256_file, write_json
from remind.data.readers.builder import Place
from remind.data.split import check_overlap
from remind.states.pyramid import LEVELS, Rendered, TurnSpan
from remind.states.records import Picture, StateRecord, problems
from sae.regular import check_regular

FORMAT_VERSION = 3
#: Version 1 lacks the last two columns, image files and inferred kinds, version 2 the last.
_READABLE = (1, 2, 3)
MANIFEST = "manifest.json"
#: What a part may hold: questions, characters of a text of a level, and bytes of all its values, uncompressed.
MAX_QUESTIONS, MAX_TEXT, MAX_BYTES = 10_000, 2**24, 2**29
#: Columns that may be null.
_NULLABLE = ("dimension", "category", "target", "pictures", "kind")
_log = logging.getLogger(__name__)

_SPAN = pa.list_(pa.int32())
_TURN = pa.struct(
    [
        ("turn_id", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("speaker", _SPAN),
        ("text", _SPAN),
        ("captions", pa.list_(_SPAN)),
    ]
)
_FIELDS = [field.name for field in fields(TurnSpan)]
_LEVEL = pa.struct(
    [
        ("text", pa.string()),
        ("dialogue", _SPAN),
        ("turns", pa.list_(_TURN)),
        ("reasoning", pa.list_(_SPAN)),
        ("anchors", pa.list_(_SPAN)),
        ("markers", pa.list_(_SPAN)),
    ]
)
SCHEMA = pa.schema(
    [
        ("question_id", pa.string()),
        ("dialogue_id", pa.string()),
        ("split", pa.string()),
        ("format", pa.string()),
        ("question", pa.string()),
        ("options", pa.list_(pa.string())),
        ("answers", pa.list_(pa.string())),
        ("dimension", pa.string()),
        ("category", pa.string()),
        ("visual", pa.bool_()),
        ("evidence", pa.list_(pa.string())),
        ("evidence_lines", pa.list_(pa.string())),
        ("evidence_found", pa.list_(pa.string())),
        ("images", pa.list_(pa.int32())),
        ("images_found", pa.list_(pa.int32())),
        ("target", pa.string()),
        ("x0", _LEVEL),
        ("x1", _LEVEL),
        ("x2", _LEVEL),
        ("salience", pa.list_(pa.float32())),
        ("pictures", pa.list_(pa.struct([("turn_id", pa.string()), ("place", pa.int32()), ("path", pa.string())]))),
        ("kind", pa.string()),
    ]
)


def _rendered(value: dict[str, Any]) -> Rendered:
    """Raises TypeError or ValueError where a number or a text is missing."""

    def text(item: object) -> str:
        if not isinstance(item, str):
            raise TypeError
        return item

    def span(pair: Sequence[int]) -> tuple[int, int]:
        start, end = pair
        return (int(start), int(end))

    def spans(pairs: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
        return tuple(span(pair) for pair in pairs)

    return Rendered(
        text(value["text"]),
        span(value["dialogue"]),
        tuple(
            TurnSpan(
                text(turn["turn_id"]),
                *span((turn["start"], turn["end"])),
                span(turn["speaker"]),
                span(turn["text"]),
                spans(turn["captions"]),
            )
            for turn in value["turns"]
        ),
        spans(value["reasoning"]),
        spans(value["anchors"]),
        spans(value["markers"]),
    )


def part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def write_part(folder: str | Path, number: int, records: Sequence[StateRecord]) -> Path:
    """Write the states of one dialogue as `part-<number>.parquet`."""
    path = Path(folder) / part_name(number)
    write_records(path, records)
    return path


def write_records(path: str | Path, records: Sequence[StateRecord]) -> None:
    """Write states as a Parquet file. Raises DataError where they are too many or too large to be read again."""
    table = pa.Table.from_pylist([_row(record) for record in records], schema=SCHEMA)
    with atomic_path(path) as temporary:
        # sums tell a flipped bit, which compression alone may not
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
        for record in records:
            for name in LEVELS:
                _check_text(record.level(name), name, Place(Path(path)).at(record.question_id))
        _check_size(path, len(records), max(table.nbytes, _size(pq.read_metadata(temporary))))


def _row(record: StateRecord) -> dict[str, Any]:
    """As `dataclasses.asdict`, which copies every span of every turn, in a fifth of the time."""
    row = {**vars(record), "pictures": [one._asdict() for one in record.pictures]}
    for name in LEVELS:
        level = record.level(name)
        turns = [{field: getattr(turn, field) for field in _FIELDS} for turn in level.turns]
        row[name] = {**vars(level), "turns": turns}
    return row


def write_manifest(folder: str | Path, manifest: dict[str, Any]) -> None:
    """Write `manifest.json`; done last, so that a folder without one is an unfinished build.

    The SHA-256 of every part goes into it, by which a part that is missing, changed or foreign is known later.
    """
    hashes = {path.name: sha256_file(path) for path in _parts(folder)}
    about = {"format": "remind-states", "format_version": FORMAT_VERSION}
    write_json(Path(folder) / MANIFEST, {**about, "parts": hashes, **manifest})


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest.

    Raises:
        FormatError: a folder that is not (finished) states or is of another format version.
        DataError: a manifest that cannot be read, or an entry that others build on is of another kind.
    """
    path = Path(folder) / MANIFEST
    if not os.path.exists(path):  # False for names that the system cannot take, too
        below = sorted(Path(folder).glob(f"*/{MANIFEST}")) if os.path.isdir(folder) else []
        hint = f"; there is one in {below[0].parent.name}/" if below else ""
        raise FormatError(f"no manifest.json: not a states folder, or its build did not finish{hint}", folder)
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != "remind-states":
        raise FormatError("not the manifest of a states folder", path)
    version = manifest.get("format_version")
    if type(version) is not int or version not in _READABLE:
        raise FormatError(f"states of format version {shown(version)}, not {FORMAT_VERSION}; build them again", path)
    _check_kinds(Place(path), manifest)
    return manifest


def _check_kinds(place: Place, manifest: dict[str, Any]) -> None:
    """What others take from a manifest; what is not there is not asked for. Raises DataError."""
    for name in ("inputs", "parts"):
        manifest_hashes(place, manifest, name)
    config = place.mapping(manifest.get("config", {}), "config")
    for name in ("grounding", "split"):
        place.mapping(config.get(name, {}), f"config.{name}")
    for name in ("format", "backbone", "sae", "cache"):
        place.optional_text(config.get(name), f"config.{name}")
    for name in ("input", "sae_data"):
        paths = config.get(name)
        for path in paths if isinstance(paths, list) else [paths]:
            place.optional_text(path, f"config.{name}")


def manifest_hashes(place: Place, manifest: Mapping[str, Any], name: str) -> dict[str, str]:
    """The SHA-256 by file name that an entry of a manifest gives. Raises DataError if it does not."""
    found = place.mapping(manifest.get(name, {}), name)
    return {key: place.text(value, f"{name}: {shown(key)}") for key, value in found.items()}


def iterate_states(folder: str | Path, split: str | None = None) -> Iterator[StateRecord]:
    """The records of all parts in order, one part in memory at a time; only those of `split` if given."""
    seen: set[str] = set()
    for path in state_parts(folder):
        for record in read_part(path):
            if record.question_id in seen:
                what = "the question occurs twice in the folder; build the states again"
                raise DataError(what, path, named(record.question_id))
            seen.add(record.question_id)
            if split is None or record.split == split:
                yield record


def state_parts(folder: str | Path) -> list[Path]:
    """The files of a states folder in order.

    Raises:
        DataError, FormatError: as `read_manifest`, or a file is missing, foreign or not as it was built. Manifests that
            list no parts, as earlier versions wrote them, are not checked.
    """
    manifest = read_manifest(folder)
    known = manifest_hashes(Place(Path(folder) / MANIFEST), manifest, "parts")
    parts = _parts(folder)
    if "parts" not in manifest:
        return parts
    if other := known.keys() ^ {path.name for path in parts}:
        what = "is missing" if min(other) in known else "does not belong to this build"
        raise FormatError(f"{shown(min(other))} {what}; build the states again", folder)
    for path in parts:
        check_regular(path, DataError)
        if sha256_file(path) != known[path.name]:
            raise DataError("has changed since it was built (its SHA-256 differs); build the states again", path)
    return parts


def _parts(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).glob("part-*.parquet"), key=lambda path: (len(path.name), path.name))


def question_splits(folder: str | Path) -> dict[str, str]:
    """Question id to split. Raises as `state_parts` and `read_part`."""
    return {record.question_id: record.split for path in state_parts(folder) for record in read_part(path, levels=())}


def read_part(path: Path, levels: Sequence[str] = LEVELS, spans: bool = True) -> list[StateRecord]:
    """The records of one file.

    Args:
        levels: which of x0, x1 and x2 to read; the others come back empty. They are most of a file, and of the time.
        spans: whether to read the positions of turns, strategy and markers too.

    Raises:
        DataError: it cannot be read, is larger than any part, or holds what no state can: see `problems`. FormatError:
            it is not of states.
    """
    records = []
    rows = (row for batch in _batches(path, levels, spans) for row in batch.to_pylist())
    for number, row in enumerate(rows):
        place = Place(path).at(row["question_id"] or f"row {number}")
        record = _record(row, levels, spans, place)
        if (problem := next(problems(record, levels if spans else ()), None)) is not None:
            raise place.error(f"{problem}; build the states again")
        records.append(record)
    return records


def _record(row: dict[str, Any], levels: Sequence[str], spans: bool, place: Place) -> StateRecord:
    """The record of a row. Raises DataError for missing values."""
    if missing := [name for name, value in row.items() if value is None and name not in _NULLABLE]:
        raise place.error(f"{missing[0]} is missing; build the states again")
    values: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, list) and None in value:
            raise place.error(f"an entry of {name} is missing; build the states again")
        values[name] = tuple(value) if isinstance(value, list) else value
    for name in LEVELS:
        values[name] = Rendered("", (0, 0), (), (), ())
        if name in levels:
            try:
                values[name] = _rendered(row[name]) if spans else replace(values[name], text=row[name]["text"])
            except (TypeError, ValueError):
                raise place.error(
                    f"{name}: a text or a span is missing or incomplete; build the states again"
                ) from None
            _check_text(values[name], name, place)
    values["pictures"] = tuple(Picture(**picture) for picture in row.get("pictures") or ())
    if any(None in picture for picture in values["pictures"]):
        raise place.error("a picture is incomplete; build the states again")
    return StateRecord(**values)


def record_of_row(row: Mapping[str, Any]) -> StateRecord:
    """The record of a row with all columns. Raises DataError for missing values."""
    return _record(dict(row), LEVELS, True, Place(Path(row["dialogue_id"])).at(row["question_id"]))


def _batches(path: Path, levels: Sequence[str], spans: bool) -> Iterator[pa.Table | pa.RecordBatch]:
    """The columns asked for, each value of the type it should be; some rows at a time where they may be large."""
    check_regular(path, DataError)
    plain = [name for name in SCHEMA.names if name not in LEVELS]
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            if schema.names not in [SCHEMA.names[: len(SCHEMA.names) - lacking] for lacking in range(len(_READABLE))]:
                raise FormatError("its columns are not those of states", path)
            if wrong := [name for name in schema.names if schema.field(name).type != SCHEMA.field(name).type]:
                raise FormatError(f"its column {wrong[0]} has the wrong type", path)
            size, decoded = _size(file.metadata), 0
            _check_size(path, file.metadata.num_rows, size)
            wanted = [*(n for n in plain if n in schema.names), *(name if spans else f"{name}.text" for name in levels)]
            # a value stored once may be that of every row; reading whole files is faster
            rows = MAX_BYTES // max(1, size)
            whole = file.metadata.num_rows <= rows
            batches = [file.read(wanted)] if whole else file.iter_batches(max(1, rows), columns=wanted)
            for batch in batches:
                decoded += batch.nbytes
                _check_size(path, file.metadata.num_rows, decoded)
                # a damaged file may hold text that is no UTF-8, or lists that end before they begin
                batch.validate(full=True)
                yield batch
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"cannot be read as Parquet: {error}", path) from None


def _size(metadata: pq.FileMetaData) -> int:
    """Bytes of all values of a file as it stores them, uncompressed."""
    return sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))


def _check_size(path: str | Path, questions: int, size: int) -> None:
    if questions > MAX_QUESTIONS:
        raise DataError(f"has {questions:,} questions; a part has at most {MAX_QUESTIONS:,}", path)
    if size > MAX_BYTES:
        raise DataError(f"unpacks to {size:,} bytes or more; a part has at most {MAX_BYTES:,}", path)


def _check_text(level: Rendered, name: str, place: Place) -> None:
    if (length := len(level.text or "")) > MAX_TEXT:  # it may be missing, which others report
        raise place.error(f"{name} has {length:,} characters; a state has at most {MAX_TEXT:,}")


def read_states(folder: str | Path, split: str | None = None) -> list[StateRecord]:
    """All records (of one split). Raises DataError if there are none, or if train and test share evidence."""
    records = list(iterate_states(folder))
    check_split(records, folder)
    chosen = [record for record in records if split is None or record.split == split]
    if not chosen:
        there = ", ".join(sorted({record.split for record in records})) or "none"
        raise DataError(f"no states of split {split!r} (there are: {there})", folder)
    return chosen


def check_split(records: Iterable[StateRecord], folder: str | Path | None = None) -> None:
    """Raise DataError where one piece of gold evidence serves both a training and a test question.

    Args:
        folder: of the states; where they were built with `split.overlap` report, a warning is logged instead.
    """
    check_shared_evidence(((r.question_id, r.dialogue_id, r.split, (*r.evidence, *r.images)) for r in records), folder)


def check_shared_evidence(rows: Iterable[tuple[str, str, str, Sequence[str | int]]], folder: str | Path | None) -> None:
    """As `check_split`, for question id, dialogue id, split and gold evidence of each question."""
    settings = {} if folder is None else read_manifest(folder).get("config", {}).get("split", {})
    if overlap := check_overlap(rows, lambda _: folder, settings.get("overlap") == "report"):
        _log.warning("%s: %s", folder, overlap)
