"""Checkpoint folders of a run: transformers' `checkpoint-N` with our files, of which `complete` is written last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remind.core.errors import ModelError

#: Files beside transformers' own.
COMPLETE, OURS, EMA = "complete", "pra.json", "ema.safetensors"


def checkpoints(run: str | Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first."""
    found = [path for path in Path(run).glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    return (folder / COMPLETE).is_file()


def newest(run: str | Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    return next((path for path in reversed(checkpoints(run)) if is_whole(path)), None)


@contextmanager
def read_from(folder: Path) -> Iterator[None]:
    """Raise ModelError for a damaged file of a checkpoint, or one that holds more than tensors and plain values."""
    try:
        yield
    except Exception as error:  # of safetensors, torch and its restricted unpickler
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{folder}: a file of it cannot be read ({reason}); remove it to go on from an older one"
        ) from None
