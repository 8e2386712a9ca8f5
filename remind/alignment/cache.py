"""Tensors computed once and kept on disk: safetensors files named by the hash of all they follow from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from remind.alignment.checkpoint import saving
from remind.core.files import atomic_path, sha256_json
from remind.core.progress import track

#: Tensors by name and a JSON value.
Entry = tuple[dict[str, Tensor], Any]


@dataclass(frozen=True)
class Ranks:
    """How processes divide work whose results all of them read; `wait` returns once every process has called it."""

    rank: int = 0
    processes: int = 1
    wait: Callable[[], Any] = lambda: None


class Cache:
    """A folder of safetensors, one file per entry, written whole or not at all."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def entries(
        self,
        kind: str,
        keys: Sequence[Any],
        compute: Callable[[int], Entry],
        ranks: Ranks = Ranks(),
        description: str = "compute",
    ) -> list[Entry]:
        """The entries of all keys, in order; what is missing is computed once, each process computing its share.

        A file that cannot be read is reported and computed again. Tensors stay on disk until they are used.

        Args:
            kind: subfolder. keys: JSON values.
            compute: gives the entry of a key by its place in `keys`.

        Raises:
            ModelError: an entry cannot be written; then it is absent.
        """
        own = [n for n in range(ranks.rank, len(keys), ranks.processes) if not self._path(kind, keys[n]).is_file()]
        for number in track(own, description, len(own)):
            self._write(self._path(kind, keys[number]), compute(number))
        ranks.wait()
        entries = []
        for number, key in enumerate(keys):
            path = self._path(kind, key)
            if (entry := self._read(path)) is None:
                self._write(path, entry := compute(number))
            entries.append(entry)
        return entries

    def _path(self, kind: str, key: Any) -> Path:
        return self.folder / kind / f"{sha256_json(key)[:32]}.safetensors"

    def _read(self, path: Path) -> Entry | None:
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                about = json.loads(file.metadata()["about"])
                return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118  (not a dict)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            line = " ".join(str(error).split())
            print(f"warning: {path} is damaged and is computed again: {line}", file=sys.stderr)
            path.unlink(missing_ok=True)
            return None

    def _write(self, path: Path, entry: Entry) -> None:
        tensors, about = entry
        with saving(path, "what is there already is used when the run starts again"), atomic_path(path) as temporary:
            save_file(
                {name: value.contiguous() for name, value in tensors.items()},
                temporary,
                {"about": json.dumps(about, ensure_ascii=False)},
            )
