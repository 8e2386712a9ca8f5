"""States on disk: one Parquet part per dialogue and a manifest. Text, so that one build serves any backbone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from remind.core.errors import DataError, FormatError, named, shown
from remind.core.files import atomic_path, read_json, sha256_file, write_json
from remind.data.readers.place import Place
from remind.data.split import check_overlap
from remind.states.check import check_table
from remind.states.pyramid import LEVELS, Rendered, TurnSpan

FORMAT_VERSION = 2
#: Version 1 knew nothing of image files.
_READABLE = (1, 2)
MANIFEST = "manifest.json"

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
    ]
)


class Picture(NamedTuple):
    """The file of an image in x0: the turn, which of the turn's captions stands for it (from 0), and the path."""

    turn_id: str
    place: int
    path: str


@dataclass(frozen=True)
class StateRecord:
    """The three states of one question, rendered.

    Attributes:
        target: y* without the end token; None where no gold answer is known.
        evidence, evidence_lines: gold evidence turn ids and the same turns as lines `Speaker: text`.
        evidence_found: those of `evidence` that x0 holds. `images`, `images_found`: the same for gold image indices.
        category: the benchmark's own category as text ("1".."5" for LoCoMo), or None.
        salience: s_turn of every turn in x0 (Eq. 5), empty where grounding gave none.
        pictures: images of x0 whose file is known, in the order of the text; absolute paths, as the reader found them.
    """

    question_id: str
    dialogue_id: str
    split: str
    format: str
    question: str
    options: tuple[str, ...]
    answers: tuple[str, ...]
    dimension: str | None
    category: str | None
    visual: bool
    evidence: tuple[str, ...]
    evidence_lines: tuple[str, ...]
    evidence_found: tuple[str, ...]
    images: tuple[int, ...]
    images_found: tuple[int, ...]
    target: str | None
    x0: Rendered
    x1: Rendered
    x2: Rendered
    salience: tuple[float, ...] = ()
    pictures: tuple[Picture, ...] = ()

    def level(self, name: str) -> Rendered:
        """x0, x1 or x2 by name."""
        if name not in LEVELS:
            raise DataError(f"no level {name!r}; there are {', '.join(LEVELS)}", record=self.question_id)
        rendered: Rendered = getattr(self, name)
        return rendered


def evidence_share(record: StateRecord) -> float | None:
    """Share of the gold evidence that x0 holds (turns, or images for visual questions); None if there is no gold."""
    gold, found = (record.images, record.images_found) if record.visual else (record.evidence, record.evidence_found)
    return len(set(found)) / len(set(gold)) if gold else None


def _rendered(value: dict[str, Any]) -> Rendered:
    def span(pair: Sequence[int]) -> tuple[int, int]:
        return (int(pair[0]), int(pair[1]))

    def spans(pairs: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
        return tuple(span(pair) for pair in pairs)

    turns = tuple(
        TurnSpan(t["turn_id"], t["start"], t["end"], span(t["speaker"]), span(t["text"]), spans(t["captions"]))
        for t in value["turns"]
    )
    return Rendered(
        value["text"],
        span(value["dialogue"]),
        turns,
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
    """Write states as a Parquet file."""
    rows = [{**asdict(record), "pictures": [one._asdict() for one in record.pictures]} for record in records]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    with atomic_path(path) as temporary:
        # sums tell a flipped bit, which compression alone may not
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def write_manifest(folder: str | Path, manifest: dict[str, Any]) -> None:
    """Write `manifest.json`; done last, so that a folder without one is an unfinished build."""
    write_json(Path(folder) / MANIFEST, {"format": "remind-states", "format_version": FORMAT_VERSION, **manifest})


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest.

    Raises:
        FormatError: a folder that is not (finished) states or is of another format version.
        DataError: a manifest that cannot be read, or an entry that others build on is of another kind.
    """
    path = Path(folder) / MANIFEST
    try:
        there = path.is_file()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", folder) from None
    if not there:
        raise FormatError("no manifest.json: not a states folder, or its build did not finish", folder)
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
    place.mapping(config.get("grounding", {}), "config.grounding")
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
                what = "the question stands twice in the folder; build the states again"
                raise DataError(what, path, named(record.question_id))
            seen.add(record.question_id)
            if split is None or record.split == split:
                yield record


def state_parts(folder: str | Path) -> list[Path]:
    """The files of a states folder in order.

    Raises:
        DataError, FormatError: as `read_manifest`, or a file is missing, foreign or not as it was built. Manifests that
            list no parts are taken at their word.
    """
    manifest = read_manifest(folder)
    known = manifest_hashes(Place(Path(folder) / MANIFEST), manifest, "parts")
    parts = sorted(Path(folder).glob("part-*.parquet"), key=lambda path: (len(path.name), path.name))
    if "parts" not in manifest:
        return parts
    if other := known.keys() ^ {path.name for path in parts}:
        what = "is missing" if min(other) in known else "is not of this build"
        raise FormatError(f"{shown(min(other))} {what}; build the states again", folder)
    for path in parts:
        if _digest(path) != known[path.name]:
            raise DataError("is not as it was built (its SHA-256 is another); build the states again", path)
    return parts


def _digest(path: Path) -> str:
    # a pipe would be waited for
    if not path.is_file():
        raise DataError("no such file, or not a regular one", path)
    try:
        return sha256_file(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path) from None


def read_part(path: Path, levels: Sequence[str] = LEVELS, spans: bool = True) -> list[StateRecord]:
    """The records of one file.

    Args:
        levels: which of x0, x1 and x2 to read; the others come back empty. They are most of a file, and of the time.
        spans: whether to read where turns, strategy and markers stand in them, too.

    Raises:
        DataError: it cannot be read, or holds what no state can: see `check_table`. FormatError: it is not of states.
    """
    table = _table(path, levels, spans)
    check_table(table, levels, spans, path)
    records = []
    for row in table.to_pylist():
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        for name in LEVELS:
            empty = Rendered(row[name]["text"] if name in levels else "", (0, 0), (), (), ())
            values[name] = _rendered(row[name]) if spans and name in levels else empty
        values["pictures"] = tuple(Picture(**one) for one in row.get("pictures") or ())
        records.append(StateRecord(**values))
    return records


def _table(path: Path, levels: Sequence[str], spans: bool) -> pa.Table:
    """The columns asked for, each value of the type it should be."""
    if not path.is_file():
        raise DataError("no such file, or not a regular one", path)
    plain = [name for name in SCHEMA.names if name not in LEVELS]
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            if schema.names not in (SCHEMA.names, SCHEMA.names[:-1]):
                raise FormatError("its columns are not those of states", path)
            if wrong := next(
                (name for name in schema.names if schema.field(name).type != SCHEMA.field(name).type), None
            ):
                raise FormatError(f"its column {wrong} is not of the type that states have", path)
            wanted = [*(n for n in plain if n in schema.names), *(name if spans else f"{name}.text" for name in levels)]
            table = file.read(columns=wanted)
        # a damaged file may hold text that is no UTF-8, or lists that end before they begin
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"cannot be read as Parquet: {error}", path) from None
    return table


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
    """Raise DataError where one piece of gold evidence serves both a training and a test question."""
    check_overlap(
        ((r.question_id, r.dialogue_id, r.split, (*r.evidence, *r.images)) for r in records),
        lambda _: folder,
    )
