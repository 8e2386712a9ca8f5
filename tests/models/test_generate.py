"""Greedy generation against a loop of full forwards, and independence of padding and batches."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from remind.models import generate as answer
from remind.models.backbone import Backbone, load_backbone
from remind.models.chat import prompt_ids
from remind.models.generate import Generation, generate

PROMPTS = ["Who went hiking?", "A much longer question " * 12, "x", "Ana: hello there\nBo: hi <|im_end|> you"]


@pytest.fixture
def nano() -> Backbone:
    return load_backbone("nano-untrained", dtype="float64")


def greedy(backbone: Backbone, prompt: str, n: int) -> list[int]:
    """One token at a time, without padding, cache or `generate`."""
    ids = prompt_ids(backbone.tokenizer, prompt)
    start = len(ids)
    for _ in range(n):
        row = torch.tensor([ids])
        places = backbone.position_ids({"input_ids": row})
        with torch.no_grad():
            logits = backbone.model(input_ids=row, position_ids=places, use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[start:]


def test_equals_a_plain_greedy_loop(nano: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [greedy(nano, prompt, 6) for prompt in PROMPTS]
    outputs = generate(nano, PROMPTS, max_new_tokens=6, batch_size=3)
    for prompt, tokens, output in zip(PROMPTS, expected, outputs, strict=True):
        assert output is not None
        assert output.text == nano.tokenizer.decode(tokens, skip_special_tokens=True)
        assert output.prompt_tokens == len(prompt_ids(nano.tokenizer, prompt))
        assert (output.new_tokens, output.finished, output.failure) == (6, False, None)
    # an end token stops, and is no part of the text
    end = expected[0][3]
    first = expected[0].index(end)
    monkeypatch.setattr(answer, "end_token_id", lambda tokenizer: end)
    stopped = generate(nano, PROMPTS, max_new_tokens=6, batch_size=4)[0]
    assert stopped is not None
    assert stopped.text == nano.tokenizer.decode(expected[0][:first])
    assert (stopped.new_tokens, stopped.finished) == (first, True)


def test_neither_batches_nor_a_models_own_settings_change_answers(nano: Backbone) -> None:
    plain = generate(nano, PROMPTS, 6)
    assert plain == generate(nano, PROMPTS, 6, batch_size=1) == generate(nano, PROMPTS[::-1], 6, batch_size=3)[::-1]
    first = nano.tokenizer(plain[0].text, add_special_tokens=False)["input_ids"][:1]
    own, nano.model.generation_config = nano.model.generation_config, None
    nano.model.train()
    for leak in (
        {"do_sample": True, "temperature": 5.0, "top_k": 3},
        {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "bad_words_ids": [first]},
        {"suppress_tokens": first, "forced_eos_token_id": 7, "exponential_decay_length_penalty": (1, 5.0)},
    ):
        nano.model.generation_config = GenerationConfig(**leak, eos_token_id=own.eos_token_id)
        assert generate(nano, PROMPTS, 6) == plain, leak
    assert nano.model.training


def test_a_failing_batch_is_tried_one_by_one(nano: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = generate(nano, PROMPTS, 4)
    nano.max_length = max(len(prompt_ids(nano.tokenizer, prompt)) for prompt in PROMPTS) + 3
    tight = generate(nano, PROMPTS, 4)
    assert [output and output.failure for output in tight] == [None, "too_long", None, None]
    nano.max_length = 32768
    original = nano.model.generate
    long = max(len(prompt_ids(nano.tokenizer, prompt)) for prompt in PROMPTS)

    def short_of_memory(input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
        if input_ids.shape[1] == long:
            raise torch.OutOfMemoryError("no room\nfor this")
        return original(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(nano.model, "generate", short_of_memory)
    outputs = generate(nano, PROMPTS, 4, batch_size=4)
    assert outputs[1] == Generation("", long, failure="error", message="no room for this")
    assert [o for i, o in enumerate(outputs) if i != 1] == [o for i, o in enumerate(plain) if i != 1]
