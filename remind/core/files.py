"""Atomic writes (to a temporary name beside the target, then renamed), JSON files and hashes."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from remind.core.errors import DataError, RemindError, brief

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


@contextmanager
def atomic_path(target: str | Path) -> Iterator[Path]:
    """A temporary path beside `target` that becomes `target` when the block succeeds, and is removed otherwise.

    It is an empty file at first; where the block makes a folder of it, that replaces a whole folder.

    Raises:
        OSError: a full disk or no permission, whichever library writes there, with the name of the target.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (target.with_name(f".{target.name}.{token_hex(4)}.{ending}") for ending in ("tmp", "old"))
    temporary.touch()
    mode = temporary.stat().st_mode
    try:
        yield temporary
        if temporary.is_dir():
            follow_umask(temporary)
            if target.exists():
                target.rename(old)
            temporary.rename(target)
            _remove(old)
        else:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.chmod(mode)  # safetensors writes private files
            temporary.replace(target)
    except BaseException as error:
        _remove(temporary)
        # safetensors and tokenizers give the number in their message alone
        said = re.search(r"\(os error (\d+)\)", str(error))
        number = int(said[1]) if said else getattr(error, "errno", None)
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        if isinstance(error, RemindError) or getattr(error, "filename", None) or number is None or not full:
            raise
        raise OSError(number, os.strerror(number), str(target)) from None


def follow_umask(folder: Path) -> None:
    """Make weights in a new folder as open as the folder is: safetensors writes private files."""
    for file in folder.rglob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)


@contextmanager
def atomic_folder(target: str | Path) -> Iterator[Path]:
    """`atomic_path` for a whole folder. An existing target is replaced only when the block succeeds."""
    with atomic_path(target) as temporary:
        temporary.unlink()
        temporary.mkdir()
        yield temporary


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # no link
    path.unlink(missing_ok=True)


@contextmanager
def none_empty(folder: str | Path) -> Iterator[None]:
    """Where the block makes a folder, or its parents, and leaves them empty, for example by an error, they go again."""
    folder = Path(folder)
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        yield
    finally:
        for one in new:
            with suppress(OSError):
                one.rmdir()


def sweep(folder: str | Path) -> None:
    """Remove what killed processes left half-written in a folder; for its sole writer."""
    for ending in ("tmp", "old"):  # `atomic_path`
        for leftover in Path(folder).glob(f".?*.????????.{ending}"):
            _remove(leftover)


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


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`. Raises ValueError for a key twice, of which `json` would keep the last."""
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:80]!r} occurs twice in one object; which value counts is unclear")
    return result


def opened(path: str | Path) -> io.BufferedReader:
    """A regular file to be read. Raises DataError."""
    path = Path(path)
    try:
        if path.is_file():
            return path.open("rb")
        raise DataError("is not a regular file; a file was expected" if path.exists() else "no such file", path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DataError(f"cannot be read: {getattr(error, 'strerror', None) or error}", path) from None


def read_bytes(path: str | Path) -> bytes:
    """The content of a regular file. Raises DataError."""
    with opened(path) as file:
        return file.read()


def read_json(path: str | Path) -> Any:
    """Parse a JSON file.

    Raises:
        DataError: missing, no regular file, not UTF-8, not JSON, or an object with a key twice; names the file and, if
            possible, the line.
    """
    try:
        return json.loads(read_bytes(path).decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg}", path, f"line {error.lineno}") from None
    # not UTF-8, a key twice, a number of too many digits, lists in lists in lists
    except (ValueError, RecursionError) as error:
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


def sha256_json(value: Any) -> str:
    """Hash of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


class Cache:
    """Results on disk under the hash of everything they depend on: whole or absent, and safe to delete.

    One file per entry: `<kind>/<hash of key>.safetensors`. Several processes may share the folder.

    An entry that cannot be read counts as absent; a warning says so.

    Args:
        folder: made when the first entry is written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def path(self, kind: str, key: Any) -> Path:
        """The file of an entry. `key` is any JSON value; equal values have equal files."""
        name = sha256_json(key)
        return self.folder / kind / name[:2] / f"{name[:40]}.safetensors"

    def read(self, kind: str, key: Any) -> tuple[dict[str, Tensor], Any] | None:
        """Tensors on the CPU, views of the file, and the JSON value written with them, or None."""
        from safetensors import SafetensorError, safe_open

        path = self.path(kind, key)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                about = json.loads(file.metadata()["about"])
                return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118  (not a dict)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is damaged (%s); it is computed again", path, brief(error))
            return None

    def write(self, kind: str, key: Any, tensors: dict[str, Tensor], about: Any = None) -> None:
        """Raises OSError where there is no room or no right to write; the entry is absent then."""
        write_tensors(self.path(kind, key), tensors, {"about": json.dumps(about, ensure_ascii=False)})
