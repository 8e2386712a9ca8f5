"""Atomic writing of files, and reading of JSON, safetensors and torch files with errors that name the file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from secrets import token_hex
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sae.errors import FormatError, SAEError, StorageError

_LARGEST_JSON = 1 << 26
#: How many times larger than a file what is packed into it may be: numbers of weights hardly pack.
_MOST_PACKED = 16


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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Raises StorageError if it cannot be written."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic(path) as temporary:
        save_file(contiguous, temporary)


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Whatever goes wrong within the block with a file of others, damaged or made to harm, is a FormatError."""
    try:
        yield
    except SAEError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or (str(error).strip() or repr(error)).splitlines()[0]
        raise FormatError(f"cannot be read: {reason}", path) from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises FormatError if it is missing, not one, or absurdly large."""
    with reading(path):
        if path.stat().st_size > _LARGEST_JSON:
            raise FormatError(f"is larger than {_LARGEST_JSON >> 20} MB", path)
        value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise FormatError("is not a JSON object", path)
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of safetensors, npz or torch, on the CPU; nothing is executed. Raises FormatError.

    Sizes in the file's headers are held against its own size before anything is allocated.
    """
    with reading(path):
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix not in (".npz", ".pt", ".pth"):
            raise FormatError("is not a file of tensors (.safetensors, .npz, .pt, .pth)", path)
        stored = _read_npz(path) if path.suffix == ".npz" else read_torch(path)
        found = (
            {name: one for name, one in stored.items() if isinstance(one, Tensor)} if isinstance(stored, dict) else {}
        )
        if not found:
            raise FormatError("holds no dictionary of tensors", path)
        # a few numbers may pretend to be many
        if any(tensor.nbytes > _MOST_PACKED * path.stat().st_size for tensor in found.values()):
            raise FormatError("holds tensors that are larger than the file", path)
        return found


def _read_npz(path: Path) -> dict[str, Tensor]:
    with _archive(path) as archive:
        for part in archive.infolist():
            with archive.open(part) as file:
                version = np.lib.format.read_magic(file)
                header = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
                shape, _, dtype = header(file)
                if math.prod(shape) * dtype.itemsize != part.file_size - file.tell():
                    raise FormatError(f"{part.filename} is not as large as {list(shape)} of {dtype}", path)
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _archive(path: Path) -> ZipFile:
    """A zip file that does not claim to hold much more than it can."""
    archive = ZipFile(path)
    if sum(part.file_size for part in archive.infolist()) > _MOST_PACKED * path.stat().st_size:
        raise FormatError("claims to hold far more than its size", path)
    return archive


def write_torch(path: Path, value: Any) -> None:
    """Write tensors and plain values with `torch.save`. Raises StorageError if the file cannot be written."""
    with atomic(path) as temporary:
        torch.save(value, temporary)


def read_torch(path: Path, device: torch.device | str = "cpu") -> Any:
    """What `torch.save` wrote, of tensors and plain values alone: nothing else is unpickled. Raises FormatError."""
    with reading(path), _archive(path):
        try:
            return torch.load(path, map_location=device, weights_only=True)
        except UnpicklingError:
            raise FormatError(
                "damaged, or holds more than tensors and plain values, which is not unpickled", path
            ) from None
