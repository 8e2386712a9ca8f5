"""How probable the gold answer is under a state: what there is to distil, and what training made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remind.alignment.examples import example_of
from remind.core.errors import DataError
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
        prompt: token ids [P].
        answer: token ids [L], the end token included.
        target: the answer as text, without the end token.
        images: pixel_values and image_grid_thw of the images in the prompt.
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


def log_probabilities(
    backbone: Backbone, record: Any, levels: Sequence[str], shown: Pictures | None = None
) -> list[float]:
    """log p of a question's gold answer under some of its states, in nats a token.

    Args:
        record: a `StateRecord` with a target.
        shown: shows images as pixels; None: by their captions.

    Raises:
        DataError: more tokens than the model takes.
    """
    example = example_of(backbone.tokenizer, record, shown)
    if example.longest > backbone.max_length:
        what = f"{example.longest} tokens, but {backbone.name} takes {backbone.max_length}; build shorter states"
        raise DataError(what, record=record.question_id)
    prompts, images = (example.prompts[LEVELS.index(level)] for level in levels), example.pixels()
    return [score_answer(backbone, one, example.answer, record.target, images).log_probability for one in prompts]
