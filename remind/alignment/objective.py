"""What alignment minimises: Eq. 6-7 as a list of edges between levels, and where their teachers come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from remind.core.errors import ConfigError

N_LEVELS = 3


@dataclass(frozen=True)
class Edge:
    """One transition of Eq. 6: the student's distribution is drawn towards the teacher's."""

    student: int
    """Level that learns: 0, 1 or 2."""
    teacher: int
    """Level it learns from."""
    gamma: float = 3.0
    """Weight γ of this transition in Eq. 7; 0: only watched."""
    alpha: float = 0.5
    """Share α of KL(teacher || student); the rest is KL(student || teacher)."""

    def __post_init__(self) -> None:
        if not (0 <= self.student < N_LEVELS and 0 <= self.teacher < N_LEVELS) or self.student == self.teacher:
            raise ConfigError(
                f"edge {self.student} -> {self.teacher}: student and teacher are two of the levels 0, 1, 2"
            )
        if not (math.isfinite(self.gamma) and self.gamma >= 0):
            raise ConfigError(f"gamma of edge {self.name} is {self.gamma}; it must be 0 or more")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha of edge {self.name} is {self.alpha}; it must lie in [0, 1]")

    @property
    def name(self) -> str:
        """Student and teacher as they stand in metrics: "01"."""
        return f"{self.student}{self.teacher}"


@dataclass(frozen=True)
class Objective:
    """What is minimised: λ_hard Σ CE + (1 − λ_hard) τ² Σ γ D (Eq. 7), per sample, averaged over answer positions."""

    lambda_hard: float = 0.2
    """Share λ_hard of the hard loss."""
    tau: float = 2.0
    """Temperature of the distillation terms; the hard loss has temperature 1."""
    edges: tuple[Edge, ...] = (Edge(0, 1), Edge(1, 2))
    """Transitions. The paper's are 0 -> 1 and 1 -> 2; none at all is plain fine-tuning on the hard levels."""
    target_grad: Literal["detach", "flow"] = "detach"
    """detach: in each edge the teacher gets no gradient. flow: it does (needs the joint step; invites collapse)."""
    hard_levels: tuple[int, ...] = (0,)
    """Levels with a hard loss, each with weight λ_hard."""
    chunk: int = 128
    """Answer positions whose logits are held at once."""
    teacher_weights: Literal["live", "base", "ema"] = "live"
    """Whose distributions the teachers' are. live: those of the model that is trained; base: those it began with, which
    never change (edges into level 0 only); ema: those of a running average of its weights."""
    clip_kl: float | None = None
    """Cap, in nats, on the bracket of Eq. 6 at each answer position: above it the term is constant and has no gradient.
    None: no cap."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", tuple(self.edges))
        object.__setattr__(self, "hard_levels", tuple(self.hard_levels))
        if not 0 <= self.lambda_hard <= 1:
            raise ConfigError(f"lambda_hard is {self.lambda_hard}; it must lie in [0, 1]")
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ConfigError(f"tau is {self.tau}; it must be above 0")
        if self.target_grad not in ("detach", "flow"):
            raise ConfigError(f"target_grad is {self.target_grad!r}; it is detach or flow")
        if self.chunk < 1:
            raise ConfigError(f"chunk is {self.chunk}; it must be 1 or more")
        if self.teacher_weights not in ("live", "base", "ema"):
            raise ConfigError(f"teacher_weights is {self.teacher_weights!r}; it is live, base or ema")
        if self.clip_kl is not None and not (math.isfinite(self.clip_kl) and self.clip_kl > 0):
            raise ConfigError(f"clip_kl is {self.clip_kl}; it must be above 0, or null")
        if self.target_grad == "flow" and self.teacher_weights != "live":
            raise ConfigError(
                f"target_grad flow needs teacher_weights live: {self.teacher_weights} teachers do not learn"
            )
        if self.teacher_weights == "base" and (wrong := [edge.name for edge in self.edges if edge.student != 0]):
            raise ConfigError(
                f"teacher_weights base takes edges into level 0 only, not {', '.join(wrong)}: set objective.edges to "
                "student 0 with teachers 1, 2 or both"
            )
        names = [edge.name for edge in self.edges]
        if len(set(names)) < len(names):
            raise ConfigError(f"an edge occurs twice: {', '.join(names)}")
        if len(set(self.hard_levels)) < len(self.hard_levels) or not set(self.hard_levels) <= set(range(N_LEVELS)):
            raise ConfigError(f"hard_levels {list(self.hard_levels)} are not distinct levels of 0, 1, 2")

    @property
    def active(self) -> tuple[Edge, ...]:
        """Edges that contribute to the total."""
        return tuple(edge for edge in self.edges if edge.gamma > 0 and self.lambda_hard < 1)

    @property
    def trained(self) -> frozenset[int]:
        """Levels whose forward pass needs a graph."""
        levels = {edge.student for edge in self.active}
        if self.lambda_hard > 0:
            levels |= set(self.hard_levels)
        if self.target_grad == "flow":
            levels |= {edge.teacher for edge in self.active}
        return frozenset(levels)

    @property
    def taught(self) -> frozenset[int]:
        """Levels that teach with other weights than the present ones (`teacher_weights` base or ema)."""
        return frozenset() if self.teacher_weights == "live" else frozenset(edge.teacher for edge in self.edges)

    @property
    def levels(self) -> frozenset[int]:
        """Levels that any term reads at the present weights."""
        ends = {edge.student for edge in self.edges} | {edge.teacher for edge in self.edges} - self.taught
        return frozenset(ends | (set(self.hard_levels) if self.lambda_hard > 0 else set()))

    def parts(self, values: Mapping[str, float]) -> dict[str, float]:
        """The summands of the total by name (`hard`, `dist01`, …), from values by name (`hard0`, `dist01`, …)."""
        parts: dict[str, float] = {}
        if self.lambda_hard > 0 and self.hard_levels:
            parts["hard"] = self.lambda_hard * sum(values[f"hard{level}"] for level in self.hard_levels)
        for edge in self.active:
            name = f"dist{edge.name}"
            parts[name] = (1 - self.lambda_hard) * self.tau**2 * edge.gamma * values[name]
        return parts
