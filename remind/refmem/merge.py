"""Merge annotation files: agreement, conflicts and their resolutions, removal rates, and the adjudicated items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from remind.core.errors import ConfigError, DataError
from remind.core.files import write_json, write_rows, write_text
from remind.data.dialogue import DIMENSIONS, FORMATS
from remind.data.readers.builder import Place, records
from remind.refmem.agreement import agreement
from remind.refmem.annotations import Row, check_answers, read_annotations
from remind.refmem.items import Item, image_indices, read_items, write_items
from remind.refmem.votes import Outcome, decide
from sae.ranges import PositiveInt, check_ranges

FINAL, CONFLICTS, DECISIONS = "final.jsonl", "conflicts.jsonl", "decisions.jsonl"


@dataclass
class MergeConfig:
    """Merge annotations: agreement before discussion, conflicts, removal rates, the adjudicated items."""

    drafts: str
    """The items.jsonl the pages were made from."""
    annotations: str | list[str]
    """Each annotator's JSON Lines file; a folder stands for all its .jsonl files."""
    out: str
    """Folder for agreement.json, report.md, conflicts.jsonl, decisions.jsonl and final.jsonl."""
    resolutions: str | None = None
    """JSON Lines that decide conflicts: item_id and what was agreed on of answers, evidence, images and remove."""
    require_complete: bool = False
    """Refuse to write final.jsonl while any item is undecided. false: undecided items are listed and left out of it."""
    discuss: Literal["undecided", "all"] = "undecided"
    """What needs a resolution: items without a majority, or every item on which annotators differ."""
    quorum: PositiveInt = 1
    """An item with fewer rows than this is undecided too."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.resolutions and Path(self.resolutions).resolve() == (Path(self.out) / CONFLICTS).resolve():
            raise ConfigError(f"resolutions: {self.resolutions} is overwritten by the merge; give an edited copy")


@dataclass(frozen=True)
class Decision:
    """An item with its votes and what came of them.

    Attributes:
        majority: the outcome of the rows alone. outcome: with the resolution in it.
        open: parts that are still undecided.
        resolved: whether there was a resolution.
    """

    item: Item
    rows: tuple[Row, ...]
    majority: Outcome
    outcome: Outcome
    open: tuple[str, ...]
    resolved: bool

    @property
    def state(self) -> str:
        """open, removed or kept."""
        return "open" if self.open else "removed" if self.outcome.remove else "kept"

    @property
    def final(self) -> Item:
        """The item as decided."""
        out = self.outcome
        return replace(self.item, answers=out.answers or (), evidence=out.evidence, images=out.images)

    def record(self) -> dict[str, Any]:
        """A line of conflicts.jsonl and decisions.jsonl. With decisions filled in it serves as a resolution."""
        keys = ("answers", "evidence", "images", "remove")
        votes = ("annotator", *keys, "confidence", "note")
        return {
            "item_id": self.item.id,
            "fingerprint": self.item.fingerprint,
            "state": self.state,
            "open": self.open,
            "differ": self.majority.differ,
            "resolved": self.resolved,
            "changed": self.state == "kept" and set(self.final.answers) != set(self.item.answers),
            **{key: getattr(self.item, key) for key in ("dialogue_id", "dimension", "format", "question")},
            "options": self.item.options,
            "candidates": self.item.candidates,
            "votes": [{key: getattr(row, key) for key in votes} for row in self.rows],
            "majority": {key: getattr(self.majority, key) for key in keys},
            "decided": None if self.open else {key: getattr(self.outcome, key) for key in keys},
        }


def read_ballots(paths: str | Sequence[str], items: Sequence[Item]) -> tuple[dict[str, dict[str, Row]], list[str]]:
    """Item id → annotator → row, and the annotators in the order of their files.

    Raises:
        DataError: a file that cannot be used (see `read_annotations`), an annotator with two files, no rows at all.
    """
    files: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, str) else paths):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    ballots: dict[str, dict[str, Row]] = {item.id: {} for item in items}
    file_of: dict[str, Path] = {}
    for file in files:
        for row in read_annotations(file, items):
            if file_of.setdefault(row.annotator, file) != file:
                raise DataError(f"{row.annotator} has another file, {file_of[row.annotator]}; give one of them", file)
            ballots[row.item_id][row.annotator] = row
    if not file_of:
        raise DataError("no annotation in the files given", files[0] if files else None)
    return ballots, list(file_of)


def read_resolutions(path: str | Path, items: Sequence[Item]) -> dict[str, dict[str, Any]]:
    """By item id what was agreed on of answers, evidence, images and remove.

    Raises:
        DataError: a record that is not a resolution of one of these items.
    """
    by_id = {item.id: item for item in items}
    resolutions: dict[str, dict[str, Any]] = {}
    for place, value in records(path):
        record = place.mapping(value, "a resolution")
        name = place.name(record.get("item_id"), "item_id")
        place = place.at(name)
        if name not in by_id or record.get("fingerprint") not in (None, by_id[name].fingerprint):
            raise place.error("no such item, or it has changed: a resolution of another build")
        if name in resolutions:
            raise place.error("the item is resolved twice; keep one")
        resolutions[name] = _resolution(place, record, by_id[name])
    return resolutions


def _resolution(place: Place, record: Mapping[str, Any], item: Item) -> dict[str, Any]:
    keys = ("answers", "evidence", "images", "remove")
    given: dict[str, Any] = {key: record[key] for key in keys if record.get(key) is not None}
    for key in ("answers", "evidence"):
        if key in given:
            given[key] = tuple(dict.fromkeys(place.name(text, key) for text in place.sequence(given[key], key)))
    check_answers(place, item, given.get("answers", ()))
    if "images" in given:
        given["images"] = image_indices(place, given["images"])
    if not isinstance(given.get("remove", False), bool):
        raise place.error("remove should be true or false")
    return given


def resolve(majority: Outcome, resolution: Mapping[str, Any] | None, discuss: str) -> tuple[Outcome, tuple[str, ...]]:
    """The outcome after resolution, and the parts still open.

    A resolution decides the parts it gives; answers or evidence without `remove` keep an item that was undecided. Parts
    with a majority stand unless it gives others; under `discuss` "all" it confirms them.
    """
    if resolution is None:
        differ = majority.differ if discuss == "all" else []
        return majority, tuple(dict.fromkeys([*majority.open, *differ]))
    outcome = replace(majority, **resolution)
    if outcome.remove:
        return outcome, ()
    parts = {
        "remove": outcome.remove is None and not resolution,
        "answers": not outcome.answers,
        "evidence": not outcome.evidence and not outcome.images,
    }
    return replace(outcome, remove=False), tuple(part for part, is_open in parts.items() if is_open)


def merge(cfg: MergeConfig) -> dict[str, Any]:
    """Merge the annotations and write the files that `MergeConfig.out` names.

    Returns:
        The content of agreement.json, with `path` of the final file.

    Raises:
        DataError: inputs that cannot be used; undecided items under `require_complete` (there is no final file then).
        ModelError: statsmodels is missing.
    """
    items = read_items(cfg.drafts)
    ballots, annotators = read_ballots(cfg.annotations, items)
    resolutions = read_resolutions(cfg.resolutions, items) if cfg.resolutions else {}
    decisions = []
    for item in items:
        rows, resolution = tuple(ballots[item.id].values()), resolutions.get(item.id)
        majority = decide(item, rows, cfg.quorum)
        outcome, still_open = resolve(majority, resolution, cfg.discuss)
        decisions.append(Decision(item, rows, majority, outcome, still_open, resolution is not None))
    conflicts = [one for one in decisions if one.majority.open or one.majority.differ]
    undecided = {one.item.id: list(one.open) for one in decisions if one.open}
    states = Counter(one.state for one in decisions)
    result = {
        "format": "remind-annotation",
        "items": len(items),
        **{state: states[state] for state in ("kept", "removed", "open")},
        "conflicts": len(conflicts),
        "resolved": sum(one.resolved and not one.open for one in conflicts),
        "undecided": undecided,
        "rows": {name: sum(name in rows for rows in ballots.values()) for name in annotators},
        "removal": removal(decisions),
        "agreement": agreement(items, ballots, annotators),
    }
    out = Path(cfg.out)
    write_json(out / "agreement.json", result)
    write_text(out / "report.md", report(result))
    write_rows(out / CONFLICTS, (one.record() for one in conflicts))
    write_rows(out / DECISIONS, (one.record() for one in decisions))
    if undecided and cfg.require_complete:
        (out / FINAL).unlink(missing_ok=True)
        message = f"{len(undecided)} items are undecided; decide them in a file for --resolutions"
        raise DataError(message, out / CONFLICTS, next(iter(undecided)))
    write_items(out / FINAL, [one.final for one in decisions if one.state == "kept"])
    return {**result, "path": str(out / FINAL)}


def removal(decisions: Sequence[Decision]) -> dict[str, Any]:
    """Removed items of those decided: in all, by dimension and by format."""

    def share(names: Sequence[str]) -> dict[str, Any]:
        states = [one.state for one in decisions if not one.open and {one.item.dimension, one.item.format} & {*names}]
        removed = states.count("removed")
        return {"items": len(states), "removed": removed, "share": removed / len(states) if states else None}

    by_name = {name: share([name]) for name in (*DIMENSIONS, *FORMATS)}
    dimensions, formats = ({name: by_name[name] for name in names} for names in (DIMENSIONS, FORMATS))
    return {"all": share(FORMATS), "dimensions": dimensions, "formats": formats}


def report(result: Mapping[str, Any]) -> str:
    """The result as Markdown: counts, κ by dimension and format, removal rates, undecided items."""
    figures, removed = result["agreement"], result["removal"]
    rows = ", ".join(f"{_cell(name)} {count}" for name, count in result["rows"].items())
    lines = [
        "# Annotation",
        "",
        f"{result['items']} items: {result['kept']} kept, {result['removed']} removed, {result['open']} undecided. "
        f"Annotators differ on, or leave undecided, {result['conflicts']}; {result['resolved']} of them resolved.",
        f"Rows: {rows}.",
        "",
        "## Fleiss' κ before discussion",
        "",
        "Over items that every annotator answered. Single choice: one subject an item, options as categories. "
        "Multi and direct: each option or candidate a subject, yes or no. The column over all formats takes every "
        "option of every item as yes or no.",
        "",
        "| dimension | all | items | " + " | ".join(FORMATS) + " |",
        "|---|---:|---:|" + "---:|" * len(FORMATS),
    ]
    for name, row in {**figures["dimensions"], "all": {"all": figures["all"], **figures["formats"]}}.items():
        cells = " | ".join(_kappa(row[kind]) for kind in FORMATS)
        lines.append(f"| {name.replace('_', ' ')} | {_kappa(row['all'])} | {row['all']['items']} | {cells} |")
    lines += ["", f"κ of the flag to remove: {_kappa(figures['remove'])} over {figures['remove']['items']} items."]
    if figures["all"]["left_out"]:
        lines.append(f"{figures['all']['left_out']} items are in no κ of answers: skipped or only flagged by someone.")
    if len(figures["annotators"]) < 2:
        lines.append("One annotator: there is no agreement to measure, and no answer was checked by another person.")
    lines += ["", "## Removed", "", "| | items | removed | share |", "|---|---:|---:|---:|"]
    for name, row in {**removed["dimensions"], **removed["formats"], "all": removed["all"]}.items():
        if row["items"]:
            lines.append(f"| {name.replace('_', ' ')} | {row['items']} | {row['removed']} | {row['share']:.2%} |")
    if result["undecided"]:
        lines += ["", "## Undecided", "", f"Not in {FINAL}; votes in {CONFLICTS}.", ""]
        lines += [f"- {_cell(name)}: {', '.join(parts)}" for name, parts in result["undecided"].items()]
    return "\n".join(lines) + "\n"


def _kappa(figure: Mapping[str, Any]) -> str:
    return "–" if figure["kappa"] is None else f"{figure['kappa']:.3f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def merge_and_show(cfg: MergeConfig) -> None:
    """Merge, then print the report, the final file and the number of undecided items."""
    result = merge(cfg)
    print(report(result))
    print(f"adjudicated items: {result['path']}")
    if result["undecided"]:
        conflicts = Path(cfg.out) / CONFLICTS
        print(f"{result['open']} undecided items are left out: decide a copy of {conflicts}, then --resolutions COPY")
