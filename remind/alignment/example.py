"""One question as the trainer sees it: three prompts, one answer, and images if the prompts show any."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from remind.alignment.pictures import Pictures
from remind.core.files import sha256_json


@dataclass(frozen=True)
class Example:
    """One question: the prompt under x0, x1 and x2, and the one answer that follows each (end token included).

    Attributes:
        labelled: whether the answer is gold; one that was decoded carries no hard loss.
    """

    id: str
    prompts: tuple[Tensor, ...]
    answer: Tensor
    labelled: bool = True

    @property
    def tokens(self) -> int:
        """Tokens the model reads over the three levels."""
        return self.tokens_under(range(len(self.prompts)))

    def tokens_under(self, levels: Iterable[int]) -> int:
        """Tokens the model reads if it runs these levels."""
        return sum(len(self.prompts[level]) + len(self.answer) - 1 for level in levels)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the answer."""
        return max(len(prompt) for prompt in self.prompts) + len(self.answer)

    @property
    def largest_id(self) -> int:
        """The highest token id of prompts and answer."""
        return max(int(ids.max()) for ids in (*self.prompts, self.answer))

    @property
    def seen(self) -> str:
        """Tells examples apart whose tokens agree and whose images do not; empty without images."""
        return ""


@dataclass(frozen=True)
class Pictured(Example):
    """A question with images as pixels.

    Attributes:
        images: path and hash of each, in the order of their tokens, which is that of every level.
    """

    images: tuple[tuple[str, str], ...] = ()
    shown: Pictures | None = field(default=None, repr=False, compare=False)

    @property
    def pixels(self) -> dict[str, Tensor]:
        """pixel_values [patches, values] and image_grid_thw [images, 3], read from the files each time it is asked for.

        Raises:
            ImagePathError: a file that can no longer be read.
        """
        assert self.shown is not None
        return self.shown.tensors([path for path, _ in self.images], self.id)

    @property
    def seen(self) -> str:
        assert self.shown is not None
        return sha256_json([self.shown.name, [content for _, content in self.images]])
