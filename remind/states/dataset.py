"""States as a `datasets` dataset: a folder of Parquet files, one for each split of a dialogue, that anybody can open.

Text, so that one build serves any backbone. The dataset card names the splits, so that `datasets.load_dataset(folder)`
and a pushed copy open the same way; `manifest.json` says what the states were built from.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from remind.core.errors import DataError, FormatError, brief, shown
from remind.core.files import atomic_path, read_json, sha256_file, sha256_json, write_json, write_text
from remind.data.dialogue import SPLITS
from remind.data.split import check_overlap
from remind.states.pyramid import LEVELS
from remind.states.records import StateRecord, record_of_row, row_of

if TYPE_CHECKING:
    # imported where it is needed: it brings pandas, a second that `remind answer` can do without
    from datasets import Dataset, DatasetDict, Features

#: Of the columns and the manifest; another one is refused.
FORMAT_VERSION = 4
MANIFEST, CARD = "manifest.json", "README.md"
#: A states folder, or its dataset, filtered and mapped as one likes.
States: TypeAlias = "str | Path | DatasetDict | Dataset"

_CARD = """---
configs:
- config_name: default
  description: states {content}
  data_files:
{files}---
# States of questions about dialogues

Built by REMIND: `x0` (factual), `x1` (attentional) and `x2` (reflective) are prompts of one question, with the position
of every turn; `target` is the answer to be learned. `{manifest}` says what they were built from.
"""
_log = logging.getLogger(__name__)


@cache
def features() -> Features:
    """Columns of a states dataset; of the levels those that were built. Images are paths as text."""
    from datasets import Features, List, Value

    span = List(Value("int32"))
    turn = {
        "turn_id": Value("string"),
        **dict.fromkeys(("start", "end"), Value("int32")),
        **dict.fromkeys(("speaker", "text"), span),
        "captions": List(span),
    }
    level = {
        "text": Value("large_string"),
        "dialogue": span,
        "turns": List(turn),
        **dict.fromkeys(("reasoning", "anchors", "markers"), List(span)),
    }
    return Features(
        {
            **{name: Value("string") for name in ("question_id", "dialogue_id", "split", "format")},
            "question": Value("large_string"),
            **{name: List(Value("large_string")) for name in ("options", "answers")},
            **{name: Value("string") for name in ("dimension", "category")},
            "visual": Value("bool"),
            "evidence": List(Value("string")),
            "evidence_lines": List(Value("large_string")),
            "evidence_found": List(Value("string")),
            **{name: List(Value("int32")) for name in ("images", "images_found")},
            "target": Value("large_string"),
            **dict.fromkeys(LEVELS, level),
            "salience": List(Value("float32")),
            "pictures": List({"turn_id": Value("string"), "place": Value("int32"), "path": Value("string")}),
            "kind": Value("string"),
        }
    )


def write_part(folder: str | Path, records: Sequence[StateRecord], levels: Sequence[str] = ()) -> list[str]:
    """Write a dialogue's states, a Parquet file for each split; returns the names of the files.

    Args:
        levels: columns that are there even where they are empty, so that all files of a dataset have the same.
    """
    names = []
    stem = quote(records[0].dialogue_id, safe=" ") if records else ""
    if len(stem) > 150:  # file systems take 255 bytes
        stem = f"{stem[:100]}-{hashlib.sha256(records[0].dialogue_id.encode()).hexdigest()[:16]}"
    for split in SPLITS:
        rows = [dict.fromkeys(levels) | row_of(record) for record in records if record.split == split]
        if rows:
            schema = type(features())({name: kind for name, kind in features().items() if name in rows[0]}).arrow_schema
            names.append(f"{split}-{stem}.parquet")
            with atomic_path(Path(folder) / names[-1]) as path:
                pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return names


def finish(folder: str | Path, manifest: Mapping[str, Any]) -> None:
    """Write manifest and dataset card, which make a folder of parts a states folder."""
    folder = Path(folder)
    parts = sorted(folder.glob("*.parquet"))
    there = [split for split in SPLITS if any(part.name.startswith(f"{split}-") for part in parts)]
    # datasets knows a folder with a card by its name and card alone, and would take another's cached content for it
    content = sha256_json([[part.name, sha256_file(part)] for part in parts])[:16]
    write_json(folder / MANIFEST, {"format": "remind-states", "format_version": FORMAT_VERSION, **manifest})
    files = "".join(f"  - split: {split}\n    path: {split}-*.parquet\n" for split in there)
    write_text(folder / CARD, _CARD.format(content=content, files=files, manifest=MANIFEST))


def write_states(folder: str | Path, records: Iterable[StateRecord], manifest: Mapping[str, Any] | None = None) -> None:
    """A states folder of records that are in memory."""
    by_dialogue: dict[str, list[StateRecord]] = {}
    for record in records:
        by_dialogue.setdefault(record.dialogue_id, []).append(record)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for own in by_dialogue.values():
        write_part(folder, own)
    finish(folder, manifest or {})


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a states folder.

    Raises:
        DataError: no such folder, or one that was not built to its end. FormatError: it is not of states, or of another
            format version.
    """
    path = Path(folder) / MANIFEST
    manifest = read_json(path) if path.is_file() else {}
    if not isinstance(manifest, dict) or manifest.get("format", "remind-states") != "remind-states":
        raise FormatError("not the manifest of a states folder", path)
    if (version := manifest.get("format_version", FORMAT_VERSION)) != FORMAT_VERSION:
        what = f"states of format version {shown(version)}, not {FORMAT_VERSION}; make them anew: remind build-states"
        raise FormatError(what, path)
    if not manifest or not (path.parent / CARD).is_file():
        raise DataError("not a states folder, or not built to its end; make it with `remind build-states`", folder)
    return manifest


