"""Files that are whole or absent, and the reading of JSON and safetensors with errors that name the file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sae.errors import FormatError


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that becomes `target` when the block ends well, and vanishes otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes files private; give what an ordinary open() would have given
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with atomic(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU. Raises FormatError where it is missing or damaged."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError:
        raise FormatError("no such file", path) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"damaged, or not a safetensors file ({error})", path) from None
    return tensors
