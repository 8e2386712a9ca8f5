"""From a record on disk back to the state it was rendered from, with the dialogue it is about."""

from __future__ import annotations

from dataclasses import replace

from remind.core.errors import DataError
from remind.data.dialogue import NO_INFORMATION, Dialogue, Question
from remind.states import prompts
from remind.states.pyramid import (
    ANCHOR_KINDS,
    AttentionalState,
    FactualState,
    Rendered,
    Span,
    Strategy,
    blind,
    render,
    segments_of,
)
from remind.states.records import FACTUAL, StateRecord


def positions_of(record: StateRecord, dialogue: Dialogue) -> list[int]:
    """Positions in the dialogue of the turns that x0 shows. Raises DataError where it lacks one of them."""
    missing = [span.turn_id for span in record.x0.turns if span.turn_id not in dialogue.positions]
    if missing:
        raise DataError(f"x0 shows turn {missing[0]!r}, which is not in its dialogue", record=record.question_id)
    return [dialogue.positions[span.turn_id] for span in record.x0.turns]


def strategy_end(rendered: Rendered) -> int:
    """Where the strategy section ends, in characters; the end of the dialogue where there is none."""
    if not (*rendered.reasoning, *rendered.anchors):
        return rendered.dialogue[1]
    return rendered.text.index("\n", rendered.strategy[1]) + 1


def strategy_of(rendered: Rendered) -> Strategy:
    """S_str as written in the prompt."""
    text = rendered.text
    anchors: dict[str, list[str]] = {kind: [] for kind in ANCHOR_KINDS.values()}
    kind = ""
    for start, end in rendered.anchors:
        head = text[text.rfind("\n", 0, start) + 1 : start]
        kind = ANCHOR_KINDS.get(head.removesuffix(": "), kind)
        if kind not in anchors:
            raise DataError(f"{head!r} is not a kind of anchor")
        anchors[kind].append(text[start:end])
    reasoning = tuple(text[start:end] for start, end in rendered.reasoning)
    return Strategy(reasoning, **{name: tuple(values) for name, values in anchors.items()})


def abstention_of(rendered: Rendered) -> bool:
    """Whether the prompt says what to answer where the conversation does not tell; only direct questions' may."""
    return NO_INFORMATION in rendered.text[: rendered.dialogue[0]]


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
    state = FactualState(dialogue, question, segments, strategy_of(record.x0), abstention_of(record.x0), told)
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
    start = x2.find(head, strategy_end(record.x2))
    end = start + len(x2) - len(x1)
    if start < 0 or x2[:start] + x2[end:] != x1:
        what = "x2 is not x1 with a summary: the prompt templates have changed since; build the states again"
        raise DataError(what, record=record.question_id)
    return x2[start + len(head) : end].removesuffix("\n")
