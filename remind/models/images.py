"""Images of turns inside running dialogue text: how many tokens each becomes, and their pixels as model inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from remind.core.errors import ImagePathError, ModelError
from remind.models.chat import image_size, open_image

if TYPE_CHECKING:
    from remind.models.backbone import Backbone


def takes_images(backbone: Backbone) -> bool:
    """Whether images can be shown to the backbone: a Qwen-VL model with its image processor."""
    return backbone.kind == "vlm" and hasattr(_image_processor(backbone), "merge_size")


def image_block(backbone: Backbone, path: str, most: int) -> list[int]:
    """The tokens that stand for an image in a text, between their two marks.

    Args:
        most: at most about so many of them (the image is made smaller).

    Raises:
        ImagePathError: an image that is missing, cannot be read, or is far longer than it is wide.
        ModelError: a backbone without images.
    """
    processor = _checked(backbone)
    width, height = image_size(path)
    try:
        patches = processor.get_number_of_image_patches(height, width, _limits(processor, most))
    except ValueError as error:  # sides out of all proportion
        raise ImagePathError(f"an image of {width} x {height} pixels cannot be shown: {error}", path) from None
    config = backbone.model.config
    count = patches // processor.merge_size**2
    return [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]


def pixel_inputs(backbone: Backbone, paths: Sequence[str], most: int) -> dict[str, Tensor]:
    """pixel_values and image_grid_thw of images in order; `most` as in `image_block`."""
    processor = _checked(backbone)
    limits = _limits(processor, most)
    size = {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}
    # one at a time: each keeps its own size, and no more than one is in memory as large as it is stored
    made = [processor(images=[open_image(path)], return_tensors="pt", size=size) for path in paths]
    return {name: torch.cat([one[name] for one in made]) for name in ("pixel_values", "image_grid_thw")}


def _limits(processor: Any, most: int) -> dict[str, int]:
    area = (processor.patch_size * processor.merge_size) ** 2
    largest = min(int(processor.size["longest_edge"]), most * area)
    return {"min_pixels": min(int(processor.size["shortest_edge"]), largest), "max_pixels": largest}


def _image_processor(backbone: Backbone) -> Any:
    return getattr(backbone.processor, "image_processor", None)


def _checked(backbone: Backbone) -> Any:
    if not takes_images(backbone):
        raise ModelError(f"{backbone.name}: images need a Qwen-VL model with its image processor")
    return _image_processor(backbone)
