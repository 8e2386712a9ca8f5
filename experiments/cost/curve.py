"""Operations and calls of a question, by the way it is answered and the length of the history."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from experiments.cost.config import InferenceCostConfig
from experiments.cost.flops import Encoder, Shape
from remind.core.errors import ConfigError

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
        retrieved = min(math.ceil(round(cfg.top_share * history, 6)), cfg.max_context_tokens)
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
