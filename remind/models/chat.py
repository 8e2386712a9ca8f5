"""Chats as tokens: special tokens written in a dialogue stay text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remind.core.errors import ModelError, brief
from remind.models.backbone import Tokens, added_tokens, tokenize
from remind.states.pyramid import MARKER, marker_places

#: `{"role": …, "content": text or list of parts}` as qwen-vl-utils has it.
Message = Mapping[str, Any]
#: A message's text, or its parts: `{"type": "text", "text": …}`, `{"type": "image", "image": path}`.
Content = str | Sequence[Mapping[str, Any]]
_IMAGE_TOKEN = "<|image_pad|>"
_SIGNS = {"Y": "2024", "m": "07", "d": "26", "B": "July", "b": "Jul", "A": "Friday", "a": "Fri"}
#: Put before a template that prints the date of the day: prompts, and what is cached of them, must not change with it.
_DATE = (
    "{%- macro strftime_now(format) %}{{ format"
    + "".join(f".replace('%{sign}', '{value}')" for sign, value in _SIGNS.items())
    + " }}{% endmacro %}{{ '' }}"
)
#: What the chat templates of Qwen-VL make of an image.
IMAGE_BLOCK = f"<|vision_start|>{_IMAGE_TOKEN}<|vision_end|>"


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a prompt: `text` as the user's message, then the header of the answer.

    Strings in `text` that look like special tokens are tokenised as text; those of the chat template stay special, and
    so does the marker if it has a token and is used as a marker in `text` (`pyramid.marker_places`).
    Without a chat template: `text` and a line end, after the bos token if the tokenizer adds one.
    """
    return prompt_tokens(tokenizer, text).ids


def prompt_text(tokenizer: Any, content: Content) -> str:
    """What `prompt_ids` makes tokens of, chat template and all."""
    return rendered(tokenizer, [{"role": "user", "content": content}])[0] if tokenizer.chat_template else f"{content}\n"


def prompt_tokens(tokenizer: Any, text: str) -> Tokens:
    """As `prompt_ids`, with the characters of `text` that each token covers (outside of it for the template's)."""
    front, chunks = list[int](), [(text + "\n", False)]
    if tokenizer.chat_template:
        tokens, chunks = _chat_tokens(tokenizer, [{"role": "user", "content": text}])
    else:
        front = [token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id]
        tokens = tokens_of_chunks(tokenizer, chunks, [])
    number = next(number for number, (_, own) in enumerate(chunks) if not own)
    # the template may have trimmed the text
    shift = (text + "\n").index(chunks[number][0]) - sum(len(chunk) for chunk, _ in chunks[:number])
    placed = [(a + shift, b + shift) if b > a else (-1, -1) for a, b in tokens.offsets]
    return Tokens(front + tokens.ids, [(-1, -1)] * len(front) + placed)


