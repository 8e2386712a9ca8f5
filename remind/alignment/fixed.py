"""Teachers that are not the live model: their answer hidden states with a frozen head, or their top-k probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remind.alignment.losses import Target, accumulation_dtype, bucketed, edge_distance
from remind.core.errors import ConfigError, DataError


@dataclass(frozen=True)
class HiddenTeacher:
    """Final hidden states that predict the answer, with the head they belong to. Exact.

    Attributes:
        hidden: [N, d], in the order of `MicroBatch.targets`.
        weight: [V, d] of the head; None: the student's own head, which must then be frozen.
    """

    hidden: Tensor
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.hidden)

    def to(self, device: torch.device | str) -> HiddenTeacher:
        return replace(
            self, hidden=self.hidden.to(device), weight=None if self.weight is None else self.weight.to(device)
        )


@dataclass(frozen=True)
class TopKTeacher:
    """The k likeliest tokens with their log-probabilities at τ, and the rest in one bucket (`topk_targets`).

    The student is bucketed in the same way, so that the divergence is one of k + 1 outcomes: never more than that of
    all tokens, and less by `approximation_error`.

    Attributes:
        indices: [N, k], any integer type.
        log_probs: [N, k + 1], natural logarithms at the τ of the objective; the last is that of all other tokens.
    """

    indices: Tensor
    log_probs: Tensor

    def __post_init__(self) -> None:
        n, k = self.indices.shape
        if self.log_probs.shape != (n, k + 1):
            raise DataError(f"a top-{k} teacher of {n} positions has log_probs {tuple(self.log_probs.shape)}")

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device | str) -> TopKTeacher:
        return TopKTeacher(self.indices.to(device), self.log_probs.to(device))


FixedTeacher = HiddenTeacher | TopKTeacher


def target_of(teacher: FixedTeacher, part: slice, head: Tensor, tau: float) -> tuple[Target, Tensor | None]:
    """What the teacher holds against the student at some positions, in the precision of `head`.

    Args:
        head: [V, d] for a `HiddenTeacher`, widened once by the caller.

    Returns:
        The target; and the teacher's logits [len, V], where there are any.
    """
    if isinstance(teacher, TopKTeacher):
        return Target(teacher.log_probs[part].to(head.dtype), teacher.indices[part].long()), None
    logits = teacher.hidden[part].to(head.dtype) @ head.T
    return Target(F.log_softmax(logits / tau, dim=-1)), logits


def check_fixed(fixed: Mapping[int, FixedTeacher], positions: int, head: Tensor) -> None:
    """Raise DataError for teachers of another batch, ConfigError for one that leans on a head that is trained."""
    for level, teacher in fixed.items():
        if len(teacher) != positions:
            raise DataError(f"the teacher of level {level} has {len(teacher)} positions, the batch {positions}")
        if isinstance(teacher, HiddenTeacher) and teacher.weight is None and head.requires_grad:
            raise ConfigError(f"the teacher of level {level} needs a copy of the head as it was: the head is trained")


def teach(model: nn.Module, batch: object, levels: tuple[int, ...], prefix_sharing: bool = False) -> dict[int, Tensor]:
    """Final hidden states of the answer positions under `levels`, without gradient: what a `HiddenTeacher` holds.

    Args:
        model: an `AlignmentModel`, possibly wrapped.
        batch: a `MicroBatch`.
        prefix_sharing: compute what x1 and x2 have in common once.

    Returns:
        Level to [N, d], in the precision of the model.
    """
    with torch.no_grad():
        _, trace = model(batch, levels, shared=prefix_sharing, terms=False)
    hidden: dict[int, Tensor] = trace.hidden
    return hidden


@torch.no_grad()
def topk_targets(hidden: Tensor, weight: Tensor, tau: float, k: int = 64, chunk: int = 128) -> tuple[Tensor, Tensor]:
    """The fields of a `TopKTeacher`.

    Args:
        hidden: [N, d]; weight: [V, d] of the head. Logits are float32 (float64 where hidden states are), `chunk`
            positions at a time.
        k: tokens kept per position, at most V.

    Returns:
        indices [N, k] int32, by falling probability; log_probs [N, k + 1] float32 (float64).

    Raises:
        ConfigError: k outside 1 to V.
    """
    if not 1 <= k <= len(weight):
        raise ConfigError(f"top-k of {k}: it must lie between 1 and the {len(weight)} tokens of the vocabulary")
    dtype = accumulation_dtype(hidden.dtype)
    head = weight.to(dtype)
    found = []
    for piece in hidden.split(chunk):
        scaled = piece.to(dtype) @ head.T / tau
        indices = scaled.topk(k, dim=-1).indices
        found.append((indices.int(), bucketed(scaled, F.log_softmax(scaled, dim=-1), indices)))
    indices, log_probs = (torch.cat(parts) for parts in zip(*found, strict=True))
    return indices, log_probs


@torch.no_grad()
def approximation_error(
    student: Tensor, teacher: Tensor, weight: Tensor, tau: float, k: int, alpha: float = 0.5, chunk: int = 128
) -> Tensor:
    """What the bucket hides: the distance of Eq. 6 over all tokens minus that over the teacher's top-k and the rest.

    Args:
        student, teacher: [N, d] final hidden states of the two levels.
        weight: [V, d] of the head.
        alpha: share of KL(teacher || student).

    Returns:
        [N] nats at τ, without τ² and γ; 0 or more but for rounding, and 0 where k = V.
    """
    dtype = accumulation_dtype(student.dtype)
    head = weight.to(dtype)
    errors = []
    for one, other in zip(student.split(chunk), teacher.split(chunk), strict=True):
        p, q = (z.to(dtype) @ head.T for z in (other, one))
        indices = p.topk(k, dim=-1).indices
        log_p, log_q = (bucketed(z / tau, F.log_softmax(z / tau, dim=-1), indices) for z in (p, q))
        # log-probabilities are their own logits at temperature 1
        errors.append(edge_distance(q, p, tau, alpha) - edge_distance(log_q, log_p, 1.0, alpha))
    return torch.cat(errors)
