"""Salience-guided memory grounding (Section 4.3): from the factual state x0 to the attentional state x1."""

from remind.grounding.config import GroundingConfig
from remind.grounding.ground import Grounder
from remind.grounding.guidance import guidance
from remind.grounding.resonance import gaussian_smooth, token_resonance
from remind.grounding.salience import turn_salience
from remind.grounding.selection import select_blocks
from remind.grounding.trace import GroundingTrace, TokenScore

__all__ = [
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
