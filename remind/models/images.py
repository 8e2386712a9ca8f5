"""Image files as a model is shown them: sized by qwen-vl-utils, as blocks of image tokens and as tensors."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from remind.core.errors import ImagePathError, ModelError
from remind.models.chat import Message, image_size, open_image

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    from remind.models.backbone import Backbone

#: What qwen-vl-utils imports for videos, which are not supported.
_FOR_VIDEOS = ("torchvision", "torchvision.io", "torchvision.transforms")


@cache
def _qwen_vl_utils() -> Any:
    """The package, opened when the first image is shown.

    It imports torchvision for videos alone. Where torchvision is missing or does not load (its wheels do not beside a
    CPU build of torch), empty modules take its place for the time of the import, and nothing of it stays in
    `sys.modules`: whoever else imports either package finds what is installed.
    """
    try:
        import_module("torchvision.transforms")
    except (ImportError, RuntimeError, OSError):
        pass
    else:
        return import_module("qwen_vl_utils")
    before = set(sys.modules)
    stand_ins = {name: ModuleType(name) for name in _FOR_VIDEOS}
    root, video, transforms = stand_ins.values()
    vars(root).update(io=video, transforms=transforms)
    vars(transforms).update(InterpolationMode=None)
    replaced = {name: sys.modules.pop(name, None) for name in _FOR_VIDEOS}
    sys.modules.update(stand_ins)
    try:
        return import_module("qwen_vl_utils")
    finally:
        for name in [name for name in sys.modules if name.startswith("qwen_vl_utils") and name not in before]:
            del sys.modules[name]
        for name, module in replaced.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def takes_images(backbone: Backbone) -> bool:
    """Whether images can be shown to the backbone: a Qwen-VL model with its image processor."""
    return backbone.kind == "vlm" and hasattr(getattr(backbone.processor, "image_processor", None), "merge_size")


def image_processor(backbone: Backbone) -> Any:
    """The backbone's. Raises ModelError for a backbone without images."""
    if not takes_images(backbone):
        raise ModelError(f"{backbone.name}: images need a Qwen-VL model with its image processor")
    return backbone.processor.image_processor


def pixel_limits(processor: Any, most: int | None = None) -> dict[str, int]:
    """`min_pixels` and `max_pixels` of a message part: the processor's, and at most `most` image tokens."""
    least, largest = int(processor.size["shortest_edge"]), int(processor.size["longest_edge"])
    if most is not None:
        largest = min(largest, most * (processor.patch_size * processor.merge_size) ** 2)
    return {"min_pixels": min(least, largest), "max_pixels": largest}


def image_block(backbone: Backbone, path: str, most: int) -> list[int]:
    """The tokens of an image, between its two marks: at most about `most`, for which the image is made smaller.

    Only the header of the file is read.

    Raises:
        ImagePathError: an image that is missing, cannot be read, or is far longer than it is wide.
        ModelError: a backbone without images, or no qwen-vl-utils.
    """
    processor = image_processor(backbone)
    width, height = image_size(path)
    factor = processor.patch_size * processor.merge_size
    try:
        sides = _qwen_vl_utils().smart_resize(height, width, factor, **pixel_limits(processor, most))
    except ValueError as error:  # extreme aspect ratios
        raise _unusable(width, height, error, path) from None
    if not all(sides):
        raise _unusable(width, height, f"too narrow for {most} tokens", path)
    config = backbone.model.config
    count = sides[0] * sides[1] // factor**2
    return [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]


def pixel_inputs(backbone: Backbone, paths: Sequence[str], most: int) -> dict[str, Tensor]:
    """pixel_values and image_grid_thw of images in order; `most` and errors as in `image_block`."""
    processor = image_processor(backbone)
    limits = pixel_limits(processor, most)
    return image_inputs(processor, [{"type": "image", "image": path, **limits} for path in paths])


def image_inputs(processor: Any, parts: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """pixel_values [patches, values] and image_grid_thw [images, 3] of the image parts of messages, in order.

    Parts without `min_pixels`, `max_pixels` or sides of their own get the limits of the processor. Raises as
    `read_image`.
    """
    limits = pixel_limits(processor)
    # one at a time, so that only one is in memory at its stored size
    found = [
        processor(images=[read_image({**limits, **part}, processor.patch_size)], do_resize=False, return_tensors="pt")
        for part in parts
    ]
    return {name: torch.cat([one[name] for one in found]) for name in ("pixel_values", "image_grid_thw")}


def image_parts(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The parts of a chat that are images, in order. Raises ModelError for a video."""
    parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
    if any("video" in part or part.get("type") == "video" for part in parts):
        raise ModelError("videos are not supported; give single frames as images")
    return [part for part in parts if "image" in part or part.get("type") == "image"]


def read_image(part: Mapping[str, Any], patch_size: int) -> PILImage:
    """The image of a message's part, in RGB, as `process_vision_info` of qwen-vl-utils sizes it.

    Unlike there it is a local file or a PIL image, and nothing is fetched (`open_image`).

    Raises:
        ImagePathError: an image that is missing, not a local file, cannot be read, or is far longer than wide.
        ModelError: no qwen-vl-utils.
    """
    path = part.get("image")
    image = open_image(path)
    messages = [{"role": "user", "content": [{**part, "image": image}]}]
    try:
        images, _ = _qwen_vl_utils().process_vision_info(messages, image_patch_size=patch_size)
    except (ValueError, AssertionError) as error:
        raise _unusable(image.width, image.height, error, path if isinstance(path, str) else None) from None
    found: PILImage = images[0]
    return found


def _unusable(width: int, height: int, why: object, path: str | None) -> ImagePathError:
    return ImagePathError(f"an image of {width} x {height} pixels cannot be shown: {why}", path)


def thumbnail(path: str, side: int) -> str:
    """The image of a local file, at most `side` pixels wide and high, as a data: URL. Raises ImagePathError."""
    picture = open_image(path)
    picture.thumbnail((side, side))
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")
