"""The files of a dialogue's index: pairs of a JSON and a safetensors file, mapped into memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from remind.core.errors import DataError
from remind.core.files import atomic_path, read_json, sha256_json, write_json

FORMAT_VERSION = 2
T = TypeVar("T")
_log = logging.getLogger(__name__)

Pair = tuple[dict[str, Any], dict[str, Tensor]]


class IndexFolder:
    """The files of one dialogue's index, by name. Several processes may read and write it: they write the same bytes.

    Args:
        path: the folder; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def load(self, name: str, parse: Callable[[dict[str, Any], dict[str, Tensor]], T]) -> T | None:
        """What `parse` makes of the pair of that name; None, logged, where it is missing or cannot be used.

        The tensors are views of the file: pages are read when they are touched.
        """
        if self.path is None or not (self.path / f"{name}.json").is_file():
            return None
        try:
            text = read_json(self.path / f"{name}.json")
            with safe_open(self.path / f"{name}.safetensors", framework="pt") as file:
                stamp = (file.metadata() or {}).get("json")
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if stamp != sha256_json(text):
                raise DataError("text and tensors do not belong together")
            if text.get("format_version") != FORMAT_VERSION:
                raise DataError(f"it has format version {text.get('format_version')}, not {FORMAT_VERSION}")
            return parse(text, tensors)
        except (DataError, SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            _log.warning("%s: %s cannot be used (%s); it is built again", self.path, name, reason)
            return None

    def write(self, name: str, text: dict[str, Any], tensors: dict[str, Tensor]) -> Pair:
        """Write a pair and return it, its tensors as views of the file, so that memory holds no second copy."""
        text = {"format": "remind-index", "format_version": FORMAT_VERSION, **text}
        if self.path is None:
            return text, tensors
        with atomic_path(self.path / f"{name}.safetensors") as temporary:
            contiguous = {key: value.contiguous() for key, value in tensors.items()}
            save_file(contiguous, temporary, metadata={"json": sha256_json(text)})
        # last: without it the tensors are not read
        write_json(self.path / f"{name}.json", text)
        return self.load(name, lambda *pair: pair) or (text, tensors)
