"""Progressive Reflective Alignment (Section 4.5): distil the higher states of a question into the factual one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remind.alignment.config import Edge, Objective
from remind.core import lazy_names

if TYPE_CHECKING:
    from remind.alignment.objective import PRALoss, pra_loss

__all__ = ["Edge", "Objective", "PRALoss", "pra_loss"]

__getattr__ = lazy_names(__name__, {"PRALoss": "objective", "pra_loss": "objective"})
