"""One salience per turn from resonance and retrieval together.

Not in the paper, whose salience is resonance alone (Eq. 5). Every score is standardised over the turns at hand and
weighted, once as it stands and once averaged over the turns around; a few plain facts of a turn are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from remind.core.errors import ConfigError
from remind.grounding.config import FACTS, SCORES, WEIGHTS, FusionConfig


def gaussian_shares(sigma: float) -> list[float]:
    """Weights of the neighbours 1, 2, … ceil(3σ) turns away, the turn itself weighing 1."""
    return [math.exp(-0.5 * (step / sigma) ** 2) for step in range(1, math.ceil(3 * sigma) + 1)]


def standardise_turns(scores: Tensor, inside: Tensor) -> Tensor:
    """Zero mean and unit standard deviation (of the population) over the turns inside; 0 outside and where all agree.

    Args:
        scores: [n, Q]. inside: bool [n, Q] or [n, 1].
    """
    inside = inside.expand_as(scores)
    known = torch.where(inside, scores, 0.0)
    count = inside.sum(0).clamp(min=1)
    centred = torch.where(inside, known - known.sum(0) / count, 0.0)
    deviation = (centred.square().sum(0) / count).sqrt()
    # equal values leave a rounding residue instead of zero
    level = deviation <= 1e-6 * known.abs().amax(0)
    return torch.where(level, 0.0, centred / torch.where(level, 1.0, deviation))


def around(scores: Tensor, run: Tensor, shares: Sequence[float]) -> Tensor:
    """Weighted mean of each turn and its neighbours in the same run.

    Where the run ends only the turns that are there count, so that an edge is not drawn towards zero.

    Args:
        scores: [n, Q].
        run: int64 [n, Q] or [n, 1], run of each turn, equal numbers standing together; -1: not at hand.
        shares: weight of a turn 1, 2, … places away, the turn itself weighing 1.
    """
    total, weight = scores.clone(), torch.ones_like(scores)
    for step, share in enumerate(shares[: len(scores) - 1], start=1):
        joined = share * ((run[step:] == run[:-step]) & (run[step:] >= 0)).to(scores.dtype)
        total[step:] += joined * scores[:-step]
        total[:-step] += joined * scores[step:]
        weight[step:] += joined
        weight[:-step] += joined
    return total / weight


def fill_lowest(scores: Tensor, inside: Tensor) -> Tensor:
    """-inf (a turn without tokens) replaced by the lowest score there is among the turns inside, else by 0."""
    known = scores.isfinite()
    lowest = torch.where(inside.expand_as(scores) & known, scores, torch.inf).amin(0)
    return torch.where(known, scores, torch.where(lowest.isfinite(), lowest, 0.0))


def design(signals: Mapping[str, Tensor], run: Tensor, sigma: float) -> Tensor:
    """What the weights multiply, in the order of `WEIGHTS`; float32 [n, Q, len(WEIGHTS)].

    Args:
        signals: [n, Q] by name, of `SCORES` and `FACTS`; one that is missing counts as 0.
        run: as in `around`. Turns that are not at hand (-1) count in no mean, deviation or neighbourhood.
    """
    nothing = torch.zeros_like(next(iter(signals.values())), dtype=torch.float32)
    inside = (run >= 0).expand_as(nothing)
    columns = []
    for name in SCORES:
        if name in signals:
            own = standardise_turns(fill_lowest(signals[name].float(), inside), inside)
            columns += [own, standardise_turns(around(own, run, gaussian_shares(sigma)), inside)]
        else:
            columns += [nothing, nothing]
    columns += [signals[name].float() if name in signals else nothing for name in FACTS]
    return torch.stack(columns, -1)


def fuse(signals: Mapping[str, Tensor], run: Tensor, config: FusionConfig) -> Tensor:
    """The fused salience; float32 [n, Q]. Arguments as in `design`.

    Raises:
        ConfigError: a signal whose weight is not 0 is missing.
    """
    for name in WEIGHTS:
        if getattr(config, name) and name.removesuffix("_context") not in signals:
            raise ConfigError(f"fuse: there is a weight for {name}, but no such signal")
    return design(signals, run, config.sigma) @ torch.tensor([getattr(config, name) for name in WEIGHTS])
