"""Progressive Reflective Alignment: the objective of Eq. 6-7 as a list of edges between levels.

`pra_loss` is the formula for one sample, `position_terms` at each answer position. A training step calls
`chunked_terms`, which evaluates it from hidden states and the output head, a few positions at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from remind.alignment.config import N_LEVELS, Edge, Objective


class PRALoss(NamedTuple):
    """Scalars of one sample. `dist01`, `dist12`: Eq. 6, without γ and τ². `jsd01`, `jsd12`: nats at τ, detached."""

    total: Tensor
    hard: Tensor
    dist01: Tensor
    dist12: Tensor
    jsd01: Tensor
    jsd12: Tensor


class Head(NamedTuple):
    """From final hidden states to logits: cap · tanh(scale · (W h + b) / cap), each part where the model has it.

    Scales are those of Cohere (`logit_scale`) and Granite (`logits_scaling`), caps those of Gemma 2
    (`final_logit_softcapping`).

    Attributes:
        weight: [V, d]. bias: [V] or None. cap: None: no cap.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, d] to [N, V], in the precision of `wide` heads."""
        logits = hidden.to(self.weight.dtype) @ self.weight.T
        logits = logits if self.bias is None else logits + self.bias
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def wide(self, dtype: torch.dtype) -> Head:
        """The same head in another precision."""
        return self._replace(weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))


#: A teacher's distribution at τ: log-probabilities [L, V] and None; or those of a few tokens and, last, of all others
#: together, [L, k + 1], and the tokens, [L, k].
Target = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class FixedTeachers:
    """Teachers that do not learn, by level: exact ones, or the k likeliest tokens with the rest in one bucket.

    The student of a top-k teacher is bucketed in the same way, so that the divergence is one of k + 1 outcomes: never
    more than that of all tokens.

    Attributes:
        levels: for exact teachers final hidden states that predict the answer, [N, d], in the order of
            `MicroBatch.targets`; else tokens [N, k] of any integer type, and their natural log-probabilities at the τ
            of the objective, with that of all other tokens last, [N, k + 1].
        head: that of the hidden states; None: the student's own, which must then be frozen.
    """

    levels: Mapping[int, Tensor | tuple[Tensor, Tensor]] = field(default_factory=dict)
    head: Head | None = None

    def at(
        self, part: slice, levels: Collection[int], head: Head, tau: float
    ) -> tuple[dict[int, Target], dict[int, Tensor]]:
        """Targets of some positions by level, and of exact teachers the logits; `head`: in the precision wanted."""
        targets, logits = dict[int, Target](), dict[int, Tensor]()
        for level in levels:
            teacher = self.levels[level]
            if isinstance(teacher, Tensor):
                logits[level] = head.logits(teacher[part])
                targets[level] = (F.log_softmax(logits[level] / tau, dim=-1), None)
            else:
                targets[level] = (teacher[1][part].to(head.weight.dtype), teacher[0][part].long())
        return targets, logits


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
    top = log_p.gather(-1, indices)
    if indices.shape[-1] >= log_p.shape[-1]:
        return torch.cat([top, torch.full_like(top[:, :1], -torch.inf)], -1)
    # not log(1 - sum): that loses every digit of a small rest
    others = scaled.scatter(-1, indices, -torch.inf)
    rest = others.logsumexp(-1, keepdim=True) - scaled.logsumexp(-1, keepdim=True)
    return torch.cat([top, rest], -1)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything lower is computed in float32."""
    return torch.promote_types(dtype, torch.float32)


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


