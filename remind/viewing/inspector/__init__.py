"""Pages that show grounding: tokens by resonance, their features, blocks, gold evidence, and the three states."""

from remind.core import lazy_names
from remind.viewing.config import InspectConfig

__all__ = ["InspectConfig", "inspect_grounding"]
__getattr__ = lazy_names(__name__, {"inspect_grounding": "page"})
