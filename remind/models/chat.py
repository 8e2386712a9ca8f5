"""Chats become tokens and images: safe against special tokens written in a dialogue, and local files only."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from remind.core.errors import ImagePathError, ModelError
from remind.states.pyramid import MARKER, marker_places

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

#: `{"role": …, "content": text or list of parts}` as qwen-vl-utils has it.
Message = Mapping[str, Any]
_IMAGE_TOKEN = "<|image_pad|>"
#: What a picture may be, by its content. Others of Pillow's formats start programs (EPS) or are hardly ever read.
PICTURE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")

#: Most pixels of a picture (Pillow refuses twice as many, and only warns of these).
MOST_PIXELS = 89_478_485
#: Most bytes of a picture's file, which Pillow reads whole as soon as it opens a WebP or AVIF: what the largest picture
#: takes uncompressed.
MOST_BYTES = 1 << 28


class Tokens(NamedTuple):
    """Token ids and, for each, the characters it covers as (start, end), end exclusive.

    Tokens that are parts of one multi-byte character all cover that character.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]


def tokenize(tokenizer: Any, text: str) -> Tokens:
    """`text` as plain text with character offsets: nothing added, and strings such as `<|im_end|>` stay text.

    So do `<think>`, `<tool_call>` and their like, which tokenizers add without calling them special.

    Raises:
        ModelError: the tokenizer is not a fast one and so knows no offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{type(tokenizer).__name__} knows no character offsets; a fast tokenizer is needed")
    added = _added(tokenizer)
    if added.unsaid is not None and added.unsaid.search(text):
        plain = _plain(tokenizer, added).encode(text, add_special_tokens=False)
        return Tokens(list(plain.ids), list(plain.offsets))
    # verbose=False: a history longer than the model is for the caller to window
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True, verbose=False
    )
    return Tokens(list(encoded["input_ids"]), [(int(start), int(end)) for start, end in encoded["offset_mapping"]])


class _Added:
    """The tokens added to a vocabulary that stand for more than their text, white space aside.

    Attributes:
        ids: all of them, by their text.
        unsaid: finds those that a tokenizer takes for tokens wherever they stand; None: there are none.
    """

    def __init__(self, tokenizer: Any) -> None:
        tokens = {i: t for i, t in tokenizer.added_tokens_decoder.items() if t.content.strip(" \t\r\n\u2581")}
        self.ids = {token.content: index for index, token in tokens.items()}
        self.unsaid = _any_of(token.content for token in tokens.values() if not token.special)
        self.own = _any_of(self.ids)
        #: A tokenizer for which all of them are special.
        self.plain: Any = None


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


_ADDED: WeakKeyDictionary[Any, tuple[int, _Added]] = WeakKeyDictionary()


def _added(tokenizer: Any) -> _Added:
    size = len(tokenizer)
    known = _ADDED.get(tokenizer)
    if known is None or known[0] != size:
        known = _ADDED[tokenizer] = (size, _Added(tokenizer))
    return known[1]


def _plain(tokenizer: Any, added: _Added) -> Any:
    """The tokenizer's rules without any of its added tokens; made when first needed."""
    if added.plain is None:
        from tokenizers import Tokenizer

        content = json.loads(tokenizer.backend_tokenizer.to_str())
        for token in content["added_tokens"]:
            token["special"] = token["special"] or token["content"] in added.ids
        added.plain = Tokenizer.from_str(json.dumps(content))
        added.plain.no_truncation()
        added.plain.no_padding()
        added.plain.encode_special_tokens = True
    return added.plain


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The one way prompts become tokens: `text` as the user's message, then the header of the answer.

    Strings in `text` that look like special tokens are tokenised as text; the chat template's own stay special, and
    so does the marker where it has a token and `text` shows it as a marker (`pyramid.marker_places`).
    Without a chat template: `text` and a line end, after the bos token if the tokenizer puts one.
    """
    if tokenizer.chat_template:
        return chat_ids(tokenizer, [{"role": "user", "content": text}])
    front: list[int] = []
    if tokenizer.bos_token_id is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        front = [tokenizer.bos_token_id]
    return front + _cut(tokenizer, [(text + "\n", False)], []).ids


def prompt_tokens(tokenizer: Any, text: str) -> Tokens:
    """As `prompt_ids`, with the characters of `text` that each token covers; those of the template lie outside of it.

    Raises:
        ModelError: a chat template that does not show the text once and unchanged.
    """
    ids = prompt_ids(tokenizer, text)
    chunks = [(text + "\n", False)]
    if tokenizer.chat_template:
        chunks = _render(tokenizer, [{"role": "user", "content": text}], add_generation_prompt=True)
    if tokenizer.chat_template and not _said(tokenizer, [text]):
        whole = "".join(chunk for chunk, _ in chunks)
        encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        found = Tokens(list(encoded["input_ids"]), list(encoded["offset_mapping"]))
    else:
        found = _cut(tokenizer, chunks, [])
    front = len(ids) - len(found.ids)
    if front < 0 or ids[front:] != found.ids:
        raise ModelError("the characters of this prompt's tokens cannot be found; its tokenizer cuts it otherwise")
    number = next(number for number, (_, own) in enumerate(chunks) if not own)
    # a template may have trimmed what it shows
    shift = (text + "\n").index(chunks[number][0]) - sum(len(chunk) for chunk, _ in chunks[:number])
    placed = [(start + shift, end + shift) if end > start else (-1, -1) for start, end in found.offsets]
    return Tokens(ids, [(-1, -1)] * front + placed)


def end_token_id(tokenizer: Any) -> int:
    """The token that ends an answer: `<|im_end|>` where the vocabulary has it, else eos, else sep (encoders).

    Raises:
        ModelError: the tokenizer has none of them.
    """
    chat_end = tokenizer.get_added_vocab().get("<|im_end|>")
    for token in (chat_end, tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise ModelError("the tokenizer has no end token (<|im_end|>, eos or sep)")


def chat_ids(
    tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool = True, image_tokens: Sequence[int] = ()
) -> list[int]:
    """Tokens of a chat, through the tokenizer's chat template.

    Args:
        image_tokens: for each image in order, the number of image tokens its placeholder becomes.

    Raises:
        ModelError: no chat template, or one that leaves out a message or an image.
    """
    if not tokenizer.chat_template:
        raise ModelError("the tokenizer has no chat template")
    texts = [text for message in messages for text in _texts(message)]
    if not image_tokens and not _said(tokenizer, texts):
        rendered = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
    return _cut(tokenizer, _render(tokenizer, messages, add_generation_prompt), list(image_tokens)).ids


def _said(tokenizer: Any, texts: Iterable[str]) -> bool:
    """Whether one of the texts holds what the tokenizer would take for a token of its own."""
    own = _added(tokenizer).own
    return own is not None and any(own.search(text) for text in texts)


def _cut(tokenizer: Any, chunks: Sequence[tuple[str, bool]], image_tokens: list[int]) -> Tokens:
    """Tokens of (text, whether it is the template's own) chunks; offsets are those in the chunks together.

    The text is cut at the template's added tokens and each piece tokenised without any, which is what a tokenizer
    does itself, only that here such tokens written in a message do not count.
    """
    added = _added(tokenizer)
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    piece: list[str] = []
    done = 0

    def flush() -> None:
        nonlocal done
        text = "".join(piece)
        piece.clear()
        if text:
            found = tokenize(tokenizer, text)
            ids.extend(found.ids)
            offsets.extend((done + start, done + end) for start, end in found.offsets)
        done += len(text)

    for text, from_template in chunks:
        cursor = 0
        for start, end in _own_places(added, text, from_template):
            piece.append(text[cursor:start])
            flush()
            name = text[start:end]
            count = image_tokens.pop(0) if name == _IMAGE_TOKEN and image_tokens else 1
            ids.extend([added.ids[name]] * count)
            offsets.extend([(done, done + len(name))] * count)
            done += len(name)
            cursor = end
        piece.append(text[cursor:])
    flush()
    if image_tokens:
        raise ModelError(f"the chat template leaves out {len(image_tokens)} of the images")
    return Tokens(ids, offsets)


def _own_places(added: _Added, text: str, from_template: bool) -> Iterator[tuple[int, int]]:
    """Where tokens stand that are meant: all in the template, in what is said our own markers."""
    if from_template and added.own is not None:
        yield from (match.span() for match in added.own.finditer(text))
    elif not from_template and MARKER in added.ids:
        yield from marker_places(text)


def _render(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool) -> list[tuple[str, bool]]:
    """The chat template filled in, as (text, whether it is the template's own) in order."""
    # plain letters, so that no template trims or escapes them; longer than any such run in the messages
    stem = "slot"
    while stem in repr(messages):
        stem += "x"
    texts: list[str] = []

    def slot(text: str) -> str:
        texts.append(text)
        return f"{stem}{len(texts) - 1}q"

    masked: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = slot(content)
        else:
            content = [{**part, "text": slot(part["text"])} if _is_text(part) else part for part in content]
        masked.append({**message, "content": content})
    rendered = tokenizer.apply_chat_template(masked, tokenize=False, add_generation_prompt=add_generation_prompt)
    parts = re.split(rf"{stem}(\d+)q", rendered)
    if [int(part) for part in parts[1::2]] != list(range(len(texts))):
        raise ModelError("the chat template does not show every message once and in order")
    plain = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    chunks = [(texts[int(part)], False) if number % 2 else (part, True) for number, part in enumerate(parts)]
    if "".join(text for text, _ in chunks) == plain:
        return chunks
    # some templates trim what they are given
    return [(text if own else text.strip(), own) for text, own in chunks]


def _texts(message: Message) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if _is_text(part)]


def _is_text(part: Mapping[str, Any]) -> bool:
    return "text" in part and part.get("type", "text") == "text"


def _is_image(part: Mapping[str, Any]) -> bool:
    return "image" in part or part.get("type") == "image"


def read_images(messages: Sequence[Message], patch_size: int) -> list[PILImage]:
    """The images of a chat in order, in RGB, their sides multiples of two patches.

    Read from local files alone, then sized by qwen-vl-utils where that can be imported (it needs torchvision), else by
    the same rule: `resized_height` and `resized_width`, or `min_pixels` and `max_pixels` of the message part.

    Raises:
        ImagePathError: an image that is missing, not a local file or cannot be read.
        ModelError: a video.
    """
    parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
    if any("video" in part or part.get("type") == "video" for part in parts):
        raise ModelError("videos are not supported; give single frames as images")
    shown = [part for part in parts if _is_image(part)]
    if not shown:
        return []
    try:
        from qwen_vl_utils import process_vision_info
    except (ImportError, RuntimeError):  # a torchvision that does not fit its torch raises RuntimeError

        def sized(part: Mapping[str, Any]) -> PILImage:
            return _resize(part, 2 * patch_size)
    else:

        def sized(part: Mapping[str, Any]) -> PILImage:
            try:
                made = process_vision_info([{"role": "user", "content": [part]}], image_patch_size=patch_size)[0]
            except ValueError as error:
                raise _unusable(part["image"], error) from None
            image: PILImage = made[0]
            return image

    # one after the other: no more than one is in memory as large as it is stored
    return [sized({**part, "image": open_image(part.get("image"))}) for part in shown]


def image_size(path: str | Path) -> tuple[int, int]:
    """Width and height in pixels, from the head of a local file alone. Raises ImagePathError."""
    return opened(str(path), load=False).size


def open_image(value: Any) -> PILImage:
    """A local file or a PIL image, in RGB, transparency on white. Raises ImagePathError."""
    from PIL import Image

    if isinstance(value, Image.Image):
        image = value
    elif isinstance(value, str | Path) and str(value):
        image = opened(str(value), load=True)
    else:
        raise ImagePathError(f"an image is a path or a PIL image, not {type(value).__name__}")
    if image.mode == "RGBA":
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def opened(text: str, load: bool = True) -> PILImage:
    """A picture in a local file as it is stored.

    Raises:
        ImagePathError: no local file, no picture, or one of more than `MOST_PIXELS` or `MOST_BYTES`.
    """
    from PIL import Image

    if re.match(r"(?i)(https?|data|ftp):", text):
        raise ImagePathError(f"image {text[:80]!r} is not a local file; nothing is fetched")
    path = Path(text.removeprefix("file://"))
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ImagePathError(
                "cannot be read as an image: not a regular file" if path.exists() else "no such image", path
            )
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ImagePathError(
                f"an image file of {size >> 20} MiB is too large ({MOST_BYTES >> 20} MiB at most)", path
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path, formats=PICTURE_FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise ImagePathError(f"an image of {image.width} x {image.height} pixels is too large", path)
        if load:
            image.load()
    except ImagePathError:
        raise
    except Exception as error:  # decoders of damaged files raise all sorts
        raise ImagePathError(f"cannot be read as an image: {error}", path) from None
    return image


def _unusable(image: PILImage, error: ValueError) -> ImagePathError:
    return ImagePathError(f"an image of {image.width} x {image.height} pixels cannot be used: {error}")


def _resize(part: Mapping[str, Any], factor: int) -> PILImage:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    image: PILImage = part["image"]
    least, most = 4 * factor**2, 16384 * factor**2
    try:
        if "resized_height" in part and "resized_width" in part:
            height, width = smart_resize(part["resized_height"], part["resized_width"], factor, least, most)
        else:
            least, most = part.get("min_pixels", least), part.get("max_pixels", most)
            height, width = smart_resize(image.height, image.width, factor, least, most)
    except ValueError as error:
        raise _unusable(image, error) from None
    return image.resize((width, height))
