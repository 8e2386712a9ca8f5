"""Progressive Reflective Alignment (Section 4.5): distil the higher states of a question into the factual one."""

from remind.alignment.losses import Edge, Objective, PRALoss, edge_distance, pra_loss

__all__ = ["Edge", "Objective", "PRALoss", "edge_distance", "pra_loss"]
