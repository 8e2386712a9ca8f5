"""Salience-guided memory grounding (Section 4.3): from the factual state x0 to the attentional state x1.

Read `ground` for the whole step, `resonance` for Eq. 3 to 5 and the selection of blocks, `codes` for Eq. 2 and where
tokens stand, `fusion` for what goes beyond the paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remind.core import lazy_names
from remind.grounding.config import FusionConfig, GroundingConfig

if TYPE_CHECKING:
    from remind.grounding.ground import Grounder, GroundingTrace
    from remind.grounding.resonance import gaussian_smooth, guidance, select_blocks, token_resonance, turn_salience

__all__ = [
    "FusionConfig",
    "Grounder",
    "GroundingConfig",
    "GroundingTrace",
    "gaussian_smooth",
    "guidance",
    "select_blocks",
    "token_resonance",
    "turn_salience",
]

_HOMES = {"Grounder": "ground", "GroundingTrace": "ground"}
__getattr__ = lazy_names(__name__, dict.fromkeys(filter(str.islower, __all__), "resonance") | _HOMES)
