"""The method's equations: guidance (Eq. 3), resonance (Eq. 4), salience of turns (Eq. 5), selection of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from remind.core.errors import ConfigError
from remind.grounding.config import AGGREGATE
from sae import SparseCodes


def active_features(codes: SparseCodes) -> Tensor:
    """Indices of all active (token, feature) pairs, one entry per pair; int64 [n]."""
    return codes.indices[codes.active()]


def guidance(
    reason: SparseCodes, anchors: SparseCodes, idf: Tensor, alpha: float = 6.0, *, anchor_idf: bool = False
) -> Tensor:
    """v_guide of Eq. 3: `v[j] = max(idf[j] * count_reason[j], alpha * count_anchor[j])`.

    A feature counts once for every token in which it is active (value > 0).

    Args:
        reason, anchors: codes [T, k] of the tokens in T_reason and T_anchor; T may be 0.
        idf: w_idf [d_sae], floating.
        alpha: how much more an anchor token weighs than a reasoning token.
        anchor_idf: weigh anchors by idf too (`alpha * idf[j] * count_anchor[j]`); the paper does not.

    Returns:
        [d_sae] in the dtype and on the device of `idf`.
    """
    weights = idf.to(torch.promote_types(idf.dtype, torch.float32))
    reason_counts, anchor_counts = (
        torch.bincount(active_features(codes), minlength=len(idf)).to(weights) for codes in (reason, anchors)
    )
    anchored = alpha * anchor_counts
    return torch.maximum(weights * reason_counts, anchored * weights if anchor_idf else anchored).to(idf.dtype)


def local_alignment(codes: SparseCodes, v: Tensor) -> Tensor:
    """First term of Eq. 4: `Σ_{j∈F_t} v[j] h̃_t[j]` for every token, [T], in float32 or the wider of the dtypes."""
    dtype = torch.promote_types(torch.promote_types(codes.values.dtype, v.dtype), torch.float32)
    # an inactive entry may carry any index, and inf * 0 would be nan
    weights = v.to(codes.values.device, dtype)[torch.where(codes.active(), codes.indices, 0)]
    return torch.where(codes.active(), codes.values.to(dtype) * weights, 0.0).sum(-1)


def token_resonance(
    codes: SparseCodes,
    v: Tensor,
    turn_index: Tensor | Sequence[int],
    speaker_codes: Sequence[SparseCodes],
    beta: float = 4.0,
    *,
    run: Sequence[int] | None = None,
) -> Tensor:
    """r_t of Eq. 4: local alignment plus β times the speaker-conditioned broadcast.

    Turn k's marker counts for T_k and T_{k-1}, so a token gets b_k + b_{k+1}: the weight of its own turn's marker and
    of the reply's, b_k being the sum of v over F(P_k).

    Args:
        codes: [T, k].
        v: guidance [d_sae].
        turn_index: [T], turn of each token; -1: of none, local alignment only.
        speaker_codes: for each turn the codes [·, k] of its speaker-marker tokens; F(P_k) is the union of their
            active features.
        beta: weight of the broadcast.
        run: run number of each turn. With it the broadcast from turn k+1 to turn k does not cross a gap.

    Returns:
        [T] in the wider of the dtypes of values and v.

    Raises:
        ConfigError: lengths that differ, or a turn index out of range.
    """
    resonance, d_sae, n_turns = local_alignment(codes, v), len(v), len(speaker_codes)
    turns = torch.as_tensor(turn_index, dtype=torch.int64, device=resonance.device)
    if turns.shape != resonance.shape or (run is not None and len(run) != n_turns):
        runs = "any" if run is None else len(run)
        raise ConfigError(f"{turns.numel()} turn indices and {runs} runs for {len(resonance)} tokens, {n_turns} turns")
    if turns.numel() and not -1 <= int(turns.min()) <= int(turns.max()) < n_turns:
        raise ConfigError(f"turn indices from {int(turns.min())} to {int(turns.max())}, but {n_turns} turns")
    if n_turns:
        features = [active_features(one) for one in speaker_codes]
        owner = torch.repeat_interleave(torch.tensor([len(found) for found in features])).to(features[0].device)
        pairs = torch.unique(owner * d_sae + torch.cat(features)).to(v.device)
        b = v.new_zeros(n_turns, dtype=torch.promote_types(v.dtype, torch.float32))
        b.index_add_(0, pairs // d_sae, v[pairs % d_sae].to(b.dtype))
        reply = F.pad(b[1:], (0, 1))
        if run is not None:
            numbers = torch.as_tensor(run, device=b.device)
            reply = torch.where(F.pad(numbers[1:] == numbers[:-1], (0, 1)), reply, 0.0)
        received = (b + reply).to(resonance)
        resonance = resonance + beta * torch.where(turns >= 0, received[turns.clamp(min=0)], 0.0)
    return resonance.to(torch.promote_types(codes.values.dtype, v.dtype))


def gaussian_smooth(r: Tensor, sigma: float) -> Tensor:
    """s = r ∗ K (Section 4.3): a Gaussian of width sigma, cut at ceil(3 sigma), normalised to 1, zeros beyond the ends.

    Args:
        r: [T], floating.
        sigma: in tokens; 0: r itself.
    """
    radius = math.ceil(3 * sigma)
    if radius == 0 or not r.numel():
        return r
    dtype = torch.promote_types(r.dtype, torch.float32)
    steps = torch.arange(-radius, radius + 1, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (steps / sigma) ** 2)
    kernel = (kernel / kernel.sum()).to(r.device, dtype)
    return F.conv1d(r.to(dtype)[None, None], kernel[None, None], padding=radius)[0, 0].to(r.dtype)


def smooth_runs(r: Tensor, run: Tensor, sigma: float) -> Tensor:
    """`gaussian_smooth` of each run on its own.

    Args:
        r: [T]. run: int64 [T], ascending: the run of each token.
    """
    if not r.numel():
        return r
    lengths = run.unique_consecutive(return_counts=True)[1].tolist()
    return torch.cat([gaussian_smooth(part, sigma) for part in r.split(lengths)])


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


def combine_layers(resonances: Sequence[Tensor]) -> Tensor:
    """One resonance [T] of several layers: each standardised over the tokens, then the mean; a single one as it is."""
    if len(resonances) == 1 or not len(resonances[0]):
        return resonances[0]
    layers = torch.stack(list(resonances), 1)
    return standardise_turns(layers, torch.ones_like(layers, dtype=torch.bool)).mean(1)


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
    known = AGGREGATE.fullmatch(agg)
    if not 0 <= lam <= 1 or known is None:
        raise ConfigError(f"lam must be between 0 and 1 and agg mean, max or top<m>, got {lam} and {agg!r}")
    turns = torch.as_tensor(turn_index, dtype=torch.int64, device=s.device)
    captions = torch.as_tensor(is_caption, dtype=torch.bool, device=s.device)
    if turns.shape != s.shape or captions.shape != s.shape:
        raise ConfigError(f"{turns.numel()} turn indices and {captions.numel()} flags for {s.numel()} tokens")
    if turns.numel() and not -1 <= int(turns.min()) <= int(turns.max()) < n_turns:
        raise ConfigError(f"turn indices from {int(turns.min())} to {int(turns.max())}, but {n_turns} turns")
    inside = turns >= 0
    # text of turn k is group 2k, its captions 2k + 1
    values, group = s[inside], (2 * turns + captions)[inside]
    counts = torch.bincount(group, minlength=2 * n_turns)
    if agg != "mean":
        largest = int(known[1] or 1)
        order = values.argsort(descending=True)
        order = order[group[order].argsort(stable=True)]
        first = counts.cumsum(0) - counts
        rank = torch.arange(len(order), device=values.device) - first[group[order]]
        kept = order[rank < largest]
        values, group = values[kept], group[kept]
        counts = counts.clamp(max=largest)
    dtype = torch.promote_types(s.dtype, torch.float32)
    sums = values.new_zeros(2 * n_turns, dtype=dtype).index_add_(0, group, values.to(dtype))
    means = torch.where(counts > 0, sums / counts.clamp(min=1), -torch.inf).to(s.dtype)
    text, caption = means.view(n_turns, 2).unbind(-1)
    both = (1 - lam) * text + lam * caption
    return torch.where(caption == -torch.inf, text, torch.where(text == -torch.inf, caption, both))


def select_blocks(
    salience: Tensor | Sequence[float],
    turn_tokens: Tensor | Sequence[int],
    budget: float | None = None,
    threshold: float | None = None,
    window: int = 1,
    run: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Blocks B_i of Section 4.3: salient turns with their windows, neighbours merged.

    With a budget, turns are taken by falling salience (ties: the earlier first). Each adds itself and its window; only
    turns not yet taken cost tokens, and the first addition that would pass the budget ends the selection. With a
    threshold δ, every turn with salience above it is taken, plus its window. A turn of salience -inf is never taken on
    its own account, but may be in the window of another.

    Args:
        salience: s_turn [n_turns].
        turn_tokens: length of each turn in tokens [n_turns].
        budget: tokens the blocks may hold in all.
        threshold: δ.
        window: w, turns on either side of a taken one.
        run: run number of each turn; windows and blocks stay within one. None: all turns follow one another.

    Returns:
        Inclusive turn ranges, ascending and disjoint; no two of one run touch.

    Raises:
        ConfigError: not exactly one of budget and threshold, NaN, lengths that differ.
    """
    scores = salience.tolist() if isinstance(salience, Tensor) else [float(value) for value in salience]
    lengths = [int(value) for value in turn_tokens]
    runs = [0] * len(scores) if run is None else list(run)
    if len(lengths) != len(scores) or len(runs) != len(scores):
        raise ConfigError(f"{len(scores)} saliences, {len(lengths)} turn lengths and {len(runs)} run numbers")
    if (budget is None) == (threshold is None):
        raise ConfigError("give exactly one of budget and threshold")
    if any(value is not None and value != value for value in (budget, threshold, *scores)):
        raise ConfigError("salience, budget or threshold is NaN")

    least = -math.inf if threshold is None else threshold
    taken: set[int] = set()
    used = 0
    for turn in sorted(range(len(scores)), key=lambda turn: -scores[turn]):
        if not scores[turn] > least:
            break
        first = last = turn
        while first > max(0, turn - window) and runs[first - 1] == runs[turn]:
            first -= 1
        while last < min(len(scores) - 1, turn + window) and runs[last + 1] == runs[turn]:
            last += 1
        new = [other for other in range(first, last + 1) if other not in taken]
        used += sum(lengths[other] for other in new)
        if budget is not None and used > budget:
            break
        taken.update(new)
    blocks: list[tuple[int, int]] = []
    for turn in sorted(taken):
        if blocks and blocks[-1][1] == turn - 1 and runs[turn - 1] == runs[turn]:
            blocks[-1] = (blocks[-1][0], turn)
        else:
            blocks.append((turn, turn))
    return blocks
