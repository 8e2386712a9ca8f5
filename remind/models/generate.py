"""Answers for a list of prompts: left padding, explicit attention mask, batches of similar length."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from remind.core.errors import ModelError, brief
from remind.core.processes import WHOLE, Shard
from remind.models.backbone import inner_model, modality
from remind.models.chat import Content, end_token_id, paths_of
from remind.models.images import Pictures, ids_of
from remind.text.thoughts import MARKS

if TYPE_CHECKING:
    from remind.models.backbone import Backbone

#: too_long: prompt and answer exceed the model's context. error: the forward failed. server: no reply after all
#: retries. refused: the server declines to answer. invalid: an unusable reply. unasked: there is no model.
Failure = Literal["too_long", "error", "server", "refused", "invalid", "unasked"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One output.

    Attributes:
        text: without the end token; "" on failure.
        prompt_tokens, new_tokens: lengths without the end token.
        finished: whether an end token came within `max_new_tokens`.
        failure: why there is no output, or None.
        message: the failure in words.
    """

    text: str
    prompt_tokens: int
    new_tokens: int = 0
    finished: bool = False
    failure: Failure | None = None
    message: str = ""


def batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in batches of similar length, longest first, so that memory runs out at the start or not at all."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def check_generates(backbone: Backbone) -> None:
    """Raise ModelError for a model that cannot generate text."""
    if not backbone.causal or not hasattr(backbone.model, "generate"):
        raise ModelError(f"{backbone.name} ({backbone.kind}) cannot generate answers; name a causal model")


def generate(
    backbone: Backbone,
    prompts: Sequence[Content],
    max_new_tokens: int,
    batch_size: int = 8,
    done: Sequence[bool] | None = None,
    on_output: Callable[[int, Generation], None] | None = None,
    shard: Shard = WHOLE,
    pictures: Pictures | None = None,
) -> list[Generation | None]:
    """Greedy answers (temperature 0) to prompts.

    Batches are formed over all prompts, including those that are done, so that a resumed run has the same batches as an
    uninterrupted one, and several processes the same as one. The prompts of a batch that fails are tried again one by
    one.

    Args:
        prompts: user messages, without the chat template.
        done: which prompts are skipped; their result is None.
        shard: which of the batches with prompts that are not done this process takes; the results of others are None.
        on_output: called with index and output as each becomes known.
        pictures: of this backbone; for prompts with images.

    Raises:
        ModelError: a model that does not generate, or prompts with images and no `pictures`.
        ImagePathError: an image that cannot be used.
    """
    check_generates(backbone)
    skip = [False] * len(prompts) if done is None else list(done)
    if all(skip):
        return [None] * len(prompts)
    # arrays: lists of integers take nine times the memory, and a split may have 10^8 tokens
    rows = [array("i", ids_of(backbone.tokenizer, prompt, pictures)) for prompt in prompts]
    outputs: list[Generation | None] = [None] * len(prompts)

    def put(index: int, output: Generation) -> None:
        outputs[index] = output
        if on_output is not None:
            on_output(index, output)

    fitting = []
    for index, row in enumerate(rows):
        refused = too_long(len(row), max_new_tokens, backbone.max_length)
        if refused is None:
            fitting.append(index)
        elif not skip[index] and shard.index == 0:
            put(index, refused)
    settings = decoding(backbone, max_new_tokens)
    groups = [[fitting[p] for p in group] for group in batches([len(rows[index]) for index in fitting], batch_size)]
    pending = [members for members in groups if not all(skip[index] for index in members)]
    for number, members in enumerate(pending):
        if not shard.holds(number):
            continue
        found = _run(backbone, [(rows[index], prompts[index]) for index in members], settings, pictures)
        for index, output in zip(members, found, strict=True):
            if not skip[index]:
                put(index, output)
    return outputs


def too_long(prompt_tokens: int, max_new_tokens: int, limit: int) -> Generation | None:
    """The output of a prompt that leaves too little of `limit` tokens for its answer; None for one that fits."""
    if prompt_tokens + max_new_tokens <= limit:
        return None
    message = f"{prompt_tokens} + {max_new_tokens} tokens exceed the model's {limit}"
    return Generation("", prompt_tokens, failure="too_long", message=message)


