"""One question's three states as text with spans: a row of a states dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from remind.core.errors import DataError, shown
from remind.data.dialogue import DIMENSIONS, FORMATS, SPLITS, Turn
from remind.states.pyramid import (
    LETTERS,
    LEVELS,
    AttentionalState,
    FactualState,
    ReflectiveState,
    Rendered,
    State,
    TurnSpan,
    line_of,
    render,
    render_target,
    shown_images,
)

#: The inferred kind of a question of no dimension.
FACTUAL = "factual"
#: In place of a level that was not built.
ABSENT = Rendered("", (0, 0), (), (), ())


class Picture(NamedTuple):
    """The file of an image in x0: the turn, the place of its caption in the turn (from 0), and the path."""

    turn_id: str
    place: int
    path: str


def pictures_of(turns: Iterable[Turn]) -> tuple[Picture, ...]:
    """The images of turns whose file is known, in the order of the text."""
    return tuple(
        Picture(turn.id, place, image.path)
        for turn in turns
        for place, image in enumerate(turn.images)
        if image.path is not None
    )


@dataclass(frozen=True)
class StateRecord:
    """The three states of one question, rendered.

    Attributes:
        target: y* without the end token; None where no gold answer is known.
        evidence, evidence_lines: gold evidence turn ids and the same turns as lines `Speaker: text`.
        evidence_found: those of `evidence` that x0 holds; None: not known, of contexts whose sources are not known.
            `images`, `images_found`: the same for gold image indices.
        category: the benchmark's own category as text ("1".."5" for LoCoMo), or None.
        x0, x1, x2: the levels; `ABSENT` where one was not built.
        salience: s_turn of every turn in x0 (Eq. 5), empty where grounding gave none.
        pictures: images of x0 whose file is known, in the order of the text; absolute paths, as the reader found them.
        kind: the inferred kind of the question, as `kind_of` gives it.
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
    evidence_found: tuple[str, ...] | None
    images: tuple[int, ...]
    images_found: tuple[int, ...] | None
    target: str | None
    x0: Rendered
    x1: Rendered = ABSENT
    x2: Rendered = ABSENT
    salience: tuple[float, ...] = ()
    pictures: tuple[Picture, ...] = ()
    kind: str | None = None

    @property
    def levels(self) -> tuple[str, ...]:
        """Those that were built."""
        return tuple(name for name in LEVELS if getattr(self, name) != ABSENT)

    def level(self, name: str) -> Rendered:
        """x0, x1 or x2 by name. Raises DataError where it was not built."""
        if name not in self.levels:
            what = f"no level {name!r}; there are {', '.join(self.levels)}; build the states with it (levels)"
            raise DataError(what, record=self.question_id)
        rendered: Rendered = getattr(self, name)
        return rendered


def record_of(state: State, split: str) -> StateRecord:
    """A question's states, rendered up to the level of the one given, with what training and evaluation need."""
    attentional = state.attentional if isinstance(state, ReflectiveState) else state
    factual = attentional.factual if isinstance(attentional, AttentionalState) else attentional
    assert isinstance(factual, FactualState)
    question, dialogue = factual.question, factual.dialogue
    held = {turn.id for turn in factual.turns}
    held_images = {image.index for turn in factual.turns for image in turn.images}
    return StateRecord(
        question_id=question.id,
        dialogue_id=dialogue.id,
        split=split,
        format=question.format,
        question=question.text,
        options=question.options,
        answers=question.answers,
        dimension=question.dimension,
        category=None if question.category is None else str(question.category),
        visual=question.visual,
        evidence=question.evidence,
        evidence_lines=tuple(line_of(dialogue.turn(turn_id)) for turn_id in question.evidence),
        evidence_found=tuple(turn_id for turn_id in question.evidence if turn_id in held),
        images=question.images,
        images_found=tuple(index for index in question.images if index in held_images),
        target=render_target(factual),
        x0=render(factual),
        x1=render(attentional) if isinstance(attentional, AttentionalState) else ABSENT,
        x2=render(state) if isinstance(state, ReflectiveState) else ABSENT,
        salience=attentional.salience if isinstance(attentional, AttentionalState) else (),
        pictures=pictures_of(factual.turns),
        kind=kind_of(factual),
    )


def kind_of(state: FactualState) -> str | None:
    """The dimension that the question was taken for, or `FACTUAL`; None where its kind was not inferred."""
    return None if state.told is None else state.told.dimension or FACTUAL


