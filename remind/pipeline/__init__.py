"""From a dialogue file to states on disk: read, perceive (x0), ground (x1), reflect (x2), render, write."""

from remind.pipeline.build import build_states
from remind.pipeline.config import BuildStatesConfig
from remind.pipeline.record import Tally, record_of

__all__ = ["BuildStatesConfig", "Tally", "build_states", "record_of"]
