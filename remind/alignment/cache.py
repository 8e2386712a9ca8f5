"""Tensors that the processes of a run compute once and share on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from remind.alignment.checkpoint import saving
from remind.core import cache
from remind.core.progress import track

#: Tensors by name and a JSON value.
Entry = tuple[dict[str, Tensor], Any]


@dataclass(frozen=True)
class Ranks:
    """How processes divide work whose results all of them read; `wait` returns once every process has called it."""

    rank: int = 0
    processes: int = 1
    wait: Callable[[], Any] = lambda: None


class Cache(cache.Cache):
    """The content-hash cache of a run, filled by all of its processes together."""

    def __init__(self, folder: str | Path) -> None:
        # views of the files: targets of a whole run need not fit into memory
        super().__init__(folder, checked=False)

    def entries(
        self,
        kind: str,
        keys: Sequence[Any],
        compute: Callable[[int], Entry],
        ranks: Ranks = Ranks(),
        description: str | None = "compute",
    ) -> list[Entry]:
        """The entries of all keys, in order; what is missing is computed once, each process computing its share.

        Args:
            kind: subfolder. keys: JSON values.
            compute: gives the entry of a key by its place in `keys`.
            description: of the progress bar; None: no bar.

        Raises:
            ModelError: an entry cannot be written; then it is absent.
        """
        own = [number for number in range(ranks.rank, len(keys), ranks.processes) if not self.has(kind, keys[number])]
        for number in own if description is None else track(own, description, len(own)):
            self._put(kind, keys[number], compute(number))
        ranks.wait()
        entries = []
        for number, key in enumerate(keys):
            if (entry := self.read(kind, key)) is None:
                self._put(kind, key, entry := compute(number))
            entries.append(entry)
        return entries

    def _put(self, kind: str, key: Any, entry: Entry) -> None:
        with saving(self.path(kind, key), "what is there already is used when the run starts again"):
            self.write(kind, key, *entry)
