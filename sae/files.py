"""Files that are whole or absent, and the reading of JSON and safetensors with errors that name the file."""

from __future__ import annotations

import errno
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

_ADVICE = {
    errno.ENOSPC: "free some space or choose another folder",
    errno.EDQUOT: "free some of your quota or choose another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or choose another folder",
    errno.EACCES: "make the folder writable or choose another",
    errno.EPERM: "make the folder writable or choose another",
    errno.EROFS: "make the folder writable or choose another",
    errno.ENOTDIR: "a part of the path is a file; choose another folder",
}


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Failures of the system inside the block become a StorageError that names `path`."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        number, reason = _cause(error)
        # a SafetensorError without a number is no failure of the system
        if number is None and isinstance(error, SafetensorError):
            raise
        advice = _ADVICE.get(number or 0, "see that the disk is in order, or choose another folder")
        raise StorageError(f"cannot be written ({reason}); {advice}", path, number) from None


def _cause(error: Exception) -> tuple[int | None, str]:
    """Number and words of the system's error; safetensors gives both in its message only."""
    number = getattr(error, "errno", None)
    found = re.search(r"\(os error (\d+)\)", str(error))
    if number is None and found:
        number = int(found[1])
    return number, str(error) if number is None else os.strerror(number)


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """A temporary path that becomes `target` when the block ends well, and vanishes otherwise.

    It lies in a temporary folder beside `target`, which takes in what writers leave beside their file when killed.

    Raises:
        StorageError: it cannot be written; `target` is then as it was.
    """
    with storage(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        try:
            temporary = folder / target.name
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            # some writers make their files private; give what an ordinary open() would have given
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)
            temporary.replace(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path, names: str) -> None:
    """Remove what killed processes left of files in `folder` whose name matches the glob pattern `names`.

    For the only writer of these files: what is being written at this moment goes too.
    """
    for left in folder.glob(f".{names}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Raises FormatError for what JSON cannot hold, StorageError where the file cannot be written."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise FormatError(f"cannot be written as JSON ({error})", path) from None
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FormatError where it is missing or is not one."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise FormatError("no such file", path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"not readable as JSON ({error})", path) from None
    if not isinstance(value, dict):
        raise FormatError("is not a JSON object", path)
    return value


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file. Raises StorageError where it cannot be written."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic(path) as temporary:
        save_file(ready, temporary, metadata=None if metadata is None else dict(metadata))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU. Raises FormatError where it is missing or damaged."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError:
        raise FormatError("no such file", path) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"damaged, or not a safetensors file ({error})", path) from None
    return tensors
