"""What is computed once and kept on disk beside a run: files by the hash of all they follow from, whole or absent."""

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

from remind.alignment.failures import saving
from remind.core.files import atomic_path, sha256_json


@dataclass(frozen=True)
class Crew:
    """How processes divide work whose results all of them read.

    Attributes:
        rank, processes: this process and how many there are.
        wait: returns once every process has called it.
    """

    rank: int = 0
    processes: int = 1
    wait: Callable[[], Any] = lambda: None

    def own(self, count: int) -> range:
        """The pieces of `count` that this process computes."""
        return range(self.rank, count, self.processes)


class Cache:
    """A folder of safetensors, one file per piece. A file that cannot be read counts as absent, and is said."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, kind: str, key: Any) -> Path:
        """Where the piece of a key, any JSON value, is kept."""
        return self.folder / kind / f"{sha256_json(key)[:32]}.safetensors"

    def has(self, kind: str, key: Any) -> bool:
        return self.path(kind, key).is_file()

    def read(self, kind: str, key: Any) -> tuple[dict[str, Tensor], Any] | None:
        """Tensors, which stay on disk until they are used, and the JSON value kept with them; None if absent."""
        path = self.path(kind, key)
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

    def write(self, kind: str, key: Any, tensors: dict[str, Tensor], about: Any) -> None:
        """Raises ModelError where it cannot be written; then it is absent."""
        path = self.path(kind, key)
        with saving(path, "what is there already is used when the run starts again"), atomic_path(path) as temporary:
            save_file(
                {name: value.contiguous() for name, value in tensors.items()},
                temporary,
                {"about": json.dumps(about, ensure_ascii=False)},
            )


def ragged(rows: Sequence[Tensor], like: Tensor) -> dict[str, Tensor]:
    """Rows of unequal lengths as `values` and `lengths`; `like`: an empty row, for when there are none."""
    import torch

    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return {"values": torch.cat([like, *rows]), "lengths": lengths}


def unragged(values: Tensor, lengths: Tensor) -> list[Tensor]:
    """The rows of `ragged`, as views."""
    return list(values.split(lengths.tolist()))
