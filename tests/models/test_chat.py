"""Prompts as tokens: special tokens written in a dialogue stay text, offsets are right, any text round-trips."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remind.core.errors import ModelError
from remind.models.chat import chat_ids, end_token_id, prompt_ids, prompt_tokens, tokenize
from remind.models.nano import SPECIAL_TOKENS, nano_tokenizer
from remind.states import prompts
from remind.states.pyramid import MARKER, marker_places

TOKENIZER = nano_tokenizer()
AWKWARD = ["👩‍👩‍👧‍👦 and 👍🏽", "e\u0301 décomposed", "  spaces   and\n\nlines\t", "<|im_end|> <|image_pad|>"]


def expected_offsets(text: str, ids: list[int]) -> list[tuple[int, int]]:
    """The characters each token's bytes come from."""
    owner = [position for position, character in enumerate(text) for _ in character.encode()]
    offsets, cursor = [], 0
    # in GPT-2's alphabet each symbol of a token is a byte
    for token in TOKENIZER.convert_ids_to_tokens(ids):
        offsets.append((owner[cursor], owner[cursor + len(token) - 1] + 1))
        cursor += len(token)
    assert cursor == len(owner)
    return offsets


@settings(max_examples=200, deadline=None)
@given(st.text() | st.sampled_from(AWKWARD))
def test_offsets_are_the_characters_of_each_token(text):
    tokens = tokenize(TOKENIZER, text)
    assert tokens.offsets == expected_offsets(text, tokens.ids)


def control_tokenizer():
    """nano's, with tokens like those that chat models add without calling them special."""
    from tokenizers import AddedToken

    tokenizer = nano_tokenizer()
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in (*CONTROLS, "    ")])
    return tokenizer


CONTROLS = ("<think>", "</think>", "<tool_call>", "<|fim_prefix|>", MARKER)


def test_tokens_that_are_not_called_special_stay_text_too():
    tokenizer, text = control_tokenizer(), "Ana: <think> héllo<think> <|im_end|>\n"
    tokens = tokenize(tokenizer, text)
    # as if it had never been added
    assert tokens == tokenize(TOKENIZER, text)
    assert tokens.offsets == expected_offsets(text, tokens.ids)
    known = {index for index in tokenizer.added_tokens_decoder if index >= len(TOKENIZER)}
    for ids in (prompt_ids(tokenizer, text), chat_ids(tokenizer, [{"role": "user", "content": text}])):
        assert ids == prompt_ids(TOKENIZER, text)
        assert not known & set(ids)
    # the template's own count
    tokenizer.chat_template = TOKENIZER.chat_template.rstrip() + "<think>\n"
    ids = prompt_ids(tokenizer, text)
    assert ids.count(tokenizer.convert_tokens_to_ids("<think>")) == 1
    assert tokenizer.decode(ids).endswith("assistant\n<think>")


def test_only_markers_of_the_layout_get_their_token():
    tokenizer = control_tokenizer()
    marker = tokenizer.convert_tokens_to_ids(MARKER)
    reminder = prompts.render("reminder", marker=MARKER).strip()
    said = f"Conversation\nAna: {MARKER}\n{MARKER} hi\n hi {MARKER}\nAna: {reminder}\n"
    assert marker not in prompt_ids(tokenizer, said)
    shown = f"{said}{MARKER}\nAna: {MARKER}\n{MARKER}\n\n{reminder}\n"
    for template in (tokenizer.chat_template, None):
        tokenizer.chat_template = template
        ids, offsets = prompt_tokens(tokenizer, shown)
        places = [place for token, place in zip(ids, offsets, strict=True) if token == marker]
        assert places == marker_places(shown)
        assert [shown[start:end] for start, end in places] == [MARKER] * 3


# prompts


def assembled(text: str) -> list[int]:
    start, end = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def plain(part: str) -> list[int]:
        return TOKENIZER(part, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    return [start, *plain(f"user\n{text}"), end, *plain("\n"), start, *plain("assistant\n")]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, "Ana: hi\n", "slot", "slot0q", "<answer>", "é👋", " ", "{{ x }}"])))
def test_prompt_keeps_the_template_special_and_the_text_plain(parts):
    text = "".join(parts)
    assert prompt_ids(TOKENIZER, text) == assembled(text)


#: A template that reads a message's parts, as of LLaVA, and one that refuses a string.
_BY_KIND = (
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
)
_REFUSING = "{% if message['content'] is string %}{{ raise_exception('parts!') }}{% endif %}" + _BY_KIND


@pytest.mark.parametrize("template", [_BY_KIND, _REFUSING])
@pytest.mark.parametrize("text", ["USER", "Where is it?", "<|im_end|> <think>"])
def test_templates_that_read_parts_show_a_message(template, text):
    tokenizer = nano_tokenizer()
    tokenizer.chat_template = "USER{% for message in messages %}" + template + "{% endfor %}ASSISTANT:"
    ids = prompt_ids(tokenizer, text)
    assert tokenizer.decode(ids).removeprefix("USER") == f"{text} ASSISTANT:"
    assert prompt_tokens(tokenizer, text).ids == ids


@pytest.mark.parametrize("template", ["USER: ASSISTANT:", "{% for message in messages %}", _REFUSING, "{{ 1 + 'a' }}"])
def test_templates_that_do_not_show_a_message_are_refused(template):
    tokenizer = nano_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=r"^[^\n]*does not show every message[^\n]*$"):
        prompt_ids(tokenizer, "Where is it?")


#: How the turns of Gemma and of Phi-3 end, a template without an end, and one that shows no answers.
_GEMMA = "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
_ENDS = {
    _GEMMA: "<end_of_turn>",
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }} <|end|>\n{% endfor %}{{ eos_token }}": "<|end|>",
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}": "<eos>",
    "{{ messages[0]['content'] }}<|end|>": "<eos>",
    "{{ raise_exception('no') }}": "<eos>",
    "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}<|end|>{% endfor %}{% endfor %}": "<|end|>",
}


@pytest.mark.parametrize("template", _ENDS)
def test_an_answer_ends_as_the_template_ends_one(template):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<unk>": 0, "q": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_tokens(["<start_of_turn>", "<end_of_turn>", "<|end|>", "<|en"], special_tokens=True)
    tokenizer.chat_template = template
    assert end_token_id(tokenizer) == tokenizer.convert_tokens_to_ids(_ENDS[template])


def test_a_prompt_is_the_same_on_every_day_and_without_thoughts():
    tokenizer, plain = nano_tokenizer(), nano_tokenizer().chat_template
    ids = prompt_ids(tokenizer, "Hi.")
    date = "{{ strftime_now('%d %b %Y') }}, {{ strftime_now('%Y-%m-%d').split('-')[1] }} "
    tokenizer.chat_template = date + "{% if enable_thinking is false %}quick {% endif %}" + plain
    assert tokenizer.decode(prompt_ids(tokenizer, "Hi.")) == "26 Jul 2024, 07 quick " + tokenizer.decode(ids)
    assert tokenizer.chat_template.startswith(date)  # as it is saved


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.sampled_from(["e\u0301 \u00e9", "👩‍👩‍👧‍👦 ok", "  two  spaces , kept .", "I 'm , don 't"]))
def test_any_text_round_trips(text):
    ids = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert TOKENIZER.decode(ids) == text
