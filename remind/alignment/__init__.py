"""Progressive Reflective Alignment (Section 4.5): distil the higher states of a question into the factual one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remind.alignment.config import Edge, Objective
from remind.core import lazy_names

if TYPE_CHECKING:
    from remind.alignment.arguments import PRAConfig
    from remind.alignment.callbacks import CollapseGuard, Probe
    from remind.alignment.objective import PRALoss, pra_loss
    from remind.alignment.trainer import PRATrainer

__all__ = ["CollapseGuard", "Edge", "Objective", "PRAConfig", "PRALoss", "PRATrainer", "Probe", "pra_loss"]

_LAZY = {"CollapseGuard": "callbacks", "PRAConfig": "arguments", "PRALoss": "objective", "PRATrainer": "trainer"}
__getattr__ = lazy_names(__name__, {**_LAZY, "Probe": "callbacks", "pra_loss": "objective"})
