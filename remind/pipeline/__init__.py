"""From a dialogue file to states on disk: read, perceive (x0), ground (x1), reflect (x2), render, write."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remind.pipeline.config import BuildStatesConfig

if TYPE_CHECKING:
    from remind.pipeline.build import build_states
    from remind.pipeline.record import Tally, record_of

__all__ = ["BuildStatesConfig", "Tally", "build_states", "record_of"]
_MODULES = {"Tally": "record", "build_states": "build", "record_of": "record"}


def __getattr__(name: str) -> Any:
    # imported on first use, so that configs can be read without torch
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
