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

from remind.alignment.objective import N_LEVELS, Edge, Objective
from remind.core.errors import DataError


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


class Target(NamedTuple):
    """A teacher's distribution at τ, not to be learnt from through: all tokens, or a few and the rest in one bucket.

    Attributes:
        log_probs: [L, V]; or [L, k + 1], of the tokens `indices` [L, k] and, last, of all others together.
        indices: None where `log_probs` are of all tokens.
    """

    log_probs: Tensor
    indices: Tensor | None = None


def bucketed(scaled: Tensor, log_p: Tensor, indices: Tensor | None) -> Tensor:
    """Log-probabilities of some tokens and, last, of all others together.

    Args:
        scaled: [L, V] logits over τ; log_p: their log-softmax.
        indices: [L, k] tokens; None: all of them, with no bucket.

    Returns:
        [L, k + 1]; [L, V] where `indices` is None. With k = V the last bucket is empty (-inf).
    """
    if indices is None:
        return log_p
    kept = log_p.gather(-1, indices)
    if indices.shape[-1] >= log_p.shape[-1]:
        return torch.cat([kept, torch.full_like(kept[:, :1], -torch.inf)], -1)
    # not log(1 - sum): that loses every digit of a small rest
    others = scaled.scatter(-1, indices, -torch.inf)
    rest = others.logsumexp(-1, keepdim=True) - scaled.logsumexp(-1, keepdim=True)
    return torch.cat([kept, rest], -1)


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


def cross_entropies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the targets and entropy at temperature 1, nats, [L] each, of logits [L, V]."""
    log_p = F.log_softmax(logits, dim=-1)
    entropy = -torch.where(log_p.isinf(), 0, log_p * log_p.exp()).sum(-1)
    return -log_p.gather(-1, targets[:, None]).squeeze(-1), entropy


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
    fixed: Mapping[int, Target] | None = None,
    labelled: Tensor | None = None,
) -> Terms:
    """The objective at each answer position, before any mean (Eq. 6-7).

    Args:
        logits: level to [L, V]; logits[l] predicts targets[l].
        targets: [L] token ids.
        students: only terms of these levels count: their hard losses, and the edges in which they learn. An edge whose
            teacher is neither in `logits` nor in `fixed` is left out.
        watch: also give, without gradient, the cross-entropy and entropy (temperature 1, nats) of each student level,
            the Jensen-Shannon divergence of each edge (Eq. 21, nats, at τ) and, where the objective clips, `clipped01`:
            1 at positions at the cap.
        fixed: level to the distribution that stands for its own in edges where it teaches; it gets no gradient.
        labelled: [L] bool, positions whose targets are gold; hard losses are 0 elsewhere. None: all.
    """
    fixed = fixed or {}
    dtype = accumulation_dtype(next(iter(logits.values())).dtype)
    wide = {level: z.to(dtype) for level, z in logits.items()}
    known = wide.keys() | fixed.keys()
    edges = [e for e in objective.edges if e.student in students and e.student in wide and e.teacher in known]
    read = {edge.student for edge in edges} | {edge.teacher for edge in edges} - fixed.keys()
    soft = {level: F.log_softmax(wide[level] / objective.tau, dim=-1) for level in sorted(read)}
    pairs = {}
    for edge in edges:
        if edge.teacher in fixed:
            target = fixed[edge.teacher]
            student = bucketed(wide[edge.student] / objective.tau, soft[edge.student], target.indices)
            pairs[edge] = (student, target.log_probs.detach())
        else:
            teacher = soft[edge.teacher].detach() if objective.target_grad == "detach" else soft[edge.teacher]
            pairs[edge] = (soft[edge.student], teacher)
    hard_levels = [level for level in objective.hard_levels if level in students and level in wide]

    values: dict[str, Tensor] = {}
    total = torch.zeros(targets.shape, dtype=dtype, device=targets.device)
    for level in hard_levels:
        loss = F.cross_entropy(wide[level], targets, reduction="none")
        values[f"hard{level}"] = loss = loss if labelled is None else torch.where(labelled, loss, 0)
        if objective.lambda_hard > 0:
            total = total + objective.lambda_hard * loss
    for edge in edges:
        distance = _distance(*pairs[edge], edge.alpha)
        if objective.clip_kl is not None:
            if watch:
                values[f"clipped{edge.name}"] = (distance.detach() > objective.clip_kl).to(dtype)
            distance = distance.clamp(max=objective.clip_kl)
        values[f"dist{edge.name}"] = distance
        if edge in objective.active:
            total = total + (1 - objective.lambda_hard) * objective.tau**2 * edge.gamma * distance
    if watch:
        with torch.no_grad():
            for level in sorted(set(students) & set(wide)):
                values[f"ce{level}"], values[f"entropy{level}"] = cross_entropies(wide[level], targets)
            for edge in edges:
                values[f"jsd{edge.name}"] = _jsd(*pairs[edge])
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
