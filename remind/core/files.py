"""Atomic writes (to a temporary name beside the target, then renamed), JSON files and hashes."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import DataError, RemindError
from sae.regular import check_regular

if TYPE_CHECKING:
    from torch import Tensor

#: Constants of Linux: paths are relative to the working directory; two names are exchanged.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def _storing(target: Path) -> Iterator[None]:
    """Make an OSError that names the file of whatever a library raises where a disk is full."""
    try:
        yield
    except RemindError:
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(target)) from None
    except Exception as error:
        # safetensors and tokenizers give the number in their message alone
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(target)) from None


@contextmanager
def atomic_path(target: str | Path) -> Iterator[Path]:
    """A temporary path beside `target` that becomes `target` when the block succeeds, and is removed otherwise.

    Raises:
        OSError: a full disk or no permission, whichever library writes there.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with _storing(target):
            yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp creates private files
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: str | Path) -> Iterator[Path]:
    """Like `atomic_path` for a whole folder. An existing target is replaced only when the block succeeds."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        with _storing(target):
            yield temporary
        temporary.chmod(0o777 & ~_umask())
        put_folder(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def put_folder(folder: Path, target: Path) -> None:
    """Rename a folder to `target` in the same parent folder, replacing an existing one.

    On Linux the two names are exchanged in one step, so that a killed process leaves one of them in place. Elsewhere
    there is a moment without either.

    Raises:
        OSError: no permission to write; the existing one stays or is put back.
    """
    if not target.exists():
        folder.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    if _swap(folder, target):
        folder.rename(old / "old")
    else:
        target.rename(old / "old")
        try:
            folder.rename(target)
        except OSError:
            (old / "old").rename(target)
            old.rmdir()
            raise
    shutil.rmtree(old)


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names in one step. False if the system cannot."""
    rename = _renameat2()
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


@cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    try:
        return ctypes.CDLL(None).renameat2  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None


def missing_folders(path: str | Path) -> list[Path]:
    """A folder and its parents that do not exist, the innermost first."""
    path = Path(path)
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders in order, up to one that is not empty or cannot be removed."""
    for folder in folders:
        if folder.exists():
            try:
                folder.rmdir()
            except OSError:
                return


def sweep(folder: str | Path, name: str = "?*") -> None:
    """Remove what killed processes left half-written in a folder; for its sole writer.

    Args:
        name: pattern of the names that they were to have.
    """
    # the names that `atomic_path`, `atomic_folder` and `put_folder` give
    for leftover in (*Path(folder).glob(f".{name}.????????.tmp"), *Path(folder).glob(f".{name}.????????.old")):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_rows(path: str | Path, rows: Iterable[Any]) -> None:
    """Write a JSON Lines file."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n")


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError on a full disk or without permission."""
    from safetensors.torch import save_file

    with atomic_path(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, dict(metadata or {}))


class DuplicateKeyError(ValueError):
    """A JSON object with a key twice, of which `json` would silently keep the last value."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`. Raises DuplicateKeyError."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(
                    f"the key {key[:80]!r} occurs twice in one object; which value counts is unclear"
                )
            seen.add(key)
    return result


def read_bytes(path: str | Path, most: int | None = None) -> bytes:
    """The content of a regular file. Raises DataError, also for one of more than `most` bytes before it is read."""
    check_regular(path, DataError)
    try:
        if most is not None and (size := Path(path).stat().st_size) > most:
            raise DataError(f"has {size:,} bytes; at most {most:,} are read", path)
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path) from None


def read_json(path: str | Path) -> Any:
    """Parse a JSON file.

    Raises:
        DataError: missing, no regular file, not UTF-8, not JSON, or an object with a key twice; names the file and, if
            possible, the line.
    """
    try:
        return json.loads(read_bytes(path).decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 (byte {error.start})", path) from None
    except RecursionError:
        raise DataError("nested too deeply", path) from None
    except DuplicateKeyError as error:
        raise DataError(str(error), path) from None
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg}", path, f"line {error.lineno}") from None
    except ValueError as error:  # a number with too many digits
        raise DataError(f"not JSON: {error}", path) from None


def sha256_file(path: str | Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def input_hashes(paths: Iterable[str | Path]) -> dict[str, str]:
    """SHA-256 of every file of `paths` by name; files of folders by their path inside. Repeated names are numbered."""
    hashes: dict[str, str] = {}
    for path in map(Path, paths):
        inside = path.is_dir()
        for file in sorted(path.rglob("*")) if inside else [path]:
            if file.is_file():
                name = file.relative_to(path).as_posix() if inside else file.name
                names = (name if number == 1 else f"{name} ({number})" for number in count(1))
                hashes[next(name for name in names if name not in hashes)] = sha256_file(file)
    return hashes


def tensors_hash(tensors: Mapping[str, Any]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes; other values are hashed as text."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {value}\n".encode())
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hash of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
