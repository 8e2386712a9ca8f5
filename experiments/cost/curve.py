"""Operations and calls of a question, by the way it is answered and the length of the history."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from experiments.cost.flops import Encoder, Shape
from remind.core.errors import ConfigError
from sae.ranges import NonNegativeInt, PositiveInt, PositiveShare, check_ranges


@dataclass
class TokenSizes:
    """Lengths in tokens of everything but the history. Those of segments, turns and cues are about LoCoMo's."""

    instructions: PositiveInt = 140
    """Instructions of the answer prompt."""
    question: PositiveInt = 80
    """Question with its options and the turn's end in the answer prompt."""
    query: PositiveInt = 16
    """Question as the text encoder reads it, its special tokens included."""
    strategy_request: PositiveInt = 480
    """Prompt of the strategy call without the question; the dialogue is no part of it."""
    strategy: PositiveInt = 200
    """The strategy: what the call writes, and what stands in x0."""
    segment: PositiveInt = 85
    """Mean length of a segment."""
    turn: PositiveInt = 40
    """Mean length of a turn."""
    cue_request: PositiveInt = 320
    """Prompt of a cue call without the segment."""
    cue: PositiveInt = 75
    """Mean length of a cue."""
    markers: PositiveInt = 130
    """What x1 has beyond x0: markers and their reminder."""
    summary_request: PositiveInt = 440
    """Prompt of the summary call without x1."""
    summary: PositiveInt = 300
    """The summary: what the call writes, and what stands in x2."""
    answer: PositiveInt = 150
    """The reply: answer, quoted evidence and end token."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class InferenceCostConfig:
    """Operations and LLM calls per question against the length of the history; no weights are loaded."""

    out: str
    """Folder for results.json, table.md and inference_cost.png; those of an earlier run are replaced."""
    model: str = "qwen3-vl-8b"
    """Model that answers: qwen3-vl-8b, qwen3-vl-2b, nano, or a Hugging Face folder (only its config.json is read)."""
    auxiliary: str | None = "qwen3-vl-8b"
    """Model whose shape the auxiliary LLM is charged with; None: its calls are counted, their operations are not."""
    lengths: tuple[PositiveInt, ...] = tuple(2**power for power in range(14, 22))
    """Tokens of the history; ascending."""
    top_share: PositiveShare = 0.2
    """Share of the history that retrieval keeps."""
    max_context_tokens: PositiveInt | None = 7200
    """Cap on the retrieved tokens in x0. A fifth of RefMem-Bench's average history; None: none, as in the paper."""
    questions: tuple[PositiveInt, ...] = (1, 100)
    """Over how many questions about the dialogue one index, or one prefill of the whole history, is spread."""
    dimensions: PositiveInt = 8
    """Kinds of question the index holds cues for: one call for each segment and kind."""
    sae_layers: tuple[NonNegativeInt, ...] = (7, 14, 22, 29)
    """Hidden states the SAEs of x1 read; the forward for them stops after the last."""
    d_sae: PositiveInt = 4096
    """Features of an SAE."""
    sizes: TokenSizes = field(default_factory=TokenSizes)
    """Lengths of everything but the history."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        self.lengths, self.questions = tuple(self.lengths), tuple(self.questions)
        self.sae_layers = tuple(self.sae_layers)
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(f"lengths must be ascending numbers, not {list(self.lengths)}")
        if not self.sae_layers:
            raise ConfigError("sae_layers must name one hidden state or more")
        if len(set(self.questions)) < len(self.questions):
            raise ConfigError(f"questions names a number twice: {list(self.questions)}")


#: full: the whole history in one prompt. x0: retrieval and strategy, what a distilled model answers from. x1, x2: the
#: higher states built for the question at inference, which is what distillation saves.
Kind = Literal["full", "x0", "x1", "x2"]
#: Points of the search for a crossover, and the shortest history it looks at.
_GRID, SHORTEST = 400, 64


@dataclass(frozen=True)
class Way:
    """How a question is answered.

    Attributes:
        kind: from which prompt.
        questions: what is done once per dialogue (x0: the index; full: the prefill of the history, whose keys and
            values are kept) is spread over so many questions. None: the index is there and not charged; the history is
            read anew for every question.
    """

    kind: Kind
    questions: int | None = None

    @property
    def name(self) -> str:
        return self.kind if self.questions is None else f"{self.kind}/{self.questions}"

    @property
    def title(self) -> str:
        if self.kind == "full":
            return "whole history" + (f", read once for {self.questions} questions" if self.questions else "")
        if self.questions:
            return f"{self.kind} and its index, built for {self.questions} question" + "s" * (self.questions > 1)
        return {"x0": "x0, its index there", "x1": "x1 built at inference", "x2": "x2 built at inference"}[self.kind]


def ways(questions: tuple[int, ...]) -> list[Way]:
    """What is compared; a history read once for one question is the plain one."""
    full = [Way("full"), *(Way("full", number) for number in questions if number > 1)]
    return [*full, *(Way("x0", number) for number in (None, *questions)), Way("x1"), Way("x2")]


class Inference:
    """The cost of one question.

    Args:
        cfg: lengths of the parts, and what is retrieved.
        answering: shape of the model that answers.
        auxiliary: shape of the LLM that writes cues, strategy and summary; None: its operations count nothing.
        encoder: φ of Eq. 1.

    Raises:
        ConfigError: an SAE for a layer the model has not.
    """

    def __init__(self, cfg: InferenceCostConfig, answering: Shape, auxiliary: Shape | None, encoder: Encoder) -> None:
        if max(cfg.sae_layers) > answering.layers:
            raise ConfigError(f"sae_layers {list(cfg.sae_layers)}: {cfg.model} has layers 0 to {answering.layers}")
        self.cfg, self.answering, self.auxiliary, self.encoder = cfg, answering, auxiliary, encoder

    def segments(self, history: int) -> int:
        """Segments of a history of so many tokens."""
        return math.ceil(history / self.cfg.sizes.segment)

    def prompt(self, kind: Kind, history: int) -> int:
        """Tokens of the answer prompt."""
        cfg, sizes = self.cfg, self.cfg.sizes
        frame = sizes.instructions + sizes.question
        if kind == "full":
            return frame + history
        retrieved = min(math.ceil(round(cfg.top_share * history, 6)), cfg.max_context_tokens or history)
        above = {"x0": 0, "x1": sizes.markers, "x2": sizes.markers + sizes.summary}[kind]
        return frame + retrieved + sizes.strategy + above

    def parts(self, way: Way, history: int) -> dict[str, float]:
        """Operations of a question by what they are spent on.

        read: prefill of the answer prompt. answer: decoding. retrieval: φ(q) and its cosines with the cues. strategy,
        summary: calls of the auxiliary LLM. grounding: the forward of x0 down to the last SAE, and the SAEs' encoders.
        index: cue calls, and φ of turns and cues.
        """
        sizes, model = self.cfg.sizes, self.answering
        prompt = self.prompt(way.kind, history)
        answer = model.decode(prompt, sizes.answer)
        if way.kind == "full":
            if way.questions is None:
                return {"read": model.prefill(prompt), "answer": answer}
            before = prompt - sizes.question
            read = model.blocks(before, model.layers) / way.questions
            return {"read": read + model.prefill(sizes.question, before), "answer": answer}
        parts: dict[str, float] = {
            "retrieval": self._retrieval(history),
            "strategy": self._call(sizes.strategy_request + sizes.question, sizes.strategy),
            "read": model.prefill(prompt),
            "answer": answer,
        }
        if way.kind != "x0":
            parts["grounding"] = self._grounding(self.prompt("x0", history))
        if way.kind == "x2":
            parts["summary"] = self._call(sizes.summary_request + self.prompt("x1", history), sizes.summary)
        if way.questions is not None:
            parts["index"] = self.index(history) / way.questions
        return parts

    def total(self, way: Way, history: int) -> float:
        """Operations of a question."""
        return sum(self.parts(way, history).values())

    def calls(self, way: Way, history: int) -> dict[str, float]:
        """LLM calls of a question: of the auxiliary LLM, and of the model that answers."""
        auxiliary = float({"full": 0, "x0": 1, "x1": 1, "x2": 2}[way.kind])
        if way.kind != "full" and way.questions is not None:
            auxiliary += self.cfg.dimensions * self.segments(history) / way.questions
        return {"auxiliary": auxiliary, "answer": 1.0}

    def index(self, history: int) -> int:
        """Operations of a dialogue's index: a cue for each segment and kind of question, φ of every turn and cue."""
        sizes = self.cfg.sizes
        cues = self.cfg.dimensions * self.segments(history)
        written = cues * self._call(sizes.cue_request + sizes.segment, sizes.cue)
        turns = math.ceil(history / sizes.turn) * self.encoder.operations(sizes.turn + 2)
        return written + turns + cues * self.encoder.operations(sizes.cue + 2)

    def _retrieval(self, history: int) -> int:
        # products with the cues, and the cues' norms
        return self.encoder.operations(self.cfg.sizes.query) + 4 * self.encoder.width * self.segments(history)

    def _grounding(self, tokens: int) -> int:
        encoders = 2 * self.answering.width * self.cfg.d_sae * len(self.cfg.sae_layers)
        return self.answering.blocks(tokens, max(self.cfg.sae_layers)) + tokens * encoders

    def _call(self, prompt: int, reply: int) -> int:
        return 0 if self.auxiliary is None else self.auxiliary.reply(prompt, reply)


def crossover(dearer: Callable[[int], float], cheaper: Callable[[int], float], longest: int) -> int | None:
    """The history from which on `dearer` costs at least as much as `cheaper`, up to `longest`; None: not by then.

    Histories under 64 tokens are not looked at: where it holds throughout, 64 is what comes back.
    """
    grid = sorted({round(SHORTEST * (longest / SHORTEST) ** (step / _GRID)) for step in range(_GRID + 1)})
    below = [length for length in grid if dearer(length) < cheaper(length)]
    if not below:
        return grid[0]
    if below[-1] == grid[-1]:
        return None
    low, high = below[-1], grid[grid.index(below[-1]) + 1]
    while high - low > 1:
        middle = (low + high) // 2
        if dearer(middle) < cheaper(middle):
            low = middle
        else:
            high = middle
    return high
