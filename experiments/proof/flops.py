"""What a run costs: floating-point operations counted from the tokens that each level really runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remind.alignment.config import Objective
from remind.alignment.examples import Example
from remind.alignment.step import Pass, common_prefix, head_of

_FORWARD, _BACKWARD = 2, 4


@dataclass(frozen=True)
class Size:
    """Parameters that multiply.

    Attributes:
        body: of the language model, without its embedding; each once per token.
        head: each once per answer position.
    """

    body: int
    head: int

    def forward(self, tokens: int, answer: int) -> float:
        """Operations of one forward pass; those of attention between tokens and of padding are left out."""
        return float(_FORWARD * (tokens * self.body + answer * self.head))

    def backward(self, tokens: int, answer: int) -> float:
        return float(_BACKWARD * (tokens * self.body + answer * self.head))


def size_of(model: Any) -> Size:
    """The size of a language model, as it is trained."""
    embedding = model.get_input_embeddings().weight
    body = sum(parameter.numel() for parameter in model.get_decoder().parameters() if parameter is not embedding)
    return Size(body, head_of(model).weight.numel())


def step_cost(examples: Sequence[Example], objective: Objective, passes: Sequence[Pass], size: Size) -> float:
    """Operations of one optimiser step over `examples`; teachers that are running averages are run in each step."""
    total = 0.0
    for example in examples:
        answer = len(example.answer)
        common = common_prefix(example.prompts[1], example.prompts[2])
        for step in passes:
            for level in step.levels:
                tokens = example.tokens_under([level]) - (common if step.shared and level == 2 else 0)
                total += size.forward(tokens, answer)
                if step.backward and level in objective.trained:
                    total += size.backward(tokens, answer)
        if objective.teacher_model_kind == "ema":
            tokens = example.tokens_under(objective.taught)
            both = {1, 2} <= objective.taught and any(step.shared for step in passes)
            total += size.forward(tokens - common * both, answer * len(objective.taught))
    return total


def fixed_cost(examples: Sequence[Example], objective: Objective, size: Size) -> float:
    """Operations before the first step: targets of the base model, and answers decoded under x2 where there are none.

    Both count in full, although runs may share what they leave on disk.
    """
    total = 0.0
    for example in examples:
        answer = len(example.answer)
        if objective.teacher_model_kind == "base":
            total += size.forward(example.tokens_under(objective.taught), answer * len(objective.taught))
        if not example.labelled:
            total += size.forward(example.tokens_under([2]), answer)
    return total
