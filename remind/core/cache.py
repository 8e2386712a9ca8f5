"""Results on disk under the hash of everything they depend on: whole or absent, and safe to delete."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import DataError
from remind.core.files import read_json, sha256_json, tensors_hash, write_tensors, write_text

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_DAMAGED = "%s is damaged (%s); it is computed again"


class Cache:
    """One file per entry: `<kind>/<hash of key>.safetensors` or `.json`. Several processes may share the folder.

    An entry that cannot be read, or is not what was written, counts as absent; a warning says so.

    Args:
        folder: made when the first entry is written.
        checked: compare the SHA-256 of an entry's tensors when it is read. Without it tensors stay views of the file,
            whose pages are read when they are used.
    """

    def __init__(self, folder: str | Path, checked: bool = True) -> None:
        self.folder, self.checked = Path(folder).expanduser(), checked

    def path(self, kind: str, key: Any, suffix: str = ".safetensors") -> Path:
        """The file of an entry. `key` is any JSON value; equal values have equal files."""
        name = sha256_json(key)
        return self.folder / kind / name[:2] / f"{name[:40]}{suffix}"

    def has(self, kind: str, key: Any) -> bool:
        return self.path(kind, key).is_file()

    def read(self, kind: str, key: Any) -> tuple[dict[str, Tensor], Any] | None:
        """Tensors on the CPU and the JSON value written with them, or None."""
        from safetensors import SafetensorError, safe_open

        path = self.path(kind, key)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            if self.checked and metadata["sha256"] != tensors_hash(tensors):
                raise DataError("its content has changed since it was written")
            return tensors, json.loads(metadata["about"])
        except (DataError, SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            _log.warning(_DAMAGED, path, " ".join(str(error).split()))
            return None

    def write(self, kind: str, key: Any, tensors: dict[str, Tensor], about: Any = None) -> None:
        """Raises OSError where there is no room or no right to write; the entry is absent then."""
        metadata = {"about": json.dumps(about, ensure_ascii=False)}
        if self.checked:
            metadata["sha256"] = tensors_hash(tensors)
        write_tensors(self.path(kind, key), tensors, metadata)

    def read_json(self, kind: str, key: Any) -> Any | None:
        """The JSON value of an entry, or None."""
        path = self.path(kind, key, ".json")
        if not path.is_file():
            return None
        try:
            entry = read_json(path)
            if sha256_json(entry["value"]) != entry["sha256"]:
                raise DataError("its content has changed since it was written")
            return entry["value"]
        except (DataError, OSError, KeyError, TypeError) as error:
            _log.warning(_DAMAGED, path, " ".join(str(error).split()))
            return None

    def write_json(self, kind: str, key: Any, value: Any) -> None:
        """Raises OSError where there is no room or no right to write."""
        entry = {"sha256": sha256_json(value), "value": value}
        write_text(self.path(kind, key, ".json"), json.dumps(entry, ensure_ascii=False) + "\n")

    def json(self, kind: str, key: Any, compute: Callable[[], Any]) -> Any:
        """The JSON value of an entry, computed and written where it is absent."""
        value = self.read_json(kind, key)
        if value is None:
            value = compute()
            self.write_json(kind, key, value)
        return value
