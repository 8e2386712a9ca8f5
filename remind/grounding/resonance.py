"""The strategy as weights over SAE features (Eq. 3), and how strongly each token resonates with it (Eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from remind.core.errors import ConfigError
from remind.grounding.config import kernel_radius
from sae import SparseCodes


def working_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The widest of `dtypes`, at least float32: sums over thousands of tokens overrun half precision."""
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def flat(codes: SparseCodes) -> tuple[Tensor, Tensor]:
    """Values and indices as [T, k], whatever the leading dimensions."""
    k = codes.indices.shape[-1]
    return codes.values.reshape(-1, k), codes.indices.reshape(-1, k)


def active_features(codes: SparseCodes, d_sae: int) -> Tensor:
    """Indices of all active (token, feature) pairs, one entry per pair; int64 [n].

    Raises:
        ConfigError: an index that is no feature of an SAE with `d_sae` features.
    """
    values, indices = flat(codes)
    chosen = indices[values > 0]
    if chosen.numel() and not (int(chosen.min()) >= 0 and int(chosen.max()) < d_sae):
        raise ConfigError(f"codes name feature {int(chosen.max())}, but there are weights for {d_sae} features")
    return chosen


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

    Raises:
        ConfigError: idf is not a vector of floats, or the codes name a feature it has no weight for.
    """
    if idf.dim() != 1 or not idf.is_floating_point():
        raise ConfigError(f"idf must be a vector of floats, got shape {tuple(idf.shape)} of {idf.dtype}")
    d_sae = idf.shape[0]
    dtype = working_dtype(idf.dtype)
    reason_counts, anchor_counts = (
        torch.bincount(active_features(codes, d_sae), minlength=d_sae).to(idf.device, dtype)
        for codes in (reason, anchors)
    )
    weights = idf.to(dtype)
    anchored = alpha * anchor_counts
    return torch.maximum(weights * reason_counts, anchored * weights if anchor_idf else anchored).to(idf.dtype)


def local_alignment(codes: SparseCodes, v: Tensor) -> Tensor:
    """First term of Eq. 4: `Σ_{j∈F_t} v[j] h̃_t[j]` for every token; [T]."""
    active_features(codes, v.shape[0])
    values, indices = flat(codes)
    dtype = working_dtype(values.dtype, v.dtype)
    active = values > 0
    # an inactive entry may carry any index, and inf * 0 would be nan
    weights = v.to(values.device, dtype)[torch.where(active, indices, 0)]
    return torch.where(active, values.to(dtype) * weights, 0.0).sum(-1)


def speaker_weights(speaker_codes: Sequence[SparseCodes], v: Tensor) -> Tensor:
    """b_k = sum of v over F(P_k), the union of the features active on turn k's speaker-marker tokens; [n_turns]."""
    dtype, d_sae = working_dtype(v.dtype), v.shape[0]
    totals = v.new_zeros(len(speaker_codes), dtype=dtype)
    if not len(speaker_codes):
        return totals
    values = torch.cat([codes.values.reshape(-1) for codes in speaker_codes])
    indices = torch.cat([codes.indices.reshape(-1) for codes in speaker_codes])
    features = active_features(SparseCodes(values[:, None], indices[:, None]), d_sae)
    sizes = torch.tensor([codes.indices.numel() for codes in speaker_codes], device=values.device)
    owner = torch.repeat_interleave(sizes)[values > 0]
    pairs = torch.unique(owner * d_sae + features).to(v.device)
    return totals.index_add_(0, pairs // d_sae, v[pairs % d_sae].to(dtype))


def speaker_broadcast(b: Tensor, run: Sequence[int] | None = None) -> Tensor:
    """Second term of Eq. 4 without β, per turn: `b_k + b_{k+1}`; [n_turns].

    Turn k's marker counts for T_k and T_{k-1}, so a turn gets its own marker's weight and that of the reply after it.

    Args:
        b: [n_turns].
        run: run number of each turn. The reply counts only if it is in the same run; None: all in one.

    Raises:
        ConfigError: run and b differ in length.
    """
    if run is not None and len(run) != len(b):
        raise ConfigError(f"{len(run)} run numbers for {len(b)} turns")
    reply = F.pad(b[1:], (0, 1)) if len(b) else b
    if run is not None and len(b):
        numbers = torch.as_tensor(run, device=b.device)
        reply = torch.where(F.pad(numbers[1:] == numbers[:-1], (0, 1)), reply, 0.0)
    return b + reply


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
    if v.dim() != 1:
        raise ConfigError(f"guidance must be a vector, got shape {tuple(v.shape)}")
    local = local_alignment(codes, v)
    turns = torch.as_tensor(turn_index, dtype=torch.int64, device=local.device)
    if turns.shape != local.shape:
        raise ConfigError(f"{turns.numel()} turn indices for {local.numel()} tokens")
    check_turns(turns, len(speaker_codes))
    received = speaker_broadcast(speaker_weights(speaker_codes, v), run).to(local.device, local.dtype)
    resonance = local
    if len(received):
        resonance = local + beta * torch.where(turns >= 0, received[turns.clamp(min=0)], 0.0)
    return resonance.to(torch.promote_types(codes.values.dtype, v.dtype))


def check_turns(turns: Tensor, n_turns: int) -> None:
    """Raise ConfigError unless every index is -1 or one of `n_turns` turns."""
    if turns.numel() and not (int(turns.min()) >= -1 and int(turns.max()) < n_turns):
        raise ConfigError(
            f"turn indices reach from {int(turns.min())} to {int(turns.max())}, but there are {n_turns} turns"
        )


def gaussian_smooth(r: Tensor, sigma: float) -> Tensor:
    """s = r ∗ K (Section 4.3): a Gaussian of width sigma, cut at ceil(3 sigma), normalised to 1, zeros beyond the ends.

    Args:
        r: [T], floating.
        sigma: in tokens; 0: r itself.

    Raises:
        ConfigError: sigma is negative or not finite, or r is not a vector of floats.
    """
    radius = kernel_radius(sigma)
    if r.dim() != 1 or not r.is_floating_point():
        raise ConfigError(f"resonance must be a vector of floats, got shape {tuple(r.shape)} of {r.dtype}")
    if radius == 0 or not r.numel():
        return r
    dtype = working_dtype(r.dtype)
    steps = torch.arange(-radius, radius + 1, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (steps / sigma) ** 2)
    kernel = (kernel / kernel.sum()).to(r.device, dtype)
    return F.conv1d(r.to(dtype)[None, None], kernel[None, None], padding=radius)[0, 0].to(r.dtype)


def smooth_runs(r: Tensor, run: Tensor, sigma: float) -> Tensor:
    """`gaussian_smooth` of each run on its own, in one convolution.

    Args:
        r: [T]. run: int64 [T], ascending: the run of each token.
    """
    radius = kernel_radius(sigma)
    if radius == 0 or not r.numel():
        return r
    # zeros as wide as the kernel's arm between two runs are the zeros beyond their ends
    gaps = F.pad((run[1:] != run[:-1]).long(), (1, 0)).cumsum(0) * radius
    places = torch.arange(len(r), device=r.device) + gaps
    spread = r.new_zeros(int(places[-1]) + 1)
    spread[places] = r
    return gaussian_smooth(spread, sigma)[places]


def standardise(r: Tensor) -> Tensor:
    """Zero mean and unit standard deviation (of the population); zeros where all values are equal."""
    if not r.numel():
        return r
    centred = r - r.mean()
    deviation = centred.square().mean().sqrt()
    # equal values leave a rounding residue instead of zero
    flat_line = deviation <= 1e-6 * r.abs().max()
    return torch.where(flat_line, torch.zeros_like(r), centred / deviation)


def combine_layers(resonances: Sequence[Tensor]) -> Tensor:
    """One resonance from several layers: each standardised over the tokens, then their mean; a single one as it is."""
    if len(resonances) == 1:
        return resonances[0]
    return torch.stack([standardise(r) for r in resonances]).mean(0)
