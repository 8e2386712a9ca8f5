"""Progressive Reflective Alignment: the objective of Eq. 6-7 as a list of edges between levels.

`pra_loss` is the formula for one sample; `position_terms` is what it and `chunked.chunked_terms` share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from remind.errors import ConfigError, DataError

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
    def levels(self) -> frozenset[int]:
        """Levels that any term reads."""
        ends = {level for edge in self.edges for level in (edge.student, edge.teacher)}
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


class PRALoss(NamedTuple):
    """Scalars of one sample. `dist01`, `dist12`: Eq. 6, without γ and τ². `jsd01`, `jsd12`: nats at τ, detached."""

    total: Tensor
    hard: Tensor
    dist01: Tensor
    dist12: Tensor
    jsd01: Tensor
    jsd12: Tensor


@dataclass(frozen=True)
class Terms:
    """Per position, [L]: `total` is the objective; by name `hard0`, `dist01`, …; watched `ce0`, `entropy0`, `jsd01`"""

    total: Tensor
    values: dict[str, Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything lower is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last axis; where p is 0 the term is 0, also if q is 0 or the difference overflows."""
    p = log_p.exp()
    return (p * torch.where(p > 0, log_p - log_q, 0)).sum(-1)


def _distance(log_student: Tensor, log_teacher: Tensor, alpha: float) -> Tensor:
    if alpha == 1:
        return _kl(log_teacher, log_student)
    if alpha == 0:
        return _kl(log_student, log_teacher)
    return alpha * _kl(log_teacher, log_student) + (1 - alpha) * _kl(log_student, log_teacher)


def _jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return (_kl(log_p, log_m) + _kl(log_q, log_m)) / 2


def edge_distance(student_logits: Tensor, teacher_logits: Tensor, tau: float = 2.0, alpha: float = 0.5) -> Tensor:
    """The bracket of Eq. 6 at each position, in nats: α KL(teacher || student) + (1 − α) KL(student || teacher) at τ.

    Args:
        student_logits, teacher_logits: [..., V]; gradients flow into both.

    Returns:
        [...], without γ and τ².
    """
    dtype = accumulation_dtype(student_logits.dtype)
    student, teacher = (F.log_softmax(z.to(dtype) / tau, dim=-1) for z in (student_logits, teacher_logits))
    return _distance(student, teacher, alpha)


def position_terms(
    logits: Mapping[int, Tensor],
    targets: Tensor,
    objective: Objective,
    students: Collection[int] = range(N_LEVELS),
    watch: bool = False,
) -> Terms:
    """The objective at each answer position, before any mean (Eq. 6-7).

    Args:
        logits: level to [L, V]; logits[l] predicts targets[l].
        targets: [L] token ids.
        students: only terms of these levels count: their hard losses, and the edges in which they learn. An edge whose
            teacher is not in `logits` is left out.
        watch: also give, without gradient, the cross-entropy and entropy (temperature 1, nats) of each student level
            and the Jensen-Shannon divergence of each edge (Eq. 21, nats, at τ).
    """
    dtype = accumulation_dtype(next(iter(logits.values())).dtype)
    wide = {level: z.to(dtype) for level, z in logits.items()}
    edges = [e for e in objective.edges if e.student in students and e.student in wide and e.teacher in wide]
    soft = {
        level: F.log_softmax(wide[level] / objective.tau, dim=-1)
        for level in sorted({end for edge in edges for end in (edge.student, edge.teacher)})
    }
    hard_levels = [level for level in objective.hard_levels if level in students and level in wide]

    values: dict[str, Tensor] = {}
    total = torch.zeros(targets.shape, dtype=dtype, device=targets.device)
    for level in hard_levels:
        values[f"hard{level}"] = loss = F.cross_entropy(wide[level], targets, reduction="none")
        if objective.lambda_hard > 0:
            total = total + objective.lambda_hard * loss
    for edge in edges:
        teacher = soft[edge.teacher].detach() if objective.target_grad == "detach" else soft[edge.teacher]
        values[f"dist{edge.name}"] = distance = _distance(soft[edge.student], teacher, edge.alpha)
        if edge in objective.active:
            total = total + (1 - objective.lambda_hard) * objective.tau**2 * edge.gamma * distance
    if watch:
        with torch.no_grad():
            for level in sorted(set(students) & set(wide)):
                log_p = F.log_softmax(wide[level], dim=-1)
                values[f"ce{level}"] = -log_p.gather(-1, targets[:, None]).squeeze(-1)
                values[f"entropy{level}"] = -torch.where(log_p.isinf(), 0, log_p * log_p.exp()).sum(-1)
            for edge in edges:
                values[f"jsd{edge.name}"] = _jsd(soft[edge.student], soft[edge.teacher])
    return Terms(total, values)


def pra_loss(
    logits0: Tensor,
    logits1: Tensor,
    logits2: Tensor,
    targets: Tensor,
    lambda_hard: float = 0.2,
    tau: float = 2.0,
    alpha: tuple[float, float] = (0.5, 0.5),
    gamma: tuple[float, float] = (3.0, 3.0),
    target_grad: Literal["detach", "flow"] = "detach",
) -> PRALoss:
    """Eq. 6-7 for one sample, with the paper's two edges.

    Args:
        logits0, logits1, logits2: [L, V] of the answer positions under x0, x1, x2; logits[l] predicts targets[l].
        targets: [L] token ids of y*.
        alpha, gamma: of the transitions 0 -> 1 and 1 -> 2.
        target_grad: "detach": p0 learns from p1 and p1 from p2, never the other way; "flow": gradients reach teachers.

    Raises:
        DataError: shapes that do not fit, no positions, or targets outside the vocabulary.
        ConfigError: a weight or temperature out of range.
    """
    _check(logits0, logits1, logits2, targets)
    edges = tuple(Edge(i, i + 1, gamma[i], alpha[i]) for i in range(2))
    objective = Objective(lambda_hard, tau, edges, target_grad)
    terms = position_terms({0: logits0, 1: logits1, 2: logits2}, targets, objective, watch=True)
    means = {name: value.mean() for name, value in terms.values.items()}
    return PRALoss(terms.total.mean(), means["hard0"], means["dist01"], means["dist12"], means["jsd01"], means["jsd12"])


def _check(logits0: Tensor, logits1: Tensor, logits2: Tensor, targets: Tensor) -> None:
    shape = logits0.shape
    if logits0.ndim != 2 or logits1.shape != shape or logits2.shape != shape:
        shapes = ", ".join(str(tuple(z.shape)) for z in (logits0, logits1, logits2))
        raise DataError(f"logits must be three [L, V] of one shape, not {shapes}")
    if targets.shape != shape[:1] or shape[0] == 0:
        raise DataError(f"targets {tuple(targets.shape)} do not fit logits {tuple(shape)}; L must be 1 or more")
    if targets.dtype.is_floating_point or int(targets.min()) < 0 or int(targets.max()) >= shape[1]:
        raise DataError(f"targets must be token ids from 0 to {shape[1] - 1}")
