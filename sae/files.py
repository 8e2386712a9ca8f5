"""Atomic writing of files, and reading of JSON and safetensors with errors that name the file."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sae.errors import FormatError, StorageError
from sae.regular import check_regular


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Turn failures of the system inside the block into a StorageError that names `path`."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        # safetensors gives the number in its message only
        if number is None and (match := re.search(r"\(os error (\d+)\)", str(error))):
            number = int(match[1])
        reason = str(error) if number is None else os.strerror(number)
        raise StorageError(f"cannot be written ({reason}); choose another folder", path, number) from None


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `target` when the block ends without an error and is removed otherwise.

    It lies in a temporary folder beside `target`. Raises StorageError if it cannot be written; `target` is unchanged.
    """
    with storage(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        try:
            temporary = folder / target.name
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            # some writers make their files private; this is the mode open() gives
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)
            temporary.replace(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path, names: str) -> None:
    """Remove temporaries of killed processes for files in `folder` that match the glob `names`; for a sole writer."""
    for leftover in folder.glob(f".{names}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON. Raises FormatError for values JSON cannot hold, StorageError if the file cannot be written."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise FormatError(f"cannot be written as JSON ({error})", path) from None
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises FormatError if it is missing, no regular file, or not one."""
    check_regular(path)
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"not readable as JSON ({error})", path) from None
    if not isinstance(value, dict):
        raise FormatError("is not a JSON object", path)
    return value


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. Raises StorageError if it cannot be written."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic(path) as temporary:
        save_file(contiguous, temporary, metadata=None if metadata is None else dict(metadata))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file, on the CPU. Raises FormatError if it is missing or damaged."""
    check_regular(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"damaged, or not a safetensors file ({error})", path) from None
