"""Results on disk under the hash of everything they depend on: whole or absent, and safe to delete."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import DataError, brief
from remind.core.files import read_json, sha256_json, write_tensors, write_text

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class Cache:
    """One file per entry: `<kind>/<hash of key>.safetensors` or `.json`. Several processes may share the folder.

    An entry that cannot be read counts as absent; a warning says so.

    Args:
        folder: made when the first entry is written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def path(self, kind: str, key: Any, suffix: str = ".safetensors") -> Path:
        """The file of an entry. `key` is any JSON value; equal values have equal files."""
        name = sha256_json(key)
        return self.folder / kind / name[:2] / f"{name[:40]}{suffix}"

    def has(self, kind: str, key: Any) -> bool:
        return self.path(kind, key).is_file()

    def read(self, kind: str, key: Any) -> tuple[dict[str, Tensor], Any] | None:
        """Tensors on the CPU, views of the file, and the JSON value written with them, or None."""
        return self._load(self.path(kind, key), _tensors)

    def write(self, kind: str, key: Any, tensors: dict[str, Tensor], about: Any = None) -> None:
        """Raises OSError where there is no room or no right to write; the entry is absent then."""
        write_tensors(self.path(kind, key), tensors, {"about": json.dumps(about, ensure_ascii=False)})

    def read_json(self, kind: str, key: Any) -> Any | None:
        """The JSON value of an entry, or None."""
        return self._load(self.path(kind, key, ".json"), lambda path: read_json(path)["value"])

    def write_json(self, kind: str, key: Any, value: Any) -> None:
        """Raises OSError where there is no room or no right to write."""
        write_text(self.path(kind, key, ".json"), json.dumps({"value": value}, ensure_ascii=False) + "\n")

    def json(self, kind: str, key: Any, compute: Callable[[], Any]) -> Any:
        """The JSON value of an entry, computed and written where it is absent."""
        value = self.read_json(kind, key)
        if value is None:
            value = compute()
            self.write_json(kind, key, value)
        return value

    def _load(self, path: Path, load: Callable[[Path], Any]) -> Any | None:
        from safetensors import SafetensorError

        try:
            return load(path) if path.is_file() else None
        except (DataError, SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is damaged (%s); it is computed again", path, brief(error))
            return None


def _tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        about = json.loads(file.metadata()["about"])
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118  (not a dict)
