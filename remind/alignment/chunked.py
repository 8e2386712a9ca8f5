"""The objective from answer hidden states and the head's weight, with logits of a few positions at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from remind.alignment.fixed import FixedTeacher, HiddenTeacher, check_fixed, target_of
from remind.alignment.losses import Target, accumulation_dtype, cross_entropies, position_terms
from remind.alignment.objective import N_LEVELS, Objective


def chunked_terms(
    hidden: Mapping[int, Tensor],
    weight: Tensor,
    targets: Tensor,
    position_weights: Tensor,
    objective: Objective,
    students: Collection[int] = range(N_LEVELS),
    fixed: Mapping[int, FixedTeacher] | None = None,
    labelled: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over positions of `position_terms`, from hidden states and the head's weight.

    Logits exist for `objective.chunk` positions at a time, in float32 (float64 where the inputs are), whatever the
    precision of the model; the backward pass computes them again.

    Args:
        hidden: level to [N, d], the final hidden states that predict `targets`.
        weight: [V, d] of the output head.
        targets: [N] token ids.
        position_weights: [N], weight of each position in the sum.
        students: as for `position_terms`.
        fixed: level to the teacher that stands for it in edges; such teachers get no gradient.
        labelled: [N] bool, positions with a hard loss; None: all.

    Returns:
        The sum, with gradients for hidden states and weight; and, detached, the [N] values of `position_terms`, with
        `teacher_ce1`, `teacher_entropy1`, … (temperature 1, nats) of each fixed teacher that has logits.

    Raises:
        DataError: fixed teachers of other positions.
        ConfigError: a fixed teacher that leans on the student's head while that is trained.
    """
    learning = set(students) & hidden.keys()
    wanted = {edge.teacher for edge in objective.edges if edge.student in learning}
    used = {level: teacher for level, teacher in (fixed or {}).items() if level in wanted}
    # a level that no term reads costs no logits
    levels = tuple(sorted((learning | wanted - used.keys()) & hidden.keys()))
    check_fixed(used, len(targets), weight)
    values: dict[str, Tensor] = {}
    gold = torch.ones_like(targets, dtype=torch.bool) if labelled is None else labelled
    settings = (objective, levels, tuple(students), used, gold, values)
    loss = _ChunkedTerms.apply(weight, targets, position_weights, settings, *(hidden[k] for k in levels))
    return loss, values


class _ChunkedTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, targets: Tensor, position_weights: Tensor, settings: tuple[Any, ...], *hidden: Tensor
    ) -> Tensor:
        objective, levels, students, fixed, gold, values = settings
        parts: dict[str, list[Tensor]] = {}
        with torch.autocast(weight.device.type, enabled=False):
            dtype = accumulation_dtype(hidden[0].dtype)
            head = weight.to(dtype)
            teachers = _Teachers(fixed, head, objective.tau)
            for chunk in _chunks(len(targets), objective.chunk):
                logits = {level: h[chunk].to(dtype) @ head.T for level, h in zip(levels, hidden, strict=True)}
                known, watched = teachers.at(chunk, targets)
                terms = position_terms(logits, targets[chunk], objective, students, True, known, gold[chunk])
                for name, value in {"total": terms.total, **terms.values, **watched}.items():
                    parts.setdefault(name, []).append(value)
            values.update({name: torch.cat(pieces) for name, pieces in parts.items()})
            loss = (values.pop("total") * position_weights.to(dtype)).sum()
        ctx.save_for_backward(weight, targets, position_weights, *hidden)
        ctx.settings = (objective, levels, students, fixed, gold)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        weight, targets, position_weights, *hidden = ctx.saved_tensors
        objective, levels, students, fixed, gold = ctx.settings
        trains_head, trains = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        dtype = accumulation_dtype(hidden[0].dtype)
        head = weight.to(dtype)
        grad_head = torch.zeros_like(head) if trains_head else None
        grad_hidden = [torch.zeros_like(h) if need else None for h, need in zip(hidden, trains, strict=True)]
        teachers = _Teachers(fixed, head, objective.tau)
        with torch.autocast(weight.device.type, enabled=False):
            for chunk in _chunks(len(targets), objective.chunk):
                known, _ = teachers.at(chunk)
                wide = [h[chunk].to(dtype) for h in hidden]
                logits = {
                    level: (h @ head.T).requires_grad_(trains_head or need)
                    for level, h, need in zip(levels, wide, trains, strict=True)
                }
                with torch.enable_grad():
                    terms = position_terms(logits, targets[chunk], objective, students, False, known, gold[chunk])
                    loss = (terms.total * position_weights[chunk].to(dtype)).sum()
                for index, grad_logits in enumerate(_gradients(loss, list(logits.values()))):
                    if grad_logits is None:
                        continue
                    grad_logits = grad_logits * grad
                    out = grad_hidden[index]
                    if out is not None:
                        out[chunk] = (grad_logits @ head).to(out.dtype)
                    if grad_head is not None:
                        grad_head.addmm_(grad_logits.T, wide[index])
        return (None if grad_head is None else grad_head.to(weight.dtype), None, None, None, *grad_hidden)


class _Teachers:
    """Fixed teachers during one pass over the chunks; their heads are widened once."""

    def __init__(self, fixed: Mapping[int, FixedTeacher], head: Tensor, tau: float) -> None:
        self.fixed, self.tau = fixed, tau
        wide: dict[int, Tensor] = {}
        self.heads: dict[int, Tensor] = {}
        for level, teacher in fixed.items():
            own = teacher.weight if isinstance(teacher, HiddenTeacher) else None
            # two levels of one model have one head
            if own is not None and id(own) not in wide:
                wide[id(own)] = own.to(head.dtype)
            self.heads[level] = head if own is None else wide[id(own)]

    def at(self, chunk: slice, targets: Tensor | None = None) -> tuple[dict[int, Target], dict[str, Tensor]]:
        """Targets by level; and, if the tokens are given, what is watched of teachers with logits."""
        known: dict[int, Target] = {}
        watched: dict[str, Tensor] = {}
        for level, teacher in self.fixed.items():
            known[level], logits = target_of(teacher, chunk, self.heads[level], self.tau)
            if targets is not None and logits is not None:
                ce, entropy = cross_entropies(logits, targets[chunk])
                watched |= {f"teacher_ce{level}": ce, f"teacher_entropy{level}": entropy}
        return known, watched


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradient of the loss for each leaf; None for leaves that need none or do not matter."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted or not loss.requires_grad:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]