def evidence_share(record: StateRecord) -> float | None:
    """Share of the gold evidence that x0 holds (turns, or images for visual questions); None if there is no gold, or it
    is not known what is shown."""
    gold, found = (record.images, record.images_found) if record.visual else (record.evidence, record.evidence_found)
    return len(set(found)) / len(set(gold)) if gold and found is not None else None


def marked_share(record: StateRecord) -> float | None:
    """Share of the gold evidence inside x1's blocks; None if there is no gold, or no x1."""
    gold = record.images if record.visual else record.evidence
    if not gold or record.x1 == ABSENT:
        return None
    pairs = list(zip(record.x1.markers[::2], record.x1.markers[1::2], strict=True))
    marked = [turn for turn in record.x1.turns if any(o[1] <= turn.start and turn.end <= c[0] for o, c in pairs)]
    found: set[Any] = {turn.turn_id for turn in marked}
    if record.visual:
        found = {index for turn in marked for index in shown_images(record.x1, turn)}
    return len(found & set(gold)) / len(set(gold))


def row_of(record: StateRecord) -> dict[str, Any]:
    """The record as a row of a states dataset; levels that were not built are left out."""
    absent = set(LEVELS) - set(record.levels)
    row = {field.name: getattr(record, field.name) for field in fields(record) if field.name not in absent}
    row |= {name: asdict(record.level(name)) for name in record.levels}
    row["pictures"] = [picture._asdict() for picture in record.pictures]
    return row


def record_of_row(row: Mapping[str, Any], folder: str | Path | None = None) -> StateRecord:
    """The record of a row of a states dataset.

    Args:
        folder: where it comes from, for messages.

    Raises:
        DataError: a column is missing, or holds what no state can.
    """
    name = str(row.get("question_id", ""))
    known = [field.name for field in fields(StateRecord)]
    if missing := [name for name in known if name not in row and name not in ("x1", "x2")]:
        raise DataError(f"column {missing[0]} is missing", folder, name)
    values: dict[str, Any] = {}
    try:
        for column in known:
            value = row.get(column)
            if column in LEVELS:
                values[column] = ABSENT if value is None else _rendered(value)
            else:
                values[column] = _tuples(value)
        values["pictures"] = tuple(Picture(**picture) for picture in row["pictures"])
        record = StateRecord(**values)
        problem = _problem(record)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"not the row of a state: {error}", folder, name) from None
    if problem is not None:
        raise DataError(f"{problem}; build the states again", folder, name)
    return record


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _rendered(value: Mapping[str, Any]) -> Rendered:
    turns = tuple(TurnSpan(**{name: _tuples(part) for name, part in turn.items()}) for turn in value["turns"])
    return Rendered(**{**{name: _tuples(part) for name, part in value.items()}, "turns": turns})


def _problem(record: StateRecord) -> str | None:
    """What no record can hold: rows may have been mapped by hand."""
    letters = list(LETTERS[: len(record.options)])
    if not record.question_id or not isinstance(record.question_id, str):
        return "the question id is blank"
    for name, value, known in (
        ("format", record.format, FORMATS),
        ("split", record.split, SPLITS),
        ("dimension", record.dimension, (None, *DIMENSIONS)),
        ("kind", record.kind, (None, FACTUAL, *DIMENSIONS)),
    ):
        if value not in known:
            return f"unknown {name} {shown(value)}"
    if (record.format == "direct") == bool(record.options):
        return f"a {record.format} question has {len(record.options)} options"
    if record.options and (wrong := [answer for answer in record.answers if answer not in letters]):
        return f"gold answer {shown(wrong[0])} names none of its options"
    if len(record.salience) not in (0, len(record.x0.turns)):
        return f"salience has {len(record.salience)} values for {len(record.x0.turns)} turns"
    for name in record.levels:
        level = record.level(name)
        within = [level.dialogue, *level.reasoning, *level.anchors, *level.markers]
        within += [span for turn in level.turns for span in ((turn.start, turn.end), turn.speaker, turn.text)]
        if any(not 0 <= start <= end <= len(level.text) for start, end in within):
            return f"{name}: a span lies outside its text"
        if len(level.markers) % 2:
            return f"{name}: a block of markers is not closed"
        starts: Sequence[int] = [turn.start for turn in level.turns]
        if sorted(starts) != starts:
            return f"{name}: its turns are out of order"
    return None