def end_token_id(tokenizer: Any) -> int:
    """The token that ends an answer: `<|im_end|>` where the vocabulary has it, else the one that the chat template puts
    behind an answer, else eos, else sep (encoders).

    Raises:
        ModelError: the tokenizer has none of them.
    """
    added = added_tokens(tokenizer).ids
    chat_end = added["<|im_end|>"] if "<|im_end|>" in added else _template_end(tokenizer, added)
    for token in (chat_end, tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise ModelError("the tokenizer has no end token (<|im_end|>, eos or sep)")


def _template_end(tokenizer: Any, added: Mapping[str, int]) -> int | None:
    """The added token that the chat template puts behind an answer; None: none, or it shows no answers."""
    if not tokenizer.chat_template:
        return None
    for content in ("slotq", [{"type": "text", "text": "slotq"}]):
        try:
            chat = filled(tokenizer, [{"role": role, "content": content} for role in ("user", "assistant")], False)
        except Exception:  # a template raises what its expressions do
            continue
        before, _, after = chat.rpartition("slotq")
        if "slotq" in before:
            names = [name for name in added if after.lstrip().startswith(name)]
            return added[max(names, key=len)] if names else None
    return None


def filled(tokenizer: Any, messages: Sequence[Message], header: bool = True) -> str:
    """The chat template filled in, without thoughts and with a fixed date; `header`: of the answer that comes next."""
    template = tokenizer.get_chat_template()
    dated = _DATE + template if "strftime_now" in template else None
    text: str = tokenizer.apply_chat_template(
        messages, chat_template=dated, tokenize=False, add_generation_prompt=header, enable_thinking=False
    )
    return text


def chat_ids(tokenizer: Any, messages: Sequence[Message], image_tokens: Sequence[int] = ()) -> list[int]:
    """Tokens of a chat and of the header of its answer, through the tokenizer's chat template.

    Args:
        image_tokens: for each image in order, the number of image tokens its placeholder becomes.

    Raises:
        ModelError: as `rendered`, or a template that leaves out an image.
    """
    return _chat_tokens(tokenizer, messages, image_tokens)[0].ids


def _chat_tokens(
    tokenizer: Any, messages: Sequence[Message], image_tokens: Sequence[int] = ()
) -> tuple[Tokens, list[tuple[str, bool]]]:
    """Tokens of a chat with their places in its chunks, which are those of `rendered`."""
    whole, chunks = rendered(tokenizer, messages)
    if image_tokens or _has_added_tokens(tokenizer, (text for text, own in chunks if not own)):
        return tokens_of_chunks(tokenizer, chunks, image_tokens), chunks
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return Tokens(list(encoded["input_ids"]), list(encoded["offset_mapping"])), chunks


def _has_added_tokens(tokenizer: Any, texts: Iterable[str]) -> bool:
    """Whether one of the texts contains a string that the tokenizer would take for an added token."""
    pattern = added_tokens(tokenizer).pattern
    return pattern is not None and any(pattern.search(text) for text in texts)


def paths_of(content: Content) -> list[str]:
    """The image files of a message in order."""
    return [] if isinstance(content, str) else [part["image"] for part in content if part["type"] == "image"]


def tokens_of_chunks(tokenizer: Any, chunks: Sequence[tuple[str, bool]], image_tokens: Sequence[int]) -> Tokens:
    """Tokens of (text, whether it is from a chat template or an `IMAGE_BLOCK`) chunks, offsets in the joined chunks.

    The text is cut at the template's added tokens and the markers, and each piece is tokenised as plain text.

    Args:
        image_tokens: as for `chat_ids`.

    Raises:
        ModelError: fewer placeholders than images.
    """
    counts = list(image_tokens)
    added = added_tokens(tokenizer)
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    piece: list[str] = []
    done = 0

    def flush() -> None:
        nonlocal done
        text = "".join(piece)
        piece.clear()
        if text:
            tokens = tokenize(tokenizer, text)
            ids.extend(tokens.ids)
            offsets.extend((done + start, done + end) for start, end in tokens.offsets)
        done += len(text)

    for text, from_template in chunks:
        cursor = 0
        places: Iterable[tuple[int, int]] = ()
        if from_template and added.pattern is not None:
            places = (match.span() for match in added.pattern.finditer(text))
        elif not from_template and MARKER in added.ids:
            places = marker_places(text)
        for start, end in places:
            piece.append(text[cursor:start])
            flush()
            name = text[start:end]
            count = counts.pop(0) if name == _IMAGE_TOKEN and counts else 1
            ids.extend([added.ids[name]] * count)
            offsets.extend([(done, done + len(name))] * count)
            done += len(name)
            cursor = end
        piece.append(text[cursor:])
    flush()
    if counts:
        raise ModelError(f"the chat template leaves out {len(counts)} of the images")
    return Tokens(ids, offsets)


def rendered(tokenizer: Any, messages: Sequence[Message]) -> tuple[str, list[tuple[str, bool]]]:
    """The chat template filled in, with the header of the answer: as a whole, and cut where a message's text begins or
    ends, in order, each piece with whether it is from the template.

    Templates of many vision-language models read a message's parts alone, and make nothing of a string: they are given
    it as its only part.

    Raises:
        ModelError: no chat template, or one that does not show every text once and in order.
    """
    name = getattr(tokenizer, "name_or_path", "") or "this model"
    if not tokenizer.chat_template:
        raise ModelError(f"{name}: the tokenizer has no chat template; name an instruction-tuned model")
    # plain letters, which no template trims or escapes, and which are not in the messages
    stem = "slot"
    while stem in repr(messages):
        stem += "x"
    texts: list[str] = []

    def masked(content: Content) -> Content:
        if isinstance(content, str):
            texts.append(content)
            return f"{stem}{len(texts) - 1}q"
        return [{**part, "text": masked(part["text"])} if _is_text(part) else part for part in content]

    reason = "it leaves some out"
    for in_parts in (False, True):
        form = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if in_parts and isinstance(message["content"], str)
            else dict(message)
            for message in messages
        ]
        texts.clear()
        slots = [{**message, "content": masked(message["content"])} for message in form]
        try:
            masks, whole = filled(tokenizer, slots), filled(tokenizer, form)
        except Exception as error:  # a template raises what its expressions do
            reason = brief(error)
            continue
        pieces = re.split(rf"{stem}(\d+)q", masks)
        if [int(piece) for piece in pieces[1::2]] == list(range(len(texts))):
            chunks = [(texts[int(piece)], False) if n % 2 else (piece, True) for n, piece in enumerate(pieces)]
            if "".join(text for text, _ in chunks) != whole:
                # some templates trim the messages
                chunks = [(text if own else text.strip(), own) for text, own in chunks]
            return whole, chunks
    raise ModelError(f"{name}: its chat template does not show every message once and in order: {reason}")


def _is_text(part: Mapping[str, Any]) -> bool:
    return "text" in part and part.get("type", "text") == "text"
