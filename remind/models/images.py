"""Images of dialogues as a model is shown them: where they stand in a prompt, its tokens, the tensors behind them."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from remind.core.errors import ConfigError, DataError, ImagePathError, ModelError
from remind.core.files import sha256_file, sha256_json
from remind.models.chat import IMAGE_BLOCK, Content, Tokens, chat_ids, paths_of, tokens_of_chunks
from remind.states.pyramid import Rendered
from remind.states.records import Picture, StateRecord

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    from remind.models.backbone import Backbone

#: Accepted image formats, by content. Others of Pillow's formats start programs (EPS) or are rare.
PICTURE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")


def open_image(path: str | Path, load: bool = True) -> PILImage:
    """A local image in RGB, transparency on white; without `load` as its header says, its pixels not decoded.

    Raises:
        ImagePathError: no local file, no image, or more pixels than Pillow takes for harmless (89 million).
    """
    from PIL import Image

    if re.match(r"(?i)(https?|data|ftp):", str(path)):
        raise ImagePathError(f"image {str(path)[:80]!r} is not a local file; nothing is fetched")
    path = Path(str(path).removeprefix("file://"))
    if not path.exists():
        raise ImagePathError("no such image", path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: PILImage = Image.open(path, formats=PICTURE_FORMATS)
        if load:
            image.load()
    except Exception as error:  # decoders raise many kinds for damaged files
        raise ImagePathError(f"cannot be read as an image: {error}", path) from None
    if not load or image.mode == "RGB":
        return image
    if image.mode == "RGBA":
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def thumbnail(path: str, side: int) -> str:
    """The image of a local file, at most `side` pixels wide and high, as a data: URL. Raises ImagePathError."""
    picture = open_image(path)
    picture.thumbnail((side, side))
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def takes_images(backbone: Backbone) -> bool:
    """Whether images can be shown to the backbone: a Qwen-VL model with its image processor."""
    processor = getattr(backbone.processor, "image_processor", None)
    return hasattr(processor, "merge_size") and hasattr(backbone.model.config, "vision_start_token_id")


def image_size(backbone: Backbone, path: str, most: int | None) -> tuple[int, int]:
    """Height and width in pixels at which a model is shown an image; only the header of the file is read.

    Args:
        most: at most about so many tokens, for which the image is made smaller; None: as many as the processor allows.

    Raises:
        ImagePathError: an image that is missing, cannot be read, or is far longer than it is wide.
        ModelError: a backbone without images.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    if not takes_images(backbone):
        raise ModelError(f"{backbone.name}: images need a Qwen-VL model with its image processor")
    processor = backbone.processor.image_processor
    width, height = open_image(path, load=False).size
    factor = processor.patch_size * processor.merge_size
    least, largest = int(processor.size["shortest_edge"]), int(processor.size["longest_edge"])
    if most is not None:
        largest = min(largest, most * factor**2)
    try:
        sides: tuple[int, int] = smart_resize(height, width, factor, min(least, largest), largest)
    except ValueError as error:  # extreme aspect ratios
        raise ImagePathError(f"an image of {width} x {height} pixels cannot be shown: {error}", path) from None
    return sides


def image_block(backbone: Backbone, path: str, most: int | None) -> list[int]:
    """The tokens of an image, between its two marks. Arguments and errors as of `image_size`."""
    height, width = image_size(backbone, path, most)
    processor, config = backbone.processor.image_processor, backbone.model.config
    count = height * width // (processor.patch_size * processor.merge_size) ** 2
    return [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]


def pixel_inputs(backbone: Backbone, paths: Sequence[str], most: int | None) -> dict[str, Tensor]:
    """pixel_values [patches, values] and image_grid_thw [images, 3] of images in order.

    Arguments and errors as of `image_size`. Resized by Pillow, whatever backend the processor has.
    """
    found = []
    for path in paths:  # one at a time, so that only one is in memory at its stored size
        height, width = image_size(backbone, path, most)
        image = open_image(path).resize((width, height))
        found.append(backbone.processor.image_processor(images=[image], do_resize=False, return_tensors="pt"))
    return {name: torch.cat([one[name] for one in found]) for name in ("pixel_values", "image_grid_thw")}


