"""Results on disk under the hash of everything they depend on: whole or absent, and safe to delete."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import brief
from remind.core.files import sha256_json, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class Cache:
    """One file per entry: `<kind>/<hash of key>.safetensors`. Several processes may share the folder.

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

    def json(self, kind: str, key: Any, compute: Callable[[], Any]) -> Any:
        """The JSON value of an entry without tensors, computed and written where it is absent."""
        entry = self.read(kind, key)
        if entry is None:
            entry = {}, compute()
            self.write(kind, key, *entry)
        return entry[1]
