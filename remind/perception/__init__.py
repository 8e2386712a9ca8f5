"""Evidence State Perception (Section 4.2): dialogue and question to the factual state x0.

Read `perceive` for the whole step, `segment` for the segments, `retrieve` for Eq. 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remind.perception.config import PerceptionConfig, RetrieveConfig, SegmentConfig

if TYPE_CHECKING:
    from remind.perception.perceive import Perception

__all__ = ["Perception", "PerceptionConfig", "RetrieveConfig", "SegmentConfig"]


def __getattr__(name: str) -> Any:
    # imported on first use, so that configs can be read without torch
    if name == "Perception":
        from remind.perception.perceive import Perception

        return Perception
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
