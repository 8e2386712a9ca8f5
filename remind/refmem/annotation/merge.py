"""Several annotators' files made one: agreement, conflicts to resolve, removal rates, and the adjudicated items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from remind.core.errors import ConfigError, DataError
from remind.core.files import write_json, write_rows, write_text
from remind.data.dialogue import DIMENSIONS, FORMATS
from remind.data.readers.source import Place, Source
from remind.refmem.annotation.agreement import Ballots, agreement
from remind.refmem.annotation.report import report
from remind.refmem.annotation.rows import Row, check_answers, read_annotations
from remind.refmem.annotation.shown import fingerprint
from remind.refmem.annotation.votes import Outcome, decide
from remind.refmem.items import Item, read_items, write_items

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
    open: Literal["refuse", "drop"] = "refuse"
    """Items whose conflict nobody resolved: refuse: no final file; drop: they are left out of it and counted."""
    discuss: Literal["undecided", "all"] = "undecided"
    """What needs a resolution: items without a majority, or every item on which annotators differ."""
    quorum: int = 1
    """An item with fewer rows than this is open too."""

    def __post_init__(self) -> None:
        if self.quorum < 1:
            raise ConfigError(f"quorum is at least 1, not {self.quorum}")


@dataclass(frozen=True)
class Resolution:
    """What was agreed on for an item; None: as the majority has it."""

    answers: tuple[str, ...] | None = None
    evidence: tuple[str, ...] | None = None
    images: tuple[int, ...] | None = None
    remove: bool | None = None


def read_ballots(paths: str | Sequence[str], items: Sequence[Item]) -> tuple[dict[str, dict[str, Row]], list[str]]:
    """Item id → annotator → row, and the annotators in the order of their files.

    Raises:
        DataError: a file that cannot be used (see `read_annotations`), an annotator with two files, no rows at all.
    """
    files: list[Path] = []
    for path in [Path(paths)] if isinstance(paths, str) else list(map(Path, paths)):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    ballots: dict[str, dict[str, Row]] = {item.id: {} for item in items}
    owner: dict[str, Path] = {}
    for file in files:
        for row in read_annotations(file, items):
            if owner.setdefault(row.annotator, file) != file:
                raise DataError(f"{row.annotator} has another file, {owner[row.annotator]}; give one of them", file)
            ballots[row.item_id][row.annotator] = row
    if not owner:
        raise DataError("no annotation in the files given", files[0] if files else None)
    return ballots, list(owner)


def read_resolutions(path: str | Path, items: Sequence[Item]) -> dict[str, Resolution]:
    """The resolutions of a file. Raises DataError for a record that is none, or about no item of these."""
    known = {item.id: item for item in items}
    path = Path(path)
    found: dict[str, Resolution] = {}
    for place, value in Source(path).records:
        record = place.mapping(value, "a resolution")
        name = place.name(record.get("item_id"), "item_id")
        place = place.at(name)
        if name not in known or record.get("fingerprint", fingerprint(known[name])) != fingerprint(known[name]):
            raise place.error("no such item, or it reads otherwise now: a resolution of another build")
        if name in found:
            raise place.error("the item is resolved twice; keep one")
        found[name] = _resolution(place, record, known[name])
    return found


def _resolution(place: Place, record: Mapping[str, Any], item: Item) -> Resolution:
    def texts(key: str) -> tuple[str, ...] | None:
        if record.get(key) is None:
            return None
        return tuple(dict.fromkeys(place.name(text, key) for text in place.sequence(record[key], key)))

    images, remove, answers = record.get("images"), record.get("remove"), texts("answers")
    if images is not None and not (isinstance(images, list) and all(type(index) is int for index in images)):
        raise place.error("images should be a list of image indices")
    if not isinstance(remove, bool | None):
        raise place.error("remove should be true or false")
    if answers is not None:
        check_answers(place, item, answers)
    return Resolution(answers, texts("evidence"), None if images is None else tuple(images), remove)


def settle(outcome: Outcome, resolution: Resolution | None, discuss: str) -> tuple[Outcome, list[str]]:
    """The outcome with a resolution in it, and the parts still open.

    A resolution decides the parts it gives; answers or evidence without `remove` keep an item that was undecided. Parts
    that a majority decided stand unless it gives others, and where all differences are discussed it confirms them.
    """
    still = list(outcome.open)
    if discuss == "all":
        still += [part for part in outcome.differ if part not in still]
    if resolution is None:
        return outcome, still
    done = replace(
        outcome,
        remove=outcome.remove if resolution.remove is None else resolution.remove,
        answers=outcome.answers if resolution.answers is None else resolution.answers,
        evidence=outcome.evidence if resolution.evidence is None else resolution.evidence,
        images=outcome.images if resolution.images is None else resolution.images,
    )
    if done.remove:
        return done, []
    left = []
    if done.remove is None and resolution == Resolution():
        left.append("remove")
    if not done.answers:
        left.append("answers")
    if not done.evidence and not done.images:
        left.append("evidence")
    return replace(done, remove=done.remove or False), left


def merge(cfg: MergeConfig) -> dict[str, Any]:
    """See `MergeConfig`. Writes all but the final items in any case; these only if nothing is open or may be dropped.

    Returns:
        What agreement.json holds, with `path` of the final file.

    Raises:
        DataError: inputs that cannot be used; conflicts that are open (an older final file is removed then).
        ConfigError: statsmodels is missing.
    """
    items = read_items(cfg.drafts)
    ballots, annotators = read_ballots(cfg.annotations, items)
    resolutions = read_resolutions(cfg.resolutions, items) if cfg.resolutions else {}
    outcomes = {item.id: decide(item, list(ballots[item.id].values()), cfg.quorum) for item in items}
    settled = {item.id: settle(outcomes[item.id], resolutions.get(item.id), cfg.discuss) for item in items}
    conflicts = [
        _conflict(item, outcomes[item.id], settled[item.id], ballots) for item in items if _listed(outcomes[item.id])
    ]
    final, dropped = [], []
    for item in items:
        outcome, left = settled[item.id]
        if left:
            dropped.append(item)
        elif not outcome.remove:
            answers = outcome.answers or ()
            final.append(replace(item, answers=answers, evidence=outcome.evidence, images=outcome.images))
    result = {
        "format": "remind-annotation",
        "items": len(items),
        "kept": len(final),
        "removed": sum(not left and bool(outcome.remove) for outcome, left in settled.values()),
        "open": len(dropped),
        "conflicts": len(conflicts),
        "resolved": sum(conflict["state"] == "resolved" for conflict in conflicts),
        "rows": {name: sum(name in rows for rows in ballots.values()) for name in annotators},
        "removal": removal(
            items, {name: bool(outcome.remove) for name, (outcome, left) in settled.items() if not left}
        ),
        "agreement": agreement(items, ballots, annotators),
    }
    out = Path(cfg.out)
    write_json(out / "agreement.json", result)
    write_text(out / "report.md", report(result))
    write_rows(out / CONFLICTS, conflicts)
    write_rows(out / DECISIONS, (_decision(item, settled[item.id], ballots) for item in items))
    if dropped and cfg.open == "refuse":
        (out / FINAL).unlink(missing_ok=True)
        raise DataError(
            f"{len(dropped)} items are open; answer them in a file for --resolutions, or pass --open drop",
            out / CONFLICTS,
            dropped[0].id,
        )
    write_items(out / FINAL, final)
    return {**result, "path": str(out / FINAL)}


def _listed(outcome: Outcome) -> bool:
    return bool(outcome.open or outcome.differ)


def removal(items: Sequence[Item], removed: Mapping[str, bool]) -> dict[str, Any]:
    """Removed items of those decided: in all, by dimension, by format, and by both ("dimension/format")."""

    def share(members: Sequence[Item]) -> dict[str, Any]:
        known = [removed[item.id] for item in members if item.id in removed]
        return {"items": len(known), "removed": sum(known), "share": sum(known) / len(known) if known else None}

    groups = Counter((item.dimension, item.format) for item in items)
    return {
        "all": share(items),
        "dimensions": {name: share([i for i in items if i.dimension == name]) for name in DIMENSIONS},
        "formats": {name: share([i for i in items if i.format == name]) for name in FORMATS},
        "cells": {
            f"{dimension}/{kind}": share([i for i in items if (i.dimension, i.format) == (dimension, kind)])
            for dimension, kind in sorted(groups)
        },
    }


def _conflict(item: Item, before: Outcome, settled: tuple[Outcome, list[str]], ballots: Ballots) -> dict[str, Any]:
    outcome, left = settled
    return {
        "item_id": item.id,
        "fingerprint": fingerprint(item),
        "state": "open" if left else "majority" if outcome is before else "resolved",
        "open": left,
        "differ": before.differ,
        "dialogue_id": item.dialogue_id,
        "dimension": item.dimension,
        "format": item.format,
        "question": item.question,
        "options": item.options,
        "candidates": item.candidates,
        "votes": [_vote(row) for row in ballots[item.id].values()],
        "majority": {
            "answers": before.answers,
            "evidence": before.evidence,
            "images": before.images,
            "remove": before.remove,
        },
    }


def _vote(row: Row) -> dict[str, Any]:
    keys = ("annotator", "answers", "evidence", "images", "confidence", "remove", "note")
    return {key: getattr(row, key) for key in keys}


def _decision(item: Item, settled: tuple[Outcome, list[str]], ballots: Ballots) -> dict[str, Any]:
    outcome, left = settled
    return {
        "item_id": item.id,
        "state": "open" if left else "removed" if outcome.remove else "kept",
        "annotators": list(ballots[item.id]),
        "answers": outcome.answers,
        "evidence": outcome.evidence,
        "images": outcome.images,
        "changed": bool(not left and not outcome.remove and set(outcome.answers or ()) != set(item.answers)),
    }


def merge_and_show(cfg: MergeConfig) -> None:
    """`merge`, then its report and where the final items are."""
    result = merge(cfg)
    print(report(result))
    print(f"adjudicated items: {result['path']}")
