"""Files that are whole or absent: every write goes to a temporary name beside its target and is renamed."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

#: Of Linux: paths start where the process is; two names swap what they stand for.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def atomic_path(target: str | Path) -> Iterator[Path]:
    """A temporary path beside `target` that becomes `target` when the block ends well, and vanishes otherwise."""
    target = Path(target)
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


@contextmanager
def atomic_folder(target: str | Path) -> Iterator[Path]:
    """Like `atomic_path` for a whole folder. An existing target is replaced only when the block ends well."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)
        put_folder(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_folder(made: Path, target: Path) -> None:
    """Give a folder its final name in the same parent folder; one that bears it goes once the new one is there.

    Where the system can, the two swap their names in one step, so that whoever is killed leaves one of them there.
    Elsewhere there is a moment in which neither is.

    Raises:
        OSError: no right to write; what was there stays or is put back.
    """
    if not target.exists():
        made.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    if _swap(made, target):
        made.rename(old / "old")
    else:
        target.rename(old / "old")
        try:
            made.rename(target)
        except OSError:
            (old / "old").rename(target)
            old.rmdir()
            raise
    shutil.rmtree(old)


def _swap(one: Path, other: Path) -> bool:
    """Let two names swap what they stand for, in one step. False if the system cannot do so."""
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
    """Which of a folder and those above it are not there, the innermost first."""
    path = Path(path)
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first, up to one that holds something or cannot be removed."""
    for folder in folders:
        if folder.exists():
            try:
                folder.rmdir()
            except OSError:
                return


def write_text(path: str | Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_rows(path: str | Path, rows: Iterable[Any]) -> None:
    """A JSONL file: each row a line."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n")


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file. Raises OSError where there is no room or no right to write."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic_path(path) as temporary:
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, dict(metadata or {}))
        except SafetensorError as error:  # what the library makes of a full disk
            raise OSError(errno.EIO, str(error), str(path)) from None


class KeyTwice(ValueError):
    """A JSON object that names a key twice, of which `json` would silently keep the last."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`. Raises KeyTwice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise KeyTwice(f"the key {key[:80]!r} stands twice in one object; which value counts is unclear")
            seen.add(key)
    return found


def read_json(path: str | Path) -> Any:
    """Parse a JSON file.

    Raises:
        DataError: it is missing, no regular file, not UTF-8 or not JSON, or an object names a key twice; names file
            and, where it can, line.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(mode := path.stat().st_mode):
            what = "is a folder, a file was expected" if stat.S_ISDIR(mode) else "is not a regular file"
            raise DataError(what, path)
        return json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise DataError("no such file", path) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path) from None
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 (byte {error.start})", path) from None
    except RecursionError:
        raise DataError("nested too deeply", path) from None
    except KeyTwice as error:
        raise DataError(str(error), path) from None
    except ValueError as error:
        line = getattr(error, "lineno", None)
        raise DataError(
            f"not JSON: {getattr(error, 'msg', error)}", path, None if line is None else f"line {line}"
        ) from None


def sha256_file(path: str | Path) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def input_hashes(paths: Iterable[str | Path]) -> dict[str, str]:
    """SHA-256 of every file among `paths`, by name; of those in a folder, by the path inside it.

    Of several that bear one name the later ones bear a number, so that none stands for another.
    """
    found: dict[str, str] = {}
    for path in map(Path, paths):
        inside = path.is_dir()
        for file in sorted(path.rglob("*")) if inside else [path]:
            if file.is_file():
                name = file.relative_to(path).as_posix() if inside else file.name
                names = (name if number == 1 else f"{name} ({number})" for number in count(1))
                found[next(name for name in names if name not in found)] = sha256_file(file)
    return found


def tensors_hash(tensors: Mapping[str, Any]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes; entries that are no tensors count by their text."""
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
