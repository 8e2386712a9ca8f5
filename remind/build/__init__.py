"""Dialogues to states: a `datasets.DatasetDict`, Parquet on disk, memory-mapped. Read `states` for the whole of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remind.build.config import BuildStatesConfig
from remind.core import lazy_names

if TYPE_CHECKING:
    from remind.build.states import build, build_states

__all__ = ["BuildStatesConfig", "build", "build_states"]

__getattr__ = lazy_names(__name__, {"build": "states", "build_states": "states"})
