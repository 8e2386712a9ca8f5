"""One question's three states as text with spans, a row of a states dataset; and back from there to the states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from remind.core.errors import DataError
from remind.data.dialogue import Dialogue, Format, Question, Turn
from remind.states import prompts
from remind.states.pyramid import (
    ANCHOR_KINDS,
    LETTERS,
    LEVELS,
    AttentionalState,
    FactualState,
    ReflectiveState,
    Rendered,
    Span,
    State,
    Strategy,
    blind,
    line_of,
    render,
    render_target,
    segments_of,
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
        kind: the dimension that the question was taken for, or `FACTUAL`; None where its kind was not inferred.
    """

    question_id: str
    dialogue_id: str
    split: Literal["train", "dev", "test"]
    format: Format
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


#: Reads rows: lists become tuples, and structures the records of a level.
@cache
def _rows() -> Any:
    """Reads rows. Made when one is read: rendering does without pydantic."""
    from pydantic import TypeAdapter

    return TypeAdapter(StateRecord)


def record_of(state: State, split: str) -> StateRecord:
    """A question's states, rendered up to the level of the one given, with what training and evaluation need."""
    attentional = state.attentional if isinstance(state, ReflectiveState) else state
    factual = attentional.factual if isinstance(attentional, AttentionalState) else attentional
    question, dialogue = factual.question, factual.dialogue
    held = {turn.id for turn in factual.turns}
    held_images = {image.index for turn in factual.turns for image in turn.images}
    return StateRecord(
        question_id=question.id,
        dialogue_id=dialogue.id,
        split=split,  # type: ignore[arg-type]
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
        kind=None if factual.told is None else factual.told.dimension or FACTUAL,
    )


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
    marked = [turn for start, end in blocks_of(record.x1) for turn in record.x1.turns[start : end + 1]]
    found: set[Any] = {turn.turn_id for turn in marked}
    if record.visual:
        found = {index for turn in marked for index in shown_images(record.x1, turn)}
    return len(found & set(gold)) / len(set(gold))


def row_of(record: StateRecord) -> dict[str, Any]:
    """The record as a row of a states dataset; levels that were not built are left out."""
    built = {name: value for name, value in asdict(record).items() if name not in LEVELS or name in record.levels}
    return built | {"pictures": [picture._asdict() for picture in record.pictures]}


def record_of_row(row: Mapping[str, Any], folder: str | Path | None = None) -> StateRecord:
    """The record of a row of a states dataset.

    Args:
        folder: where it comes from, for messages.

    Raises:
        DataError: a column is missing, or holds what no state can.
    """
    from pydantic import ValidationError

    given = {name: value for name, value in row.items() if value is not None or name not in LEVELS}
    try:
        record: StateRecord = _rows().validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        problem: str | None = f"column {'.'.join(map(str, first['loc']))}: {first['msg']}"
    else:
        problem = _problem(record)
        if problem is None:
            return record
    raise DataError(f"not the row of a state: {problem}; build the states again", folder, str(row.get("question_id")))


def _problem(record: StateRecord) -> str | None:
    """What no record can hold: rows may have been mapped by hand."""
    if (record.format == "direct") == bool(record.options):
        return f"a {record.format} question has {len(record.options)} options"
    if record.options and not set(record.answers) <= set(LETTERS[: len(record.options)]):
        return f"gold answers {', '.join(record.answers)} of {len(record.options)} options"
    for name in record.levels:
        level = record.level(name)
        spans = [level.dialogue, *level.reasoning, *level.anchors, *level.markers]
        spans += [span for turn in level.turns for span in ((turn.start, turn.end), turn.speaker, turn.text)]
        if any(not 0 <= start <= end <= len(level.text) for start, end in spans) or len(level.markers) % 2:
            return f"{name}: a span lies outside its text, or a block of markers is not closed"
    return None


# from a record back to the states


def positions_of(record: StateRecord, dialogue: Dialogue) -> list[int]:
    """Positions in the dialogue of the turns that x0 shows. Raises DataError where it lacks one of them."""
    missing = [span.turn_id for span in record.x0.turns if span.turn_id not in dialogue.positions]
    if missing:
        raise DataError(f"x0 shows turn {missing[0]!r}, which is not in its dialogue", record=record.question_id)
    return [dialogue.positions[span.turn_id] for span in record.x0.turns]


def strategy_of(rendered: Rendered) -> Strategy:
    """S_str as written in the prompt."""
    text = rendered.text
    anchors: dict[str, list[str]] = {kind: [] for kind in ANCHOR_KINDS.values()}
    for start, end in rendered.anchors:
        head = text[text.rfind("\n", 0, start) + 1 : start].partition(": ")[0]
        if head not in ANCHOR_KINDS:
            raise DataError(f"{head!r} is not a kind of anchor")
        anchors[ANCHOR_KINDS[head]].append(text[start:end])
    reasoning = tuple(text[start:end] for start, end in rendered.reasoning)
    return Strategy(reasoning, **{name: tuple(values) for name, values in anchors.items()})


def blocks_of(rendered: Rendered) -> tuple[Span, ...]:
    """The blocks that the markers of x1 enclose, as inclusive ranges over the shown turns."""
    blocks = []
    for opening, closing in zip(rendered.markers[::2], rendered.markers[1::2], strict=True):
        inside = [n for n, turn in enumerate(rendered.turns) if opening[1] <= turn.start and turn.end <= closing[0]]
        blocks.append((inside[0], inside[-1]))
    return tuple(blocks)


def factual_of(record: StateRecord, dialogue: Dialogue, question: Question) -> FactualState:
    """x0 as a state. It renders to exactly the text of the record.

    Raises:
        DataError: it does not, because dialogue files or prompt templates differ from those of the states.
    """
    segments = segments_of(dialogue, sorted(positions_of(record, dialogue)))
    told = None
    if record.kind is not None:
        told = replace(blind(question), dimension=None if record.kind == FACTUAL else record.kind)
    state = FactualState(dialogue, question, segments, strategy_of(record.x0), record.x0.abstention, told)
    if render(state).text != record.x0.text:
        raise DataError(
            "x0 cannot be rebuilt: the dialogue files or the prompt templates differ from those the states were "
            "built with; build the states again",
            record=record.question_id,
        )
    return state


def attentional_of(record: StateRecord, dialogue: Dialogue, question: Question) -> AttentionalState:
    """x1 as a state. Raises DataError as `factual_of`."""
    return AttentionalState(factual_of(record, dialogue, question), blocks_of(record.x1), record.salience)


def summary_of(record: StateRecord) -> str:
    """The summary in x2; "" where x2 is x1.

    Raises:
        DataError: x2 is not x1 with a summary section as the current prompt templates render it.
    """
    x1, x2 = record.x1.text, record.x2.text
    if x1 == x2:
        return ""
    head = f"\nReflection\n{prompts.render('summary').strip()}\n"
    start = x2.find(head, record.x2.strategy_end)
    end = start + len(x2) - len(x1)
    if start < 0 or x2[:start] + x2[end:] != x1:
        raise DataError("x2 is not x1 with a summary: templates changed; build it again", record=record.question_id)
    return x2[start + len(head) : end].removesuffix("\n")