def load_states(folder: str | Path) -> DatasetDict:
    """The splits of a states folder, memory-mapped: train, dev and test, those that exist.

    Raises:
        DataError, FormatError: as `read_manifest`, or files that cannot be read.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    read_manifest(folder)
    silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        return load_dataset(str(Path(folder).resolve()))
    except (DatasetGenerationError, ValueError, OSError, pa.ArrowException) as error:
        raise DataError(f"cannot be read: {brief(error.__cause__ or error)}", folder) from None
    finally:
        if not silent:
            enable_progress_bars()


def iterate_states(states: States, split: str | None = None) -> Iterator[StateRecord]:
    """The records of a states folder or dataset, one in memory at a time; only those of `split` if given.

    Raises:
        DataError, FormatError: as `load_states`, a question twice, or a row that is no state.
    """
    folder, seen = _folder(states), set[str]()
    for row in _rows(states, split):
        record = record_of_row(row, folder)
        if record.question_id in seen:
            raise DataError("the question occurs twice", folder, record.question_id)
        seen.add(record.question_id)
        if split is None or record.split == split:
            yield record


def read_states(states: States, split: str | None = None) -> list[StateRecord]:
    """All records (of one split). Raises DataError if there are none, or if train and test share evidence."""
    there = check_split(states)
    chosen = list(iterate_states(states, split))
    if not chosen:
        raise DataError(
            f"no states of split {split!r} (there are: {', '.join(sorted(there)) or 'none'})", _folder(states)
        )
    return chosen


def _folder(states: States) -> str | Path | None:
    return states if isinstance(states, str | Path) else None


def _rows(states: States, split: str | None = None, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows that may be of a split, in the order of `load_states`.

    Those of a folder are read from its files: `datasets` would first copy all of them to its cache.
    """
    if not isinstance(states, str | Path):
        named = states if isinstance(states, Mapping) else {split: states}
        for name, part in named.items():
            if split in (None, name):
                yield from part if columns is None else part.select_columns(columns)
        return
    read_manifest(states)
    try:
        for name in SPLITS if split is None else [split]:
            for path in sorted(Path(states).glob(f"{name}-*.parquet")):
                for batch in pq.ParquetFile(path).iter_batches(64, columns=columns):
                    yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot be read: {brief(error)}", states) from None


def question_splits(states: States) -> dict[str, str]:
    """Question id to split."""
    return {row["question_id"]: row["split"] for row in _rows(states, columns=["question_id", "split"])}


def check_split(states: States) -> Counter[str]:
    """The number of questions of each split.

    Raises:
        DataError: one piece of gold evidence serves both a training and a test question; where a folder was built with
            `split.overlap` report, a warning is logged instead.
    """
    folder = _folder(states)
    settings = {} if folder is None else read_manifest(folder).get("config", {}).get("split", {})
    rows = list(_rows(states, columns=["question_id", "dialogue_id", "split", "evidence", "images"]))
    gold = ((r["question_id"], r["dialogue_id"], r["split"], (*r["evidence"], *r["images"])) for r in rows)
    if overlap := check_overlap(gold, lambda _: folder, settings.get("overlap") == "report"):
        _log.warning("%s: %s", folder, overlap)
    return Counter(row["split"] for row in rows)
