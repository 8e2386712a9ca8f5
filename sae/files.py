"""Atomic writing of files, and reading of JSON, safetensors and torch files with errors that name the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sae.errors import FormatError, StorageError


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`, which it becomes if the block ends without an error.

    Raises StorageError if it cannot be written; `target` is then unchanged.
    """
    temporary = target.with_name(f".{target.name}.{token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)  # safetensors makes its files private
        temporary.replace(target)
    # RuntimeError: torch's on a full disk
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"cannot be written ({reason}); choose another folder", target) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write JSON. Raises FormatError for values JSON cannot hold, StorageError if the file cannot be written."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise FormatError(f"cannot be written as JSON ({error})", path) from None
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. Raises StorageError if it cannot be written."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic(path) as temporary:
        save_file(contiguous, temporary, metadata=None if metadata is None else dict(metadata))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises FormatError if it is missing, or not one."""
    value = parsed(path, lambda file: json.loads(file.read_bytes()))
    if not isinstance(value, dict):
        raise FormatError("is not a JSON object", path)
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file, on the CPU. Raises FormatError if it is missing or damaged."""
    tensors: dict[str, Tensor] = parsed(path, load_file)
    return tensors


def parsed(path: Path, read: Callable[[Path], Any]) -> Any:
    """What `read` makes of a file. Raises FormatError for one that is missing or damaged."""
    try:
        return read(path)
    except (OSError, EOFError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FormatError(f"cannot be read: {reason}", path) from None


def write_torch(path: Path, value: Any) -> None:
    """Write tensors and plain values with `torch.save`. Raises StorageError if the file cannot be written."""
    with atomic(path) as temporary:
        torch.save(value, temporary)


def read_torch(path: Path, device: torch.device | str = "cpu") -> Any:
    """What `torch.save` wrote, of tensors and plain values alone: nothing else is unpickled. Raises FormatError."""
    try:
        return parsed(path, lambda file: torch.load(file, map_location=device, weights_only=True))
    except Exception as error:  # of torch's restricted unpickler
        if type(error).__name__ != "UnpicklingError":
            raise
        raise FormatError(f"damaged, or holds more than tensors ({str(error).splitlines()[0]})", path) from None