def decoding(backbone: Backbone, max_new_tokens: int, temperature: float = 0.0) -> Any:
    """Settings of `continue_rows`: plain greedy search, or samples of the whole distribution at a temperature above 0.

    Of the model's generation_config only what the model needs is kept.
    """
    from transformers import GenerationConfig

    own = getattr(backbone.model, "generation_config", None)
    stops, padding = end_tokens(backbone.tokenizer, own), backbone.tokenizer.pad_token_id
    return GenerationConfig(
        **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}),
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=stops[0] if padding is None else padding,
        **{name: getattr(own, name, None) for name in ("bos_token_id", "decoder_start_token_id")},
        cache_implementation=getattr(own, "cache_implementation", None),
    )


def end_tokens(tokenizer: Any, own: Any) -> list[int]:
    """Ids of the tokens that end an answer: of the chat, of the tokenizer, and of the model's generation_config."""
    ends = [end_token_id(tokenizer), tokenizer.eos_token_id, getattr(own, "eos_token_id", None)]
    return sorted({t for end in ends for t in (end if isinstance(end, list | tuple) else [end]) if t is not None})


def text_of(tokenizer: Any, new: Sequence[int]) -> str:
    """The text of an answer's tokens without special ones, but for those that mark thoughts."""
    added = tokenizer.added_tokens_decoder
    said = [token for token in new if token not in added or not added[token].special or added[token].content in MARKS]
    return str(tokenizer.decode(said, clean_up_tokenization_spaces=False))


def until_end(new: Sequence[int], stops: Sequence[int]) -> list[int]:
    """An answer's tokens before the first that ends it."""
    return list(takewhile(lambda token: token not in stops, new))


def _run(
    backbone: Backbone, asked: list[tuple[array[int], Content]], settings: Any, pictures: Pictures | None
) -> list[Generation]:
    """Answers to prompts, of which the tokens are known."""
    rows, files = [ids for ids, _ in asked], [path for _, prompt in asked for path in paths_of(prompt)]
    images = pictures.tensors(files) if pictures is not None and files else None
    try:
        found = continue_rows(backbone.model, rows, settings, images)
        return [
            Generation(text_of(backbone.tokenizer, new), len(row), len(new), finished)
            for row, (new, finished) in zip(rows, found, strict=True)
        ]
    except (RuntimeError, IndexError) as error:  # out of memory is a RuntimeError
        if len(rows) == 1:
            return [Generation("", len(rows[0]), failure="error", message=brief(error))]
    # outside the handler, since the error holds the tensors of the failed forward
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [output for one in asked for output in _run(backbone, [one], settings, pictures)]


@torch.no_grad()
def continue_rows(
    model: Any, rows: Sequence[Sequence[int]], settings: Any, images: Mapping[str, Tensor] | None = None
) -> list[tuple[list[int], bool]]:
    """What the model writes after each row of token ids, all in one batch with a key-value cache.

    Args:
        settings: of `decoding`. Samples are drawn from torch's global generator.
        images: pixel_values and image_grid_thw of the images of all rows in order.

    Returns:
        For each row its new tokens without the end token, and whether an end token came.
    """
    given = [torch.tensor(row, dtype=torch.long) for row in rows]
    input_ids = pad_sequence(given, True, settings.pad_token_id, padding_side="left")
    attention_mask = pad_sequence(list(map(torch.ones_like, given)), True, padding_side="left")
    device = next(model.parameters()).device
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **(images or {})}
    if images is not None and (kinds := modality(model, input_ids)) is not None:
        inputs["mm_token_type_ids"] = kinds
    training, bare = model.training, inner_model(model)
    own = bare.generation_config
    # transformers fills in what `settings` leaves open from the model's own
    bare.generation_config = type(settings)()
    model.eval()  # no dropout, and a key-value cache, which gradient checkpointing drops in training mode
    try:
        on_device = {name: value.to(device) for name, value in inputs.items()}
        produced = model.generate(**on_device, generation_config=settings)
    finally:
        model.train(training)
        bare.generation_config = own
    cut = [(new, until_end(new, settings.eos_token_id)) for new in produced[:, input_ids.shape[1] :].tolist()]
    return [(kept, len(kept) < len(new)) for new, kept in cut]
