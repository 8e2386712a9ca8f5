"""How probable the gold answer is under a state: what there is to distil, and what training made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from remind.alignment.examples import example_of
from remind.alignment.step import common_prefix
from remind.core.errors import DataError
from remind.models.attention import attends_alone
from remind.models.backbone import Backbone, inner_model, modality
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
    backbone: Backbone,
    prompt: Tensor,
    answer: Tensor,
    target: str,
    images: Mapping[str, Tensor] | None = None,
    past: Any = None,
) -> AnswerScore:
    """Read a prompt and its gold answer, and score the answer's tokens between the tags.

    Args:
        prompt: token ids [P].
        answer: token ids [L], the end token included.
        target: the answer as text, without the end token; all of it counts where it has no answer tags.
        images: pixel_values and image_grid_thw of the images in the prompt.
        past: the model's cache of what stands before the prompt; it grows by what is read.
    """
    inputs = {"input_ids": torch.cat([prompt, answer[:-1]]).long()[None], **(images or {})}
    inputs = {name: value.to(backbone.device) for name, value in inputs.items()}
    if images and (kinds := modality(backbone.model, inputs["input_ids"])) is not None:
        inputs["mm_token_type_ids"] = kinds
    places = backbone.position_ids(inputs)
    if past is not None:
        places, inputs["past_key_values"] = places + past.get_seq_length(), past
    reading = {"position_ids": places, "logits_to_keep": len(answer), "use_cache": past is not None}
    logits = backbone.model(**inputs, **reading).logits[0]
    # tokens that share a character with what stands between the tags; the end token does not
    tagged = re.search(r"<answer>(.*?)</answer>", target, re.DOTALL)
    start, end = tagged.span(1) if tagged else (0, len(target))
    offsets = tokenize(backbone.tokenizer, target).offsets
    inside_tags = torch.tensor([*(first < end and last > start for first, last in offsets), False])
    logits, gold = logits.cpu().float()[inside_tags], answer[inside_tags].long()
    chances = logits.log_softmax(-1).gather(-1, gold[:, None])
    return AnswerScore(float((logits.argmax(-1) == gold).all()), float(chances.mean()))


@torch.no_grad()
def log_probabilities(
    backbone: Backbone, states: Sequence[tuple[Any, str]], shown: Pictures | None = None
) -> list[float]:
    """log p of a question's gold answer under some of its states, in nats a token.

    What a prompt and the one before it begin with alike, mostly the dialogue, is read once, if attention alone carries
    it on and there are no images.

    Args:
        states: `StateRecord`s of the question, with their target, and the level of each.
        shown: shows images as pixels; None: by their captions.

    Raises:
        DataError: more tokens than the model takes.
    """
    record, prompts = states[0][0], []
    for one, level in states:
        example = example_of(backbone.tokenizer, one, shown)
        if example.longest > backbone.max_length:
            what = f"{example.longest} tokens, but {backbone.name} takes {backbone.max_length}; build shorter states"
            raise DataError(what, record=one.question_id)
        prompts.append(example.prompts[LEVELS.index(level)])
    images, found = example.pixels(), []
    alone = not images and attends_alone(inner_model(backbone.model).get_decoder(), "each prompt is read whole")
    past, read = DynamicCache() if alone else None, prompts[0][:0]
    for prompt in prompts:
        common = 0
        if past is not None:
            common = common_prefix(read, prompt)
            past.crop(common - len(read))
            read = torch.cat([prompt, example.answer[:-1]])
        score = score_answer(backbone, prompt[common:], example.answer, record.target, images, past)
        found.append(score.log_probability)
    return found