def chat_inputs(backbone: Backbone, content: Content, most: int | None = None) -> dict[str, Tensor]:
    """A message of the user and the header of the answer as model inputs.

    Returns:
        input_ids, attention_mask [1, T]; with images also pixel_values, image_grid_thw and, if the model takes them,
        mm_token_type_ids [1, T].

    Raises:
        ImagePathError: an image that cannot be used. ModelError: images for a model without them, or no chat template.
    """
    from remind.models.backbone import modality

    paths = paths_of(content)
    counts = [len(image_block(backbone, path, most)) - 2 for path in paths]
    ids = torch.tensor([chat_ids(backbone.tokenizer, [{"role": "user", "content": content}], counts)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if paths:
        inputs |= pixel_inputs(backbone, paths, most)
        if (kinds := modality(backbone.model, ids)) is not None:
            inputs["mm_token_type_ids"] = kinds
    return inputs


class Place(NamedTuple):
    """An image in a text: the characters of the caption it stands for, and its file."""

    start: int
    end: int
    path: str


def places_of(rendered: Rendered, pictures: Iterable[Picture], question: str, what: str) -> tuple[Place, ...]:
    """Where the images of a prompt stand.

    Args:
        question: its id. what: name of the prompt, for errors.

    Raises:
        DataError: an image that has no place in the prompt, or stands in another order.
    """
    turns = {turn.turn_id: turn for turn in rendered.turns}
    places: list[Place] = []
    for picture in pictures:
        captions = turns[picture.turn_id].captions if picture.turn_id in turns else ()
        place = captions[picture.place] if 0 <= picture.place < len(captions) else (-1, -1)
        if place[0] < (places[-1].end if places else 0):
            message = f"{what} does not show the images of x0 in order; build the states again"
            raise DataError(message, picture.path, question)
        places.append(Place(*place, picture.path))
    return tuple(places)


def content_of(text: str, places: Sequence[Place]) -> Content:
    """A message that shows images in place of their captions; the text itself where there are none."""
    if not places:
        return text
    parts: list[dict[str, Any]] = []
    cursor = 0
    for start, end, path in places:
        parts += [{"type": "text", "text": text[cursor:start]}, {"type": "image", "image": path}]
        cursor = end
    return [*parts, {"type": "text", "text": text[cursor:]}]


def level_content(record: StateRecord, level: str) -> Content:
    """`content_of` a level with all images whose file is known. Raises DataError as `places_of`."""
    rendered = record.level(level)
    return content_of(rendered.text, places_of(rendered, record.pictures, record.question_id, level))


def file_hash(path: str, root: str | None, section: str, record: str | None = None) -> str:
    """SHA-256 of an image file.

    Args:
        root, section: as for `Pictures`. record: what shows it, for errors.

    Raises:
        ImagePathError: it is missing, or is outside of the root.
    """
    _check_place(path, root, section, record)
    if not Path(path).is_file():
        raise ImagePathError("no such image file", path, record)
    return sha256_file(path)


def _check_place(path: str, root: str | None, section: str, record: str | None = None) -> None:
    if root is None:
        return
    folder = Path(root).expanduser().resolve()
    try:
        inside = Path(path).resolve().is_relative_to(folder)
    except (OSError, ValueError, RuntimeError):  # a zero byte, a name too long, a link to itself
        inside = False
    if not inside:
        raise ImagePathError(f"is outside {section}image_root {folder}", path, record)


class Pictures:
    """How a model is shown the images of states, in training, grounding and evaluation alike.

    Args:
        most: at most about so many tokens for an image.
        root: folder that their files must lie in, links followed; None: anywhere.
        section: of the settings `images`, `image_tokens` and `image_root`, for messages.

    Attributes:
        name: hash of all that decides, besides the files, what the model is shown.

    Raises:
        ConfigError: a model that takes no images.
    """

    def __init__(self, backbone: Backbone, most: int, root: str | None = None, section: str = "") -> None:
        self._section, self._root = section, root
        if not takes_images(backbone):
            raise ConfigError(f"{section}images pixels: {backbone.name} takes no images; set {section}images captions")
        self.most = most
        processor = backbone.processor.image_processor
        self.name = sha256_json([most, type(processor).__name__, processor.to_dict()])
        # examples hold on to this and must not keep the weights alive
        self._backbone = replace(backbone, model=SimpleNamespace(config=backbone.model.config))
        self._hash = cache(lambda path: file_hash(path, root, section))
        self._block = cache(lambda path: len(image_block(self._backbone, path, self.most)) - 2)

    def check(self, shown: Iterable[tuple[str, Iterable[str]]]) -> list[list[str]]:
        """Hashes of the image files of questions, each file opened once.

        Args:
            shown: question ids and the paths of what each is shown.

        Raises:
            ImagePathError: a file that is missing, is no image or lies outside of the root; names its question.
        """
        hashes: list[list[str]] = []
        for question, paths in shown:
            try:
                hashes.append([])
                for path in paths:
                    hashes[-1].append(self._hash(path))
                    self._block(path)
            except ImagePathError as error:
                hint = f"set {self._section}images captions to go without"
                raise ImagePathError(f"{_reason(error)} ({hint})", error.path, question) from None
        return hashes

    def files(self, record: StateRecord) -> tuple[tuple[str, str], ...]:
        """Path and hash of each image, in the order of the text."""
        return tuple((picture.path, self._hash(picture.path)) for picture in record.pictures)

    def prompt(self, tokenizer: Any, record: StateRecord, level: str) -> list[int]:
        """Tokens of a level: as `prompt_ids`, but images with a file are shown in place of their caption's text.

        Raises:
            DataError: as `places_of`. ModelError: a chat template that does not show images.
        """
        return self.ids(tokenizer, level_content(record, level))

    def ids(self, tokenizer: Any, content: Content) -> list[int]:
        """Tokens of a message of the user and the header of the answer; only headers of the image files are read.

        Raises:
            ImagePathError: an image that cannot be used. ModelError: a chat template that does not show images.
        """
        counts = [self._block(path) for path in paths_of(content)]
        ids = chat_ids(tokenizer, [{"role": "user", "content": content}], image_tokens=counts)
        assert ids.count(self._backbone.model.config.image_token_id) == sum(counts)
        return ids

    def tokens(self, tokenizer: Any, text: str, places: Sequence[Place]) -> Tokens:
        """Tokens of a text with images, as inside of a chat; those of an image cover the characters of its caption."""
        chunks: list[tuple[str, bool]] = []
        #: Where each chunk ends in the joined chunks, and what its characters are in `text`.
        spans: list[tuple[int, int, int]] = []
        length = cursor = 0
        for start, end, _ in (*places, Place(len(text), len(text), "")):
            for chunk, first, last in ((text[cursor:start], cursor, start), (IMAGE_BLOCK, start, end)):
                chunks.append((chunk, chunk is IMAGE_BLOCK))
                length += len(chunk)
                spans.append((length, first, last))
            cursor = end
        found = tokens_of_chunks(tokenizer, chunks[:-1], [self._block(place.path) for place in places])
        offsets: list[tuple[int, int]] = []
        number = 0
        for start, end in found.offsets:
            while start >= spans[number][0]:
                number += 1
            stop, first, last = spans[number]
            shift = last - stop
            offsets.append((first, last) if number % 2 else (start + shift, end + shift))
        return Tokens(found.ids, offsets)

    def tensors(self, paths: Sequence[str], question: str | None = None) -> dict[str, Tensor]:
        """pixel_values and image_grid_thw of images in order. Raises ImagePathError."""
        try:
            for path in paths:
                _check_place(path, self._root, self._section)
            return pixel_inputs(self._backbone, paths, self.most)
        except ImagePathError as error:
            raise ImagePathError(_reason(error), error.path, question) from None


def _reason(error: ImagePathError) -> str:
    return str(error).removeprefix(f"{error.path}: ")
