"""Merge annotation files: votes, agreement before discussion, conflicts and their resolutions, the adjudicated items.

κ is Fleiss' (Appendix D.3; Fleiss 1971). A single-choice item is one subject and its options are the categories. Where
any set may be chosen, each option (multi) or candidate answer (direct, with "an answer of one's own" as one more) is a
subject decided yes or no, because a set cannot be one of few nominal categories. Figures over several formats take
every option of every item as such a yes or no, single choice too. κ of single choice nears 0 where the right letter
hardly varies, however well annotators agree: chance alone would then agree as often.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter

from remind.core.errors import DataError, named, shown
from remind.core.files import write_json, write_rows, write_text
from remind.data.dialogue import DIMENSIONS, FORMATS
from remind.data.readers.builder import Place
from remind.evaluation.statistics import fleiss_kappa
from remind.evaluation.tables import markdown_table
from remind.refmem.config import CONFLICTS, MergeConfig
from remind.refmem.items import ImageIndices, Item, Text, Texts, read_items, read_records, write_items
from remind.states.pyramid import LETTERS
from sae.ranges import NonNegativeFloat, Range

T = TypeVar("T")
FINAL, DECISIONS = "final.jsonl", "decisions.jsonl"
#: What is decided of an item.
PARTS = ("answers", "evidence", "images", "remove")


@dataclass(frozen=True)
class Row:
    """An annotator's decision on an item.

    Attributes:
        answers: letters for single and multi, phrases for direct; empty only where `remove` is set.
        evidence, images: turn ids and image indices that carry the answer; both empty: evidence was not checked.
        confidence: 1 (guess) to 5 (certain); None only where `remove` is set.
        seconds: time spent on the item.
        fingerprint: `Item.fingerprint` of the item as it was shown; None: unknown.
    """

    item_id: Text
    annotator: Text
    answers: Texts
    evidence: Texts = ()
    images: ImageIndices = ()
    confidence: Annotated[int, Range(ge=1, le=5)] | None = None
    remove: bool = False
    note: str = ""
    seconds: NonNegativeFloat = 0.0
    fingerprint: str | None = None


@dataclass(frozen=True)
class Resolution:
    """What was agreed on of an item; None: as the majority has it."""

    item_id: Text
    fingerprint: str | None = None
    answers: Texts | None = None
    evidence: Texts | None = None
    images: ImageIndices | None = None
    remove: bool | None = None


#: item id → annotator → row.
Ballots = Mapping[str, Mapping[str, Row]]


def read_annotations(paths: str | Path | Sequence[str], items: Sequence[Item]) -> list[Row]:
    """The rows of annotators' files, checked against their items; a folder stands for all its .jsonl files.

    Raises:
        DataError: a record that is not an annotation, an item that somebody annotated twice, rows of another build (an
            unknown item, or one that has changed), no rows at all.
    """
    files: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    by_id = {item.id: item for item in items}
    rows: dict[tuple[str, str], Row] = {}
    for file in files:
        for place, row in read_records(file, TypeAdapter(Row)):
            place = place.at(row.item_id)
            _check(place, by_id, row)
            if not row.remove and (row.confidence is None or not row.answers):
                raise place.error("answers or confidence are missing; skipped items have no row")
            if rows.setdefault((row.item_id, row.annotator), row) is not row:
                raise place.error(f"{named(row.annotator)} has annotated the item twice; keep one of the rows")
    if not rows:
        raise DataError("no annotation in the files given", files[0] if files else None)
    return list(rows.values())


def _check(place: Place, items: Mapping[str, Item], one: Row | Resolution) -> None:
    """The item is of this build, and the answers are valid ones. Raises DataError."""
    item = items.get(one.item_id)
    if item is None or one.fingerprint not in (None, item.fingerprint):
        raise place.error("no such item, or it has changed: of another build; give the items it was made from")
    if one.answers and (problem := replace(item, answers=one.answers).problem()) is not None:
        raise place.error(f"answers {shown(list(one.answers))}: {problem}")


def read_resolutions(path: str | Path, items: Sequence[Item]) -> dict[str, Resolution]:
    """Resolutions by item id. Raises DataError for a record that is not a resolution of one of these items."""
    by_id = {item.id: item for item in items}
    resolutions: dict[str, Resolution] = {}
    for place, one in read_records(path, TypeAdapter(Resolution)):
        place = place.at(one.item_id)
        _check(place, by_id, one)
        if resolutions.setdefault(one.item_id, one) is not one:
            raise place.error("the item is resolved twice; keep one")
    return resolutions


def phrase(text: str) -> str:
    """A phrase for comparison, without differences of Unicode form, case, punctuation, pictures and spacing.

    Signs that change what is said stay: of vowels and tones, of currencies, a minus, and those as in C++ and C#.
    """
    folded = re.sub("[\ufe00-\ufe0f\u20e3]", "", unicodedata.normalize("NFKC", text).casefold())
    signs = re.sub(r"(?<!\w)-(?=\d)", "+-", folded.replace("\N{MINUS SIGN}", "-"))
    kinds = ((one, unicodedata.category(one)) for one in signs.replace("+-", "\0"))
    kept = (one if kind[0] in "LMN" or kind == "Sc" or one in "+#\0" else " " for one, kind in kinds)
    return " ".join("".join(kept).split()) or folded.strip()


def choices(item: Item, answers: Iterable[str]) -> tuple[bool, ...]:
    """Yes or no to every option; for direct items to every candidate and, last, to "an answer of one's own"."""
    if item.format != "direct":
        return tuple(letter in set(answers) for letter in LETTERS[: len(item.options)])
    candidates = list(dict.fromkeys(map(phrase, item.candidates)))
    phrases = set(map(phrase, answers))
    return (*(text in phrases for text in candidates), bool(phrases - set(candidates)))


def agreement(items: Sequence[Item], ballots: Ballots, annotators: Sequence[str]) -> dict[str, Any]:
    """κ over the items that every annotator answered.

    Returns:
        annotators, `formats` (single, multi, direct), `dimensions` (each: `all` and its formats), `all` and `remove`
        (the flag to remove, over items that every annotator has a row for). Each figure: kappa (None: undefined),
        items, subjects, left_out (items that someone skipped or only flagged for removal).
    """
    complete = {
        item.id: [ballots[item.id][name] for name in annotators]
        for item in items
        if all(name in ballots.get(item.id, ()) for name in annotators)
    }

    def figure(subjects: Sequence[Sequence[str]], used: int, given: int) -> dict[str, Any]:
        return {"kappa": fleiss_kappa(subjects), "items": used, "subjects": len(subjects), "left_out": given - used}

    def overall(members: Sequence[Item], by_option: bool = True) -> dict[str, Any]:
        answered = [item for item in members if item.id in complete and all(row.answers for row in complete[item.id])]
        subjects: list[tuple[str, ...]] = []
        for item in answered:
            rows = complete[item.id]
            if item.format == "single" and not by_option:
                subjects.append(tuple(row.answers[0] for row in rows))
            else:
                subjects += zip(*([str(yes) for yes in choices(item, row.answers)] for row in rows), strict=True)
        return figure(subjects, len(answered), len(members))

    def by_format(members: Sequence[Item]) -> dict[str, Any]:
        return {kind: overall([item for item in members if item.format == kind], by_option=False) for kind in FORMATS}

    dimensions = {name: [item for item in items if item.dimension == name] for name in DIMENSIONS}
    flags = [tuple(str(row.remove) for row in rows) for rows in complete.values()]
    return {
        "annotators": list(annotators),
        "all": overall(items),
        "formats": by_format(items),
        "dimensions": {
            name: {"all": overall(members), **by_format(members)} for name, members in dimensions.items() if members
        },
        "remove": figure(flags, len(flags), len(items)),
    }


@dataclass
class Outcome:
    """What the majority decided.

    Attributes:
        remove: None if as many want it removed as kept.
        answers: None without a majority. evidence, images: named by most of the annotators who checked evidence.
        open: parts without a majority: remove, answers, evidence, or "unannotated" (too few rows).
        differ: parts on which annotators differ.
    """

    remove: bool | None = None
    answers: tuple[str, ...] | None = None
    evidence: tuple[str, ...] = ()
    images: tuple[int, ...] = ()
    open: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)


def majority(votes: Iterable[Iterable[T]]) -> list[T]:
    """What more than half of the votes name, the most named first."""
    given = [dict.fromkeys(vote) for vote in votes]
    return [name for name, n in Counter(chain.from_iterable(given)).most_common() if 2 * n > len(given)]


def decide(item: Item, rows: Sequence[Row]) -> Outcome:
    """The outcome of an item's rows; a majority is more than half.

    Remove: of all rows. Answers: of the rows that answer; single and multi: of the whole set of letters, so that the
    result is a set somebody chose; direct: of each phrase, in its most common spelling. Evidence: of each turn and
    image, among the rows that tick any. A removed item needs nothing else.
    """
    if not rows:
        return Outcome(open=["unannotated"])
    out = Outcome(remove=next(iter(majority([row.remove] for row in rows)), None))
    answered = [row.answers for row in rows if row.answers]
    if item.format == "direct":
        sets = [frozenset(map(phrase, answers)) for answers in answered]
        spellings: dict[str, Counter[str]] = defaultdict(Counter)
        for text in chain.from_iterable(answered):
            spellings[phrase(text)][text] += 1
        most = majority(map(phrase, answers) for answers in answered)
        out.answers = tuple(spellings[key].most_common(1)[0][0] for key in most) or None
    else:
        sets = [frozenset(answers) for answers in answered]
        out.answers = next((tuple(sorted(letters)) for letters in majority([letters] for letters in sets)), None)
    checked = [row for row in rows if row.evidence or row.images]
    turns = majority(row.evidence for row in checked)
    # proposed turns in their order, then others by name
    proposed = [turn for turn in item.evidence if turn in turns]
    out.evidence = (*proposed, *sorted(set(turns) - set(proposed)))
    out.images = tuple(sorted(majority(row.images for row in checked)))
    ticked = [(frozenset(row.evidence), frozenset(row.images)) for row in checked]
    votes: dict[str, Sequence[object]] = {"remove": [row.remove for row in rows], "answers": sets, "evidence": ticked}
    out.differ = [name for name, given in votes.items() if len({*given}) > 1]
    out.open = ["remove"] if out.remove is None else []
    if out.remove is not True:
        out.open += _missing(out)
    return out


def _missing(out: Outcome) -> list[str]:
    """What an item that stays still needs."""
    return [name for name, there in (("answers", out.answers), ("evidence", out.evidence or out.images)) if not there]


def resolve(first: Outcome, resolution: Resolution | None) -> Outcome:
    """The outcome after resolution, with the parts still open.

    A resolution decides the parts it gives; answers or evidence without `remove` keep an item that was undecided. Parts
    with a majority stand unless it gives others.
    """
    if resolution is None:
        return first
    given: dict[str, Any] = {name: one for name in PARTS if (one := getattr(resolution, name)) is not None}
    outcome = replace(first, **given, open=[])
    if outcome.remove:
        return outcome
    undecided = ["remove"] if outcome.remove is None and not given else []
    return replace(outcome, remove=False, open=[*undecided, *_missing(outcome)])


@dataclass(frozen=True)
class Decision:
    """An item with its votes and what came of them.

    Attributes:
        majority: the outcome of the rows alone. outcome: with the resolution in it.
        resolved: whether there was a resolution.
    """

    item: Item
    rows: tuple[Row, ...]
    majority: Outcome
    outcome: Outcome
    resolved: bool

    @property
    def state(self) -> str:
        """open, removed or kept."""
        return "open" if self.outcome.open else "removed" if self.outcome.remove else "kept"

    @property
    def final(self) -> Item:
        """The item as decided."""
        out = self.outcome
        return replace(self.item, answers=out.answers or (), evidence=out.evidence, images=out.images)

    def record(self) -> dict[str, Any]:
        """A line of conflicts.jsonl and decisions.jsonl. With decisions filled in it serves as a resolution."""
        votes = ("annotator", *PARTS, "confidence", "note")
        about = ("dialogue_id", "dimension", "format", "question", "options", "candidates")
        return {
            "item_id": self.item.id,
            "fingerprint": self.item.fingerprint,
            "state": self.state,
            "open": self.outcome.open,
            "differ": self.majority.differ,
            "resolved": self.resolved,
            "changed": self.state == "kept" and set(self.final.answers) != set(self.item.answers),
            **{key: getattr(self.item, key) for key in about},
            "votes": [{key: getattr(row, key) for key in votes} for row in self.rows],
            "majority": {key: getattr(self.majority, key) for key in PARTS},
            "decided": None if self.outcome.open else {key: getattr(self.outcome, key) for key in PARTS},
        }


def merge(cfg: MergeConfig) -> dict[str, Any]:
    """Merge the annotations, write the files that `MergeConfig.out` names, and print the report.

    Returns:
        The content of agreement.json.

    Raises:
        DataError: inputs that cannot be used.
        ModelError: statsmodels is missing.
    """
    items = read_items(cfg.drafts)
    rows = read_annotations(cfg.annotations, items)
    ballots: dict[str, dict[str, Row]] = {item.id: {} for item in items}
    for row in rows:
        ballots[row.item_id][row.annotator] = row
    counts = Counter(row.annotator for row in rows)
    resolutions = read_resolutions(cfg.resolutions, items) if cfg.resolutions else {}
    decisions = []
    for item in items:
        own, resolution = tuple(ballots[item.id].values()), resolutions.get(item.id)
        first = decide(item, own)
        decisions.append(Decision(item, own, first, resolve(first, resolution), resolution is not None))
    conflicts = [one for one in decisions if one.majority.open or one.majority.differ]
    undecided = {one.item.id: one.outcome.open for one in decisions if one.outcome.open}
    states = Counter(one.state for one in decisions)
    result = {
        "format": "remind-annotation",
        "items": len(items),
        **{state: states[state] for state in ("kept", "removed", "open")},
        "conflicts": len(conflicts),
        "resolved": sum(one.resolved and not one.outcome.open for one in conflicts),
        "undecided": undecided,
        "rows": dict(counts),
        "removal": removal(decisions),
        "agreement": agreement(items, ballots, list(counts)),
    }
    out = Path(cfg.out)
    write_json(out / "agreement.json", result)
    write_text(out / "report.md", report(result))
    write_rows(out / CONFLICTS, (one.record() for one in conflicts))
    write_rows(out / DECISIONS, (one.record() for one in decisions))
    write_items(out / FINAL, [one.final for one in decisions if one.state == "kept"])
    print(f"{report(result)}\nadjudicated items: {out / FINAL}")
    if undecided:
        print(f"{len(undecided)} undecided items are left out: decide a copy of {out / CONFLICTS} for --resolutions")
    return result


def removal(decisions: Sequence[Decision]) -> dict[str, Any]:
    """Removed items of those decided: in all, by dimension and by format."""

    def share(*names: str) -> dict[str, Any]:
        states = [one.state for one in decisions if {one.item.dimension, one.item.format} & {*names}]
        decided, removed = len(states) - states.count("open"), states.count("removed")
        return {"items": decided, "removed": removed, "share": removed / decided if decided else None}

    by_dimension, by_format = ({name: share(name) for name in names} for names in (DIMENSIONS, FORMATS))
    return {"all": share(*FORMATS), "dimensions": by_dimension, "formats": by_format}


def report(result: Mapping[str, Any]) -> str:
    """The result as Markdown: counts, κ by dimension and format, removal rates, undecided items."""
    figures, removed = result["agreement"], result["removal"]

    def kappa(figure: Mapping[str, Any]) -> str:
        return "–" if figure["kappa"] is None else f"{figure['kappa']:.3f}"

    by_dimension = {**figures["dimensions"], "all": {"all": figures["all"], **figures["formats"]}}
    kappas = [
        [name.replace("_", " "), kappa(row["all"]), row["all"]["items"], *(kappa(row[kind]) for kind in FORMATS)]
        for name, row in by_dimension.items()
    ]
    shares = {**removed["dimensions"], **removed["formats"], "all": removed["all"]}
    lines = [
        "# Annotation",
        "",
        f"{result['items']} items: {result['kept']} kept, {result['removed']} removed, {result['open']} undecided. "
        f"Annotators differ on, or leave undecided, {result['conflicts']}; {result['resolved']} of them resolved.",
        f"Rows: {', '.join(f'{named(name)} {count}' for name, count in result['rows'].items())}.",
        "",
        "## Fleiss' κ before discussion",
        "",
        "Over items that every annotator answered; subjects and categories are those of docs/refmem.md.",
        "",
        markdown_table(["dimension", "all", "items", *FORMATS], kappas),
        f"κ of the flag to remove: {kappa(figures['remove'])} over {figures['remove']['items']} items. "
        f"{figures['all']['left_out']} items are in no κ of answers: skipped or only flagged by someone.",
    ]
    rows = [
        (name.replace("_", " "), row["items"], row["removed"], f"{row['share']:.2%}")
        for name, row in shares.items()
        if row["items"]
    ]
    lines += ["", "## Removed", "", markdown_table(["", "items", "removed", "share"], rows)]
    return "\n".join(lines).rstrip("\n") + "\n"
