"""Salience-guided memory grounding (Section 4.3): from the factual state x0 to the attentional state x1.

Read `ground` for the whole step, `guidance` for Eq. 3, `resonance` for Eq. 4, `salience` for Eq. 5, `selection` for the
blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remind.core import lazy_names
from remind.grounding.config import FusionConfig, GroundingConfig
from remind.grounding.guidance import guidance

if TYPE_CHECKING:
    from remind.grounding.ground import Grounder
    from remind.grounding.resonance import gaussian_smooth, token_resonance
    from remind.grounding.salience import turn_salience
    from remind.grounding.selection import select_blocks
    from remind.grounding.trace import GroundingTrace, TokenScore

__all__ = [
    "FusionConfig",
    "Grounder",
    "GroundingConfig",
    "GroundingTrace",
    "TokenScore",
    "gaussian_smooth",
    "guidance",
    "select_blocks",
    "token_resonance",
    "turn_salience",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Grounder": "ground",
        "GroundingTrace": "trace",
        "TokenScore": "trace",
        "gaussian_smooth": "resonance",
        "select_blocks": "selection",
        "token_resonance": "resonance",
        "turn_salience": "salience",
    },
)
