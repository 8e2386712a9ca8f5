"""Progressive Reflective Alignment (Section 4.5): distil the higher states of a question into the factual one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remind.alignment.config import Edge, Objective

if TYPE_CHECKING:
    from remind.alignment.objective import PRALoss, pra_loss

__all__ = ["Edge", "Objective", "PRALoss", "pra_loss"]


def __getattr__(name: str) -> Any:
    # the loss needs torch, which command lines do not wait for
    if name in ("PRALoss", "pra_loss"):
        from remind.alignment import objective

        return getattr(objective, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
