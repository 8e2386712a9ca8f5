"""Images of states as pixels: blocks of image tokens where their captions stand, and the tensors behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from remind.core.errors import ConfigError, DataError, ImagePathError
from remind.core.files import sha256_file, sha256_json
from remind.core.progress import track
from remind.models.backbone import Backbone
from remind.models.chat import chat_ids
from remind.models.windows import image_block, pixel_inputs, takes_images
from remind.states.parquet import StateRecord, read_part


class Pictures:
    """How a model is shown the images of states.

    Args:
        most: at most about so many tokens for an image.
        root: folder that their files must lie in, links followed; None: anywhere.

    Attributes:
        name: hash of all that decides, besides the files, what the model is shown.

    Raises:
        ConfigError: a model that takes no images.
    """

    def __init__(self, backbone: Backbone, most: int, root: str | None = None) -> None:
        if not takes_images(backbone):
            raise ConfigError(f"data.images pixels: {backbone.name} takes no images; set data.images captions")
        self.most = most
        processor = backbone.processor.image_processor
        self.name = sha256_json([most, type(processor).__name__, processor.to_dict()])
        # examples hold on to this and must not keep the weights alive
        self._backbone = replace(backbone, model=SimpleNamespace(config=backbone.model.config))
        self._root = None if root is None else Path(root).expanduser().resolve()
        self._hash = cache(self._file_hash)
        self._block = cache(lambda path: len(image_block(self._backbone, path, self.most)) - 2)

    def _check_place(self, path: str) -> None:
        if self._root is None:
            return
        try:
            inside = Path(path).resolve().is_relative_to(self._root)
        except (OSError, ValueError, RuntimeError):  # a zero byte, a name too long, a link to itself
            inside = False
        if not inside:
            raise ImagePathError(f"lies outside of data.image_root {self._root}", path)

    def _file_hash(self, path: str) -> str:
        self._check_place(path)
        if not Path(path).is_file():
            raise ImagePathError("no such image file", path)
        return sha256_file(path)

    def survey(self, parts: Sequence[Path]) -> list[list[str]]:
        """Hashes of the image files of each part, each file opened once.

        Raises:
            ImagePathError: files that are missing, are no images or lie outside of the root; names the first one and
                its question.
        """
        hashes: list[list[str]] = []
        good: set[str] = set()
        bad: dict[str, tuple[str, str]] = {}
        for part in track(parts, "images", len(parts)):
            of_part = []
            for record in read_part(part):
                for path in (picture.path for picture in record.pictures if picture.path not in bad):
                    try:
                        of_part.append(self._hash(path))
                        self._block(path)
                        good.add(path)
                    except ImagePathError as error:
                        bad[path] = (record.question_id, _reason(error))
            hashes.append(of_part)
        if bad:
            path, (question, reason) = next(iter(bad.items()))
            count = f"{len(bad)} of {len(good) + len(bad)} images cannot be used"
            raise ImagePathError(f"{reason} ({count}; set data.images captions to go without)", path, question)
        return hashes

    def files(self, record: StateRecord) -> tuple[tuple[str, str], ...]:
        """Path and hash of each image, in the order of the text."""
        return tuple((picture.path, self._hash(picture.path)) for picture in record.pictures)

    def prompt(self, tokenizer: Any, record: StateRecord, level: str) -> list[int]:
        """Tokens of a level: as `prompt_ids`, but images with a file are shown in place of their caption's text.

        Raises:
            DataError: an image that has no place in the level, or stands in another order than in x0.
            ModelError: a chat template that does not show images.
        """
        rendered = record.level(level)
        turns = {turn.turn_id: turn for turn in rendered.turns}
        content: list[dict[str, Any]] = []
        cursor = 0
        for picture in record.pictures:
            turn = turns.get(picture.turn_id)
            if turn is None or not 0 <= picture.place < len(turn.captions) or turn.captions[picture.place][0] < cursor:
                what = f"{level} does not show the images of x0 in order; build the states again"
                raise DataError(what, picture.path, record.question_id)
            start, end = turn.captions[picture.place]
            content += [{"type": "text", "text": rendered.text[cursor:start]}, {"type": "image"}]
            cursor = end
        content.append({"type": "text", "text": rendered.text[cursor:]})
        counts = [self._block(picture.path) for picture in record.pictures]
        ids = chat_ids(tokenizer, [{"role": "user", "content": content}], image_tokens=counts)
        assert ids.count(self._backbone.model.config.image_token_id) == sum(counts), record.question_id
        return ids

    def tensors(self, paths: Sequence[str], question: str) -> dict[str, Tensor]:
        """pixel_values and image_grid_thw of images in order. Raises ImagePathError."""
        try:
            for path in paths:
                self._check_place(path)
            return pixel_inputs(self._backbone, paths, self.most)
        except ImagePathError as error:
            raise ImagePathError(_reason(error), error.path, question) from None


def _reason(error: ImagePathError) -> str:
    return str(error).removeprefix(f"{error.path}: ")


def check_mixture(
    with_images: Sequence[bool], processes: int, train_vision: bool, sharded: bool, sharing: bool
) -> None:
    """Refuse what would leave one process waiting for another that has no image to show.

    Args:
        with_images: for each example, of training and held out.
        sharing: whether x1 and x2 are run together where they can.

    Raises:
        ConfigError: some examples have images and some not, and each process has to run the tower.
    """
    if processes == 1 or not any(with_images):
        return
    if (train_vision or sharded) and not all(with_images):
        raise ConfigError(
            f"data.images pixels: {with_images.count(False)} of {len(with_images)} examples have no image, and several "
            "processes under FSDP, or with train_vision, all have to run the vision tower: "
            "use DDP with a frozen tower, one process, or data.images captions"
        )
    if sharded and sharing:
        raise ConfigError("data.images pixels: under FSDP set trainer.prefix_sharing false")
