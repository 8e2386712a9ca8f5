"""One question's three states as text with spans: what a states folder holds, and what makes a record valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remind.core.errors import DataError, shown
from remind.data.dialogue import DIMENSIONS, FORMATS, SPLITS, VISUAL_DIMENSIONS, Turn
from remind.states.pyramid import LETTERS, LEVELS, FactualState, Rendered, strip_markers

#: The inferred kind of a question of no dimension.
FACTUAL = "factual"


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
        evidence_found: those of `evidence` that x0 holds. `images`, `images_found`: the same for gold image indices.
        category: the benchmark's own category as text ("1".."5" for LoCoMo), or None.
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
    evidence_found: tuple[str, ...]
    images: tuple[int, ...]
    images_found: tuple[int, ...]
    target: str | None
    x0: Rendered
    x1: Rendered
    x2: Rendered
    salience: tuple[float, ...] = ()
    pictures: tuple[Picture, ...] = ()
    kind: str | None = None

    def level(self, name: str) -> Rendered:
        """x0, x1 or x2 by name."""
        if name not in LEVELS:
            raise DataError(f"no level {name!r}; there are {', '.join(LEVELS)}", record=self.question_id)
        rendered: Rendered = getattr(self, name)
        return rendered


def kind_of(state: FactualState) -> str | None:
    """The dimension that the question was taken for, or `FACTUAL`; None where its kind was not inferred."""
    return None if state.told is None else state.told.dimension or FACTUAL


def evidence_share(record: StateRecord) -> float | None:
    """Share of the gold evidence that x0 holds (turns, or images for visual questions); None if there is no gold."""
    gold, found = (record.images, record.images_found) if record.visual else (record.evidence, record.evidence_found)
    return len(set(found)) / len(set(gold)) if gold else None


def problems(record: StateRecord, levels: Sequence[str]) -> Iterator[str]:
    """What no valid record can hold, found by cross-checking its fields.

    Args:
        levels: those of x0, x1 and x2 that were read with their spans.
    """
    if not record.question_id.strip():
        yield "the question id is blank"
    if record.format not in FORMATS:
        yield f"unknown format {shown(record.format)}"
    if record.split not in SPLITS:
        yield f"unknown split {shown(record.split)}"
    if record.dimension is not None and record.dimension not in DIMENSIONS:
        yield f"unknown dimension {shown(record.dimension)}"
    if record.kind not in (None, FACTUAL, *DIMENSIONS):
        yield f"unknown kind {shown(record.kind)}"
    if record.visual != (record.dimension in VISUAL_DIMENSIONS):
        yield "visual does not match the dimension"
    yield from _choice_problems(record)
    if len(record.evidence_lines) not in (0, len(record.evidence)):
        yield f"evidence_lines has {len(record.evidence_lines)} lines for {len(record.evidence)} turns"
    if not (set(record.evidence_found) <= set(record.evidence) and set(record.images_found) <= set(record.images)):
        yield "evidence_found or images_found names something that is not gold evidence"
    if any(index < 0 for index in record.images):
        yield f"an image index is {min(record.images)}"
    for name in levels:
        yield from (f"{name}: {problem}" for problem in _level_problems(record.level(name)))
    if "x0" in levels:
        if len(record.salience) not in (0, len(record.x0.turns)):
            yield f"salience has {len(record.salience)} values for {len(record.x0.turns)} turns"
        captions = {turn.turn_id: len(turn.captions) for turn in record.x0.turns}
        if any(not 0 <= picture.place < captions.get(picture.turn_id, 0) for picture in record.pictures):
            yield "a picture belongs to no image in x0"
        dialogues = {name: strip_markers(record.level(name)) for name in levels}
        for name, text in dialogues.items():
            if text != dialogues["x0"]:
                yield f"{name}: its dialogue without markers differs from that of x0"


def _choice_problems(record: StateRecord) -> Iterator[str]:
    options, answers = record.options, record.answers
    if record.format == "direct":
        if options:
            yield "a direct question has no options"
        return
    if not 1 <= len(options) <= len(LETTERS):
        yield f"a {record.format} question needs 1 to {len(LETTERS)} options, this one has {len(options)}"
    if wrong := [answer for answer in answers if answer not in list(LETTERS[: len(options)])]:
        yield f"gold answer {shown(wrong[0])} names none of its options"
    if len(set(answers)) < len(answers):
        yield "an answer occurs twice"
    if record.format == "single" and len(answers) > 1:
        yield f"a single question has one answer, not {len(answers)}"


def _level_problems(level: Rendered) -> Iterator[str]:
    whole = (0, len(level.text))
    if not _ordered([level.dialogue], whole):
        yield "the span of the dialogue lies outside the text"
    for name, spans in (("reasoning", level.reasoning), ("anchors", level.anchors)):
        if not all(_ordered([span], whole) for span in spans):
            yield f"a span of {name} lies outside the text"
    turns = [(turn.start, turn.end) for turn in level.turns]
    if not _ordered(turns, level.dialogue):
        yield "turns overlap, are out of order or lie outside the dialogue"
    if len({turn.turn_id for turn in level.turns}) < len(turns):
        yield "a turn occurs twice"
    if len(level.markers) % 2:
        yield "a block of markers is not closed"
    if not (_ordered(level.markers, level.dialogue) and _ordered(sorted([*turns, *level.markers]), level.dialogue)):
        yield "markers overlap, are out of order or lie outside the dialogue"
    for turn in level.turns:
        inside = (turn.start, turn.end)
        if not (_ordered([turn.speaker], inside) and _ordered([turn.text], inside) and _ordered(turn.captions, inside)):
            yield f"speaker, text or captions of turn {shown(turn.turn_id)} lie outside it or overlap"


def _ordered(spans: Sequence[tuple[int, int]], bounds: tuple[int, int]) -> bool:
    """Whether half-open spans follow one another inside the bounds."""
    last, end = bounds
    for start, stop in spans:
        if not last <= start <= stop <= end:
            return False
        last = stop
    return True
