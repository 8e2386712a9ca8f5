"""Images of dialogues as a model is shown them: where they stand in a prompt, its tokens, the tensors behind them."""

from __future__ import annotations

import base64
import io
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from remind.core.errors import ConfigError, DataError, ImagePathError, ModelError
from remind.core.files import sha256_file, sha256_json
from remind.models.chat import IMAGE_BLOCK, Content, Tokens, chat_ids, paths_of, prompt_ids, tokens_of_chunks
from remind.states.pyramid import Rendered
from remind.states.records import Picture, StateRecord

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    from remind.models.backbone import Backbone, Description

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
    if not os.path.exists(path):  # of no name that a system takes
        raise ImagePathError("no such image", path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: PILImage = Image.open(path, formats=PICTURE_FORMATS)
        if load:
            image.load()
    except Exception as error:  # decoders raise many kinds for damaged files
        raise ImagePathError(f"cannot be read as an image: {error}", path) from None
    if load and image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB") if load else image


def thumbnail(path: str, side: int) -> str:
    """The image of a local file, at most `side` pixels wide and high, as a data: URL. Raises ImagePathError."""
    picture = open_image(path)
    picture.thumbnail((side, side))
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def ids_of(tokenizer: Any, content: Content, pictures: Pictures | None = None) -> list[int]:
    """Tokens of a message of the user and the header of the answer.

    Raises:
        ModelError: images, and nothing to show them with. Others as `Pictures.ids`.
    """
    if isinstance(content, str):
        return prompt_ids(tokenizer, content)
    if pictures is None:
        raise ModelError("a prompt has images, and nothing says how they are shown")
    return pictures.ids(tokenizer, content)


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


@contextmanager
def _of_question(question: str | None, hint: str = "") -> Iterator[None]:
    """Images that cannot be used are said to be those of a question."""
    try:
        yield
    except ImagePathError as error:
        raise ImagePathError(str(error).removeprefix(f"{error.path}: ") + hint, error.path, question) from None


class ImageFiles:
    """Images as they lie on disk, for a model that is sent them; attributes as of `Pictures`.

    Args:
        most: at most about so many tokens for an image, for which it is made smaller; None: as many as there are.
        root: folder that the files must lie in, links followed; None: anywhere.
        section: of the settings `images`, `image_tokens` and `image_root`, for messages.
    """

    def __init__(self, most: int | None, root: str | None = None, section: str = "") -> None:
        self.most, self._root, self._section = most, root, section
        self.name = sha256_json([most])
        self._hash, self.size = cache(sha256_file), cache(self._size)

    def _size(self, path: str) -> tuple[int, int]:
        """Height and width in pixels at which it is shown; only the header of the file is read.

        Raises:
            ImagePathError: an image that is missing, cannot be read, or lies outside of the root.
        """
        width, height = open_image(path, load=False).size
        if self._root is not None:
            folder = Path(self._root).expanduser().resolve()
            if not Path(path).resolve().is_relative_to(folder):
                raise ImagePathError(f"is outside {self._section}image_root {folder}", path)
        return height, width

    def check(self, shown: Iterable[tuple[str, Iterable[str]]]) -> list[list[str]]:
        """Hashes of the image files of questions, each file opened once.

        Args:
            shown: question ids and the paths of what each is shown.

        Raises:
            ImagePathError: a file that is missing, is no image or lies outside of the root; names its question.
        """
        hashes: list[list[str]] = []
        for question, paths in shown:
            with _of_question(question, f" (set {self._section}images captions to go without)"):
                hashes.append([self._hash(path) for path in paths if self.size(path)])
        return hashes

    def files(self, record: StateRecord) -> tuple[tuple[str, str], ...]:
        """Path and hash of each image, in the order of the text."""
        return tuple((picture.path, self._hash(picture.path)) for picture in record.pictures)


class Pictures(ImageFiles):
    """How a model is shown images, in the training of SAEs, grounding, alignment and evaluation alike.

    Args:
        model: a Qwen-VL model with its image processor; its weights are not held on to.
        most: as many as the processor allows, if None.

    Attributes:
        name: hash of all that decides, besides the files, what the model is shown.

    Raises:
        ConfigError: a model that takes no images.
    """

    def __init__(
        self, model: Backbone | Description, most: int | None, root: str | None = None, section: str = ""
    ) -> None:
        super().__init__(most, root, section)
        self._config = model.config
        self._processor: Any = getattr(model.processor, "image_processor", object())
        if not hasattr(self._processor, "merge_size") or not hasattr(model.config, "vision_start_token_id"):
            needed = "that takes a Qwen-VL model with its image processor"
            raise ConfigError(f"{section}images pixels: {model.name} takes no images ({needed}); show captions instead")
        self.name = sha256_json([most, type(self._processor).__name__, self._processor.to_dict()])
        self._side = self._processor.patch_size * self._processor.merge_size

    def _size(self, path: str) -> tuple[int, int]:
        """As of `ImageFiles`. Raises ImagePathError as there, and for an image far longer than it is wide."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        height, width = super()._size(path)
        least, largest = (int(self._processor.size[name]) for name in ("shortest_edge", "longest_edge"))
        most = largest if self.most is None else min(largest, self.most * self._side**2)
        try:
            sides: tuple[int, int] = smart_resize(height, width, self._side, min(least, most), most)
            # an engine that processes what it is given must leave it as it is
            sides = smart_resize(*sides, self._side, least, largest)
        except ValueError as error:  # extreme aspect ratios
            raise ImagePathError(f"an image of {width} x {height} pixels cannot be shown: {error}", path) from None
        return sides

    def count(self, path: str) -> int:
        """The number of tokens of an image without its two marks. Raises ImagePathError as `size`."""
        height, width = self.size(path)
        return height * width // self._side**2

    def block(self, count: int) -> list[int]:
        """So many tokens of an image, between its two marks."""
        config = self._config
        return [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]

    def shown(self, paths: Iterable[str]) -> list[PILImage]:
        """Images at the size at which the model is shown them. Resized by Pillow, whatever backend the processor has.

        Raises:
            ImagePathError: as `size`.
        """
        return [open_image(path).resize(self.size(path)[::-1]) for path in paths]

    def tensors(self, paths: Sequence[str], question: str | None = None) -> dict[str, Tensor]:
        """pixel_values [patches, values] and image_grid_thw [images, 3] of images in order. Raises ImagePathError."""
        with _of_question(question):
            return self._tensors(self.shown(paths))

    def _tensors(self, images: list[PILImage]) -> dict[str, Tensor]:
        return dict(self._processor(images=images, do_resize=False, return_tensors="pt"))

    @cached_property
    def blank(self) -> tuple[list[int], dict[str, Tensor]]:
        """The tokens and tensors of the smallest image, black, for batches without any (see `collate`)."""
        from PIL import Image

        return self.block(1), self._tensors([Image.new("RGB", (self._side, self._side))])

    def ids(self, tokenizer: Any, content: Content, whole: bool = True) -> list[int]:
        """Tokens of a message of the user and the header of the answer; only headers of the image files are read.

        Args:
            whole: all tokens of an image; otherwise one in their place, as vLLM is given it.

        Raises:
            ImagePathError: an image that cannot be used. ModelError: a chat template that does not show images.
        """
        counts = [self.count(path) if whole else 1 for path in paths_of(content)]
        return chat_ids(tokenizer, [{"role": "user", "content": content}], image_tokens=counts)

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
        found = tokens_of_chunks(tokenizer, chunks[:-1], [self.count(place.path) for place in places])
        offsets: list[tuple[int, int]] = []
        number = 0
        for start, end in found.offsets:
            while start >= spans[number][0]:
                number += 1
            stop, first, last = spans[number]
            shift = last - stop
            offsets.append((first, last) if number % 2 else (start + shift, end + shift))
        return Tokens(found.ids, offsets)
