"""Checkpoint folders of a run: transformers' `checkpoint-N`, of which trainer_state.json is written last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remind.core.errors import DataError
from remind.core.files import read_json

EMA = "ema.safetensors"


def checkpoints(run: str | Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first."""
    found = [path for path in Path(run).glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def kept(folder: Path) -> dict[str, Any] | None:
    """What `PRATrainer` keeps in a checkpoint (`RunState`); None: not written to its end, or of another trainer."""
    try:
        state: dict[str, Any] = read_json(folder / "trainer_state.json")["stateful_callbacks"]["RunState"]["attributes"]
    except (OSError, DataError, KeyError, TypeError):
        return None
    return state


def newest(run: str | Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    return next((path for path in reversed(checkpoints(run)) if kept(path)), None)
