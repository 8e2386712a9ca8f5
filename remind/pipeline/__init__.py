"""From a dialogue file to states on disk: read, perceive (x0), ground (x1), reflect (x2), render, write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remind.core import lazy_names
from remind.pipeline.config import BuildStatesConfig

if TYPE_CHECKING:
    from remind.pipeline.build import build_states
    from remind.pipeline.record import Tally, record_of

__all__ = ["BuildStatesConfig", "Tally", "build_states", "record_of"]

__getattr__ = lazy_names(__name__, {"Tally": "record", "build_states": "build", "record_of": "record"})