def position_terms(
    logits: Mapping[int, Tensor],
    targets: Tensor,
    objective: Objective,
    students: Collection[int] = range(N_LEVELS),
    monitor: bool = False,
    fixed: Mapping[int, Target] | None = None,
    labelled: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective at each answer position, before any mean (Eq. 6-7).

    Args:
        logits: level to [L, V]; logits[l] predicts targets[l].
        targets: [L] token ids.
        students: only terms of these levels count: their hard losses, and the edges in which they learn. An edge whose
            teacher is neither in `logits` nor in `fixed` is left out.
        monitor: also give, without gradient, the cross-entropy and entropy (temperature 1, nats) of each student level
            and the Jensen-Shannon divergence of each edge (Eq. 21, nats, at τ).
        fixed: level to the distribution that replaces its own in edges where it teaches; it gets no gradient.
        labelled: [L] bool, positions whose targets are gold; hard losses are 0 elsewhere. None: all.

    Returns:
        The objective, [L]; and by name, each [L], its terms `hard0`, `dist01`, … and what is monitored: `ce0`,
        `entropy0`, `jsd01`, ….
    """
    fixed = fixed or {}
    dtype = accumulation_dtype(next(iter(logits.values())).dtype)
    wide = {level: z.to(dtype) for level, z in logits.items()}
    learning, available = wide.keys() & set(students), wide.keys() | fixed.keys()
    edges = [edge for edge in objective.edges if edge.student in learning and edge.teacher in available]
    needed = {edge.student for edge in edges} | {edge.teacher for edge in edges} - fixed.keys()
    soft = {level: F.log_softmax(wide[level] / objective.tau, dim=-1) for level in needed}
    values: dict[str, Tensor] = {}
    total = torch.zeros(targets.shape, dtype=dtype, device=targets.device)
    for level in (level for level in objective.hard_levels if level in learning):
        loss = F.cross_entropy(wide[level], targets, reduction="none")
        values[f"hard{level}"] = loss = loss if labelled is None else torch.where(labelled, loss, 0)
        if objective.lambda_hard > 0:
            total = total + objective.lambda_hard * loss
    for edge in edges:
        student = soft[edge.student]
        if edge.teacher in fixed:
            teacher, indices = fixed[edge.teacher]
            student = bucketed(wide[edge.student] / objective.tau, student, indices)
        else:
            teacher = soft[edge.teacher]
        if edge.teacher in fixed or objective.target_grad == "detach":
            teacher = teacher.detach()
        values[f"dist{edge.name}"] = distance = _distance(student, teacher, edge.alpha)
        if edge in objective.active:
            total = total + (1 - objective.lambda_hard) * objective.tau**2 * edge.gamma * distance
        if monitor:
            values[f"jsd{edge.name}"] = _jsd(student.detach(), teacher.detach())
    if monitor:
        for level in sorted(learning):
            values[f"ce{level}"], values[f"entropy{level}"] = cross_entropies(wide[level].detach(), targets)
    return total, values


def chunked_terms(
    hidden: Mapping[int, Tensor],
    head: Head,
    targets: Tensor,
    position_weights: Tensor,
    objective: Objective,
    students: Collection[int] = range(N_LEVELS),
    fixed: FixedTeachers | None = None,
    labelled: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over positions of `position_terms`, from hidden states and the head.

    Logits exist for `objective.chunk` positions at a time, in float32 (float64 where the inputs are); the backward pass
    computes them again.

    Args:
        hidden: level to [N, d], the final hidden states that predict `targets`.
        targets: [N] token ids.
        position_weights: [N], weight of each position in the sum.
        students: as for `position_terms`.
        fixed: teachers that replace levels in edges; they get no gradient.
        labelled: as for `position_terms`.

    Returns:
        The sum, with gradients for hidden states, weight and bias; and, detached, the [N] values of `position_terms`,
        with `teacher_ce1`, `teacher_entropy1`, … (temperature 1, nats) of each fixed teacher that has logits.
    """
    fixed = fixed or FixedTeachers()
    learning = set(students) & hidden.keys()
    wanted = {edge.teacher for edge in objective.edges if edge.student in learning}
    # a level that no term reads costs no logits
    levels = sorted((learning | wanted - fixed.levels.keys()) & hidden.keys())
    taught, dtype = wanted & fixed.levels.keys(), accumulation_dtype(hidden[levels[0]].dtype)
    parts, done = dict[str, list[Tensor]](), set[int]()

    def terms(chunk: slice, *pieces: Tensor) -> Tensor:
        frozen, theirs = fixed.at(chunk, taught, teachers_head, objective.tau)
        logits = {level: wide.logits(piece) for level, piece in zip(levels, pieces, strict=True)}
        gold, first = None if labelled is None else labelled[chunk], chunk.start not in done
        total, found = position_terms(logits, targets[chunk], objective, students, first, frozen, gold)
        for level, z in theirs.items() if first else ():
            found[f"teacher_ce{level}"], found[f"teacher_entropy{level}"] = cross_entropies(z, targets[chunk])
        for name, value in found.items() if first else ():  # not when it is computed again
            parts.setdefault(name, []).append(value.detach())
        done.add(chunk.start)
        return (total * position_weights[chunk].to(dtype)).sum()

    with torch.autocast(targets.device.type, enabled=False):
        wide = head.wide(dtype)
        teachers_head = wide if fixed.head is None else fixed.head.wide(dtype)
        rows = zip(*(hidden[level].split(objective.chunk) for level in levels), strict=True)
        chunks = [slice(start, start + objective.chunk) for start in range(0, len(targets), objective.chunk)]
        losses = [
            checkpoint(terms, chunk, *pieces, use_reentrant=False, preserve_rng_state=False)
            for chunk, pieces in zip(chunks, rows, strict=True)
        ]
    return torch.stack(losses).sum(), {name: torch.cat(pieces) for name, pieces in parts.items()}


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
        ConfigError: a weight or temperature out of range.
    """
    edges = tuple(Edge(i, i + 1, gamma[i], alpha[i]) for i in range(2))
    objective = Objective(lambda_hard, tau, edges, target_grad)
    total, values = position_terms({0: logits0, 1: logits1, 2: logits2}, targets, objective, monitor=True)
    means = {name: value.mean() for name, value in values.items()}
    return PRALoss(total.mean(), means["hard0"], means["dist01"], means["dist12"], means["jsd01"], means["jsd12"])
