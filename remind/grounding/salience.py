"""From token resonance to one salience per turn (Eq. 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remind.core.errors import ConfigError
from remind.grounding.config import parse_aggregate
from remind.grounding.fusion import around
from remind.grounding.resonance import check_turns, working_dtype


def aggregate(values: Tensor, group: Tensor, n_groups: int, agg: str = "mean") -> Tensor:
    """Agg of Eq. 5 within each group of tokens.

    Args:
        values: [T]. group: int64 [T], 0 to n_groups - 1.
        agg: "mean", "max" or "top<m>": the mean of the m largest, of all where there are fewer.

    Returns:
        [n_groups]; -inf for a group without tokens.
    """
    largest = parse_aggregate(agg)
    counts = torch.bincount(group, minlength=n_groups)
    if largest is not None:
        order = values.argsort(descending=True)
        order = order[group[order].argsort(stable=True)]
        first = counts.cumsum(0) - counts
        rank = torch.arange(len(order), device=values.device) - first[group[order]]
        kept = order[rank < largest]
        values, group = values[kept], group[kept]
        counts = counts.clamp(max=largest)
    dtype = working_dtype(values.dtype)
    sums = values.new_zeros(n_groups, dtype=dtype).index_add_(0, group, values.to(dtype))
    return torch.where(counts > 0, sums / counts.clamp(min=1), -torch.inf).to(values.dtype)


def turn_salience(
    s: Tensor,
    turn_index: Tensor | Sequence[int],
    is_caption: Tensor | Sequence[bool],
    n_turns: int,
    lam: float = 0.3,
    agg: str = "mean",
) -> Tensor:
    """s_turn of Eq. 5: `(1 - λ) Agg(text tokens) + λ Agg(caption tokens)`.

    Args:
        s: smoothed resonance [T].
        turn_index: [T], turn of each token; -1: of none.
        is_caption: [T], whether the token belongs to T_k^cap rather than T_k^text.
        n_turns: how many turns there are.
        lam: λ in [0, 1].
        agg: "mean", "max" or "top<m>" (mean of the m largest, of all if there are fewer).

    Returns:
        [n_turns] in the dtype of s. Where a turn has only one of the two parts, that part counts whole; a turn without
        tokens is -inf.

    Raises:
        ConfigError: lengths that differ, a turn index or λ out of range, an unknown aggregate.
    """
    if s.dim() != 1 or not s.is_floating_point():
        raise ConfigError(f"resonance must be a vector of floats, got shape {tuple(s.shape)} of {s.dtype}")
    if not 0 <= lam <= 1:
        raise ConfigError(f"lam must be between 0 and 1, got {lam}")
    turns = torch.as_tensor(turn_index, dtype=torch.int64, device=s.device)
    captions = torch.as_tensor(is_caption, dtype=torch.bool, device=s.device)
    if turns.shape != s.shape or captions.shape != s.shape:
        raise ConfigError(f"{turns.numel()} turn indices and {captions.numel()} flags for {s.numel()} tokens")
    check_turns(turns, n_turns)
    inside = turns >= 0
    group = (2 * turns + captions)[inside]
    text, caption = aggregate(s[inside], group, 2 * n_turns, agg).view(n_turns, 2).unbind(-1)
    both = (1 - lam) * text + lam * caption
    return torch.where(caption == -torch.inf, text, torch.where(text == -torch.inf, caption, both))


def smooth_turns(salience: Tensor, run: Sequence[int], weight: float) -> Tensor:
    """Let each turn's neighbours in its run share its salience: `(s_{k-1} w + s_k + s_{k+1} w) / (sum of weights)`.

    Not in the paper. Turns without tokens (-inf) neither give nor receive; weight 0: salience itself.

    Args:
        salience: [n_turns]. run: run number of each turn. weight: of one neighbour, the turn itself weighing 1.
    """
    if weight == 0 or not len(run):
        return salience
    known = salience != -torch.inf
    numbers = torch.where(known, torch.as_tensor(run, device=salience.device), -1)
    smoothed = around(torch.where(known, salience, 0.0)[:, None], numbers[:, None], [weight])[:, 0]
    return torch.where(known, smoothed, salience)
