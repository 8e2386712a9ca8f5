"""Evidence State Perception (Section 4.2): dialogue and question to the factual state x0.

Read `perceive` for the whole step, `index` for segments and cues, `retrieve` for Eq. 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remind.core import lazy_names
from remind.perception.config import PerceptionConfig, RetrieveConfig, SegmentConfig

if TYPE_CHECKING:
    from remind.perception.perceive import Perception

__all__ = ["Perception", "PerceptionConfig", "RetrieveConfig", "SegmentConfig"]

__getattr__ = lazy_names(__name__, {"Perception": "perceive"})
