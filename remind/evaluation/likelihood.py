"""How probable the gold answer is under a state: what there is to distil, and what training made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remind.alignment.examples import example_of
from remind.models.backbone import Backbone, modality
from remind.models.chat import tokenize
from remind.models.images import Pictures
from remind.states.pyramid import LEVELS


class AnswerScore(NamedTuple):
    """What a model makes of the gold answer of a question under one of its states."""

    right: float
    """1 if every token between the answer tags is the most probable one, else 0."""
    log_probability: float
    """Mean over these tokens, in nats."""


@torch.no_grad()
def score_answer(
    backbone: Backbone, prompt: Tensor, answer: Tensor, target: str, images: Mapping[str, Tensor] | None = None
) -> AnswerScore:
    """Read a prompt and its gold answer, and score the answer's tokens between the tags.

    Args:
        prompt, answer: token ids; of the answer with its end token.
        target: the answer as text, without the end token.
        images: pixel values of the images in the prompt.
    """
    inputs = {"input_ids": torch.cat([prompt, answer[:-1]]).long()[None], **(images or {})}
    inputs = {name: value.to(backbone.device) for name, value in inputs.items()}
    if images and (kinds := modality(backbone.model, inputs["input_ids"])) is not None:
        inputs["mm_token_type_ids"] = kinds
    places = backbone.position_ids(inputs)
    logits = backbone.model(**inputs, position_ids=places, logits_to_keep=len(answer), use_cache=False).logits[0]
    # tokens that share a character with what stands between the tags; the end token does not
    start, end = target.find("<answer>") + len("<answer>"), target.find("</answer>")
    offsets = tokenize(backbone.tokenizer, target).offsets
    inside_tags = torch.tensor([*(first < end and last > start for first, last in offsets), False])
    logits, gold = logits.cpu().float()[inside_tags], answer[inside_tags].long()
    chances = logits.log_softmax(-1).gather(-1, gold[:, None])
    return AnswerScore(float((logits.argmax(-1) == gold).all()), float(chances.mean()))


def log_probability(backbone: Backbone, record: Any, level: str, shown: Pictures | None = None) -> float:
    """log p of a question's gold answer under a state, in nats a token.

    Args:
        record: a `StateRecord` with a target.
        shown: shows images as pixels; None: by their captions.
    """
    example = example_of(backbone.tokenizer, record, shown)
    prompt = example.prompts[LEVELS.index(level)]
    return score_answer(backbone, prompt, example.answer, record.target, example.pixels()).log_probability
