"""What a page shows of one question: its grounding, states and answers, and the features of its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from remind.data.dialogue import Dialogue, Question
from remind.evaluation.parse import ParsedAnswer, parse_answer
from remind.grounding import Grounder, GroundingTrace
from remind.models.generate import Generation
from remind.states.pyramid import LEVELS, FactualState, Rendered, Span
from remind.states.records import FACTUAL, StateRecord, blocks_of, factual_of
from remind.viewing.pages import gold_turns, marked_turns
from sae.pages import digits

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
#: Tokens shown to the left and to the right of an example's peak.
CONTEXT = 7


@dataclass(frozen=True)
class LevelAnswer:
    """What a model answered from one state.

    `correct` is None where only a judge could tell; `parsed` is None where generation failed.
    """

    output: Generation
    parsed: ParsedAnswer | None
    correct: bool | None


@dataclass(frozen=True)
class Inspection:
    """One question, its grounding, and its states.

    Attributes:
        trace: grounding, computed for this page.
        levels: the rendered states by name, as far as they exist.
        blocks: inclusive ranges over the retrieved turns that x1 marks; from the record where there is one.
        split: of the question, where known.
        salience: of each turn as the record has it; empty where it has none.
        model: name of the model that answered, or None. answers: by level.
        pixels: whether grounding was shown images as pixels; the page then shows them, too.
    """

    trace: GroundingTrace
    levels: Mapping[str, Rendered]
    blocks: tuple[Span, ...]
    split: str | None = None
    salience: tuple[float, ...] = ()
    model: str | None = None
    answers: Mapping[str, LevelAnswer] = field(default_factory=dict)
    pixels: bool = False

    @property
    def state(self) -> FactualState:
        return self.trace.state.factual

    @property
    def question(self) -> Question:
        return self.state.question

    @property
    def kind(self) -> str | None:
        """The inferred kind of the question, if it was inferred."""
        return None if self.state.told is None else self.state.told.dimension or FACTUAL

    @property
    def marked(self) -> frozenset[int]:
        """Indices of the retrieved turns inside blocks."""
        return marked_turns(self.blocks)

    @property
    def gold(self) -> frozenset[int]:
        """Indices of the retrieved turns that are gold evidence."""
        return frozenset(gold_turns(self.question, self.state.turns))

    @property
    def gold_positions(self) -> tuple[int, ...]:
        """Positions in the dialogue of all gold evidence turns, retrieved or not."""
        return gold_turns(self.question, self.state.dialogue.turns)

    @property
    def notices(self) -> tuple[str, ...]:
        """Differences between the states and this page's grounding that a reader must know of."""
        notices = []
        computed = self.trace.state
        if self.blocks != computed.blocks:
            marked = marked_turns(computed.blocks)
            notices.append(
                f"The outlined blocks are those of the states; with the settings of this page grounding would mark "
                f"{len(marked)} turns, not {len(self.marked)}, and {len(marked ^ self.marked)} of them differ."
            )
        if self.salience and not _close(self.salience, computed.salience):
            notices.append(
                "The salience shown was computed for this page and differs from that of the states: they were built "
                "with other SAEs, another backbone or other settings."
            )
        return tuple(notices)


def _close(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Equal up to the rounding of another batch or machine."""
    scale = max((abs(value) for value in second if math.isfinite(value)), default=0.0) or 1.0
    return len(first) == len(second) and np.allclose(first, second, rtol=0, atol=1e-3 * scale)


def inspect_record(grounder: Grounder, record: StateRecord, dialogue: Dialogue, question: Question) -> Inspection:
    """Inspect a question of a states folder.

    Args:
        dialogue, question: those of the record, from the corpus.

    Raises:
        DataError: the states were built from others. ModelError: as `Grounder.trace`.
    """
    trace = grounder.trace(factual_of(record, dialogue, question))
    levels = {name: record.level(name) for name in LEVELS}
    pixels = grounder.pictures is not None
    return Inspection(trace, levels, blocks_of(record.x1), record.split, record.salience, pixels=pixels)


def level_answers(question: Question, outputs: Mapping[str, Generation]) -> dict[str, LevelAnswer]:
    """Parse outputs, and compare them with the gold answer where options allow it.

    Args:
        outputs: by level.
    """
    answers = {}
    for level, output in outputs.items():
        parsed, correct = None, None
        if output.failure is None:
            parsed = parse_answer(output.text, question.format, question.options, question.visual)
            if question.format != "direct" and question.answers:
                correct = parsed.letters == set(question.answers)
        answers[level] = LevelAnswer(output, parsed, correct)
    return answers


def features_per_token(values: Array, indices: Array, shares: Array, width: int) -> tuple[Array, Array]:
    """Choose the features shown of each token.

    Half of them are those that add most to its resonance, the rest those with the largest activations besides.

    Args:
        values, indices: sparse codes, [T, k]. shares: v[j] h̃_t[j], what each adds to the local alignment (Eq. 4).
        width: features per token.

    Returns:
        Features [T, width], -1 where fewer are active, and their activations [T, width].
    """
    by_share = np.lexsort((indices, -values, -shares), axis=-1)
    values, indices, shares = (np.take_along_axis(rows, by_share, -1) for rows in (values, indices, shares))
    rank = np.arange(values.shape[-1])
    carrying = (rank < (width + 1) // 2) & (shares > 0)
    order = np.lexsort((indices, -values, np.where(carrying, rank, len(rank))), axis=-1)[:, :width]
    values, indices = np.take_along_axis(values, order, -1), np.take_along_axis(indices, order, -1)
    return np.where(values > 0, indices, -1), values


def dialogue_examples(
    values: Array, indices: Array, turn: Array, features: Array, most: int
) -> tuple[list[list[tuple[int, str]]], list[int]]:
    """The tokens of the dialogue on which features fire most strongly, at most one per turn.

    Args:
        values, indices: sparse codes, [T, k]. turn: turn of each token, [T], ascending.
        features: those wanted. most: examples of each.

    Returns:
        For each feature its examples by falling activation (ties: the earlier token first), and the number of tokens
        it fires on. An example is its peak token and a string of digits, the activations from `CONTEXT` tokens before
        the peak to `CONTEXT` after it inside its turn, relative to the feature's largest.
    """
    token, place = np.nonzero(values > 0)
    feature, value = indices[token, place], values[token, place]
    by_feature = np.argsort(feature, kind="stable")
    starts = np.searchsorted(feature[by_feature], features)
    ends = np.searchsorted(feature[by_feature], features, side="right")
    examples, fired = [], []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        tokens, heights = token[by_feature[start:end]], value[by_feature[start:end]]
        activation = dict(zip(tokens.tolist(), heights.tolist(), strict=True))
        falling = tokens[np.argsort(-heights, kind="stable")]
        _, first = np.unique(turn[falling], return_index=True)
        rows = []
        for peak in falling[np.sort(first)[:most]].tolist():
            near = range(max(0, peak - CONTEXT), min(len(turn), peak + CONTEXT + 1))
            around = [activation.get(t, 0.0) for t in near if turn[t] == turn[peak]]
            rows.append((peak, digits(around, float(heights.max()))))
        examples.append(rows)
        fired.append(end - start)
    return examples, fired
