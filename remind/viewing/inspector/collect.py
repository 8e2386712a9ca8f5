"""All that a page tells of one question, gathered in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from remind.data.dialogue import Dialogue, Question
from remind.evaluation.parse import ParsedAnswer, parse_answer
from remind.evaluation.rebuild import blocks_of, factual_of
from remind.grounding import Grounder, GroundingTrace
from remind.models.generate import Generation
from remind.states.parquet import StateRecord
from remind.states.pyramid import LEVELS, FactualState, Rendered, Span, render


@dataclass(frozen=True)
class LevelAnswer:
    """What a model said under one state; `right`: None where only a judge could tell."""

    output: Generation
    parsed: ParsedAnswer | None
    right: bool | None


@dataclass(frozen=True)
class Inspection:
    """One question, its grounding, and its states.

    Attributes:
        trace: grounding, computed now.
        levels: the rendered states by name, those there are.
        blocks: inclusive ranges over the shown turns that x1 marks; those of the states where they were built before.
        split: of the question, where known.
        salience: what the states say of each turn; empty where they say nothing.
        model: who answered; None: nobody. answers: by level.
    """

    trace: GroundingTrace
    levels: Mapping[str, Rendered]
    blocks: tuple[Span, ...]
    split: str | None = None
    salience: tuple[float, ...] = ()
    model: str | None = None
    answers: Mapping[str, LevelAnswer] = field(default_factory=dict)

    @property
    def state(self) -> FactualState:
        return self.trace.state.factual

    @property
    def question(self) -> Question:
        return self.state.question

    @property
    def marked(self) -> frozenset[int]:
        """Indices of the shown turns inside blocks."""
        return frozenset(turn for start, end in self.blocks for turn in range(start, end + 1))

    @property
    def gold(self) -> frozenset[int]:
        """Indices of the shown turns that are gold evidence, or that show a gold image."""
        question = self.question
        images = set(question.images) if question.visual else set()
        return frozenset(
            n
            for n, turn in enumerate(self.state.turns)
            if turn.id in question.evidence or any(image.index in images for image in turn.images)
        )

    @property
    def wanted(self) -> tuple[str, ...]:
        """Ids of all turns of the dialogue that are gold, shown or not, in time order."""
        question, images = self.question, set(self.question.images) if self.question.visual else set()
        return tuple(
            turn.id
            for turn in self.state.dialogue.turns
            if turn.id in question.evidence or any(image.index in images for image in turn.images)
        )

    @property
    def notices(self) -> tuple[str, ...]:
        """What a reader must know of the numbers."""
        found = []
        now = self.trace.state
        if self.blocks != now.blocks:
            inside = {turn for start, end in now.blocks for turn in range(start, end + 1)}
            found.append(
                f"The outlined blocks are those of the states; with the settings of this page grounding would mark "
                f"{len(inside)} turns, not {len(self.marked)}, and {len(inside ^ self.marked)} of them differ."
            )
        if self.salience and not _close(self.salience, now.salience):
            found.append(
                "The salience shown was computed for this page and is not that of the states: SAEs, backbone or "
                "settings are others than those they were built with."
            )
        return tuple(found)


def _close(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Equal up to the rounding of another batch or machine."""
    finite = [value for value in second if abs(value) != float("inf")]
    scale = max((abs(value) for value in finite), default=0.0) or 1.0
    return len(first) == len(second) and all(
        a == b or abs(a - b) <= 1e-3 * scale for a, b in zip(first, second, strict=True)
    )


def inspect_record(grounder: Grounder, record: StateRecord, dialogue: Dialogue, question: Question) -> Inspection:
    """A question of a states folder.

    Args:
        dialogue, question: what the record is about, as the corpus has them.

    Raises:
        DataError: they are not what the states were built from. ModelError: as `Grounder.trace`.
    """
    trace = grounder.trace(factual_of(record, dialogue, question))
    levels = {name: record.level(name) for name in LEVELS}
    return Inspection(trace, levels, blocks_of(record.x1), record.split, record.salience)


def inspect_state(grounder: Grounder, state: FactualState) -> Inspection:
    """A factual state that has not been written anywhere; x2 is not there, for nobody has reflected.

    Raises:
        ModelError: as `Grounder.trace`.
    """
    trace = grounder.trace(state)
    return Inspection(trace, {"x0": render(state), "x1": render(trace.state)}, trace.state.blocks, state.question.split)


def level_answers(question: Question, outputs: Mapping[str, Generation]) -> dict[str, LevelAnswer]:
    """Outputs read and, where options settle it, held against the gold answer.

    Args:
        outputs: by level.
    """
    found = {}
    for level, output in outputs.items():
        if output.failure is not None:
            found[level] = LevelAnswer(output, None, None)
            continue
        parsed = parse_answer(output.text, question.format, question.options, question.visual)
        settled = question.format != "direct" and question.answers
        found[level] = LevelAnswer(output, parsed, parsed.letters == set(question.answers) if settled else None)
    return found
