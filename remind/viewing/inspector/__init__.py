"""Pages that show grounding: tokens by resonance, their features, blocks, gold evidence, and the three states."""

from remind.viewing.config import InspectConfig
from remind.viewing.inspector.run import inspect_grounding

__all__ = ["InspectConfig", "inspect_grounding"]
