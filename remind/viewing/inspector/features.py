"""Which features the page shows of each token and turn, and where else in the dialogue they fire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from sae import SparseCodes
from sae.pages import digits

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
#: Tokens shown to the left and to the right of an example's peak.
CONTEXT = 7


@dataclass(frozen=True)
class Active:
    """All active (token, feature) pairs of a layer, by token and then by falling contribution and activation.

    Attributes:
        token, feature: int64 [n]. value: float32 [n], h̃_t[j].
        share: float32 [n], v[j] h̃_t[j], what the pair adds to the token's local alignment (Eq. 4).
    """

    token: Array
    feature: Array
    value: Array
    share: Array


def active_pairs(codes: SparseCodes, v: Tensor) -> Active:
    """The pairs of codes [T, k] under guidance v [d_sae]."""
    values, indices = codes.values.float().numpy(), codes.indices.numpy()
    token, place = np.nonzero(values > 0)
    feature, value = indices[token, place].astype(np.int64), values[token, place]
    share = (value * v.float().numpy()[feature]).astype(np.float32)
    order = np.lexsort((feature, -value, -share, token))
    return Active(token[order], feature[order], value[order], share[order])


def kept_per_token(pairs: Active, n_tokens: int, width: int) -> tuple[Array, Array]:
    """Features and activations shown of each token: half for what adds most to its resonance, the rest for what fires
    most strongly beside it.

    Returns:
        int64 [T, width], -1 where there are fewer; float32 [T, width].
    """
    starts = np.searchsorted(pairs.token, np.arange(n_tokens))
    rank = np.arange(len(pairs.token)) - starts[pairs.token]
    carried = (rank < (width + 1) // 2) & (pairs.share > 0)
    # those that carry stand before the others, which go by activation
    order = np.lexsort((pairs.feature, -pairs.value, np.where(carried, rank, width), pairs.token))
    token = pairs.token[order]
    place = np.arange(len(token)) - starts[token]
    chosen = place < width
    features = np.full((n_tokens, width), -1, dtype=np.int64)
    values = np.zeros((n_tokens, width), dtype=np.float32)
    features[token[chosen], place[chosen]] = pairs.feature[order][chosen]
    values[token[chosen], place[chosen]] = pairs.value[order][chosen]
    return features, values


def carried_turns(pairs: Active, turn: Array, n_turns: int, most: int) -> list[list[tuple[int, float]]]:
    """For each turn what its alignment is made of: (feature, Σ over its tokens of v[j] h̃_t[j]), falling; none of 0.

    Args:
        turn: int64 [T], turn of each token.
    """
    if not len(pairs.token):
        return [[] for _ in range(n_turns)]
    width = int(pairs.feature.max()) + 1
    keys, group = np.unique(turn[pairs.token] * width + pairs.feature, return_inverse=True)
    total = np.bincount(group, weights=pairs.share, minlength=len(keys))
    owner, feature = keys // width, keys % width
    order = np.lexsort((feature, -total, owner))
    place = np.arange(len(keys)) - np.searchsorted(owner[order], np.arange(n_turns))[owner[order]]
    found: list[list[tuple[int, float]]] = [[] for _ in range(n_turns)]
    for index in order[(place < most) & (total[order] > 0)].tolist():
        found[int(owner[index])].append((int(feature[index]), float(total[index])))
    return found


def dialogue_examples(
    pairs: Active, turn: Array, wanted: Array, most: int
) -> tuple[dict[int, list[tuple[int, str]]], dict[int, int]]:
    """The tokens of the dialogue on which each feature fires most strongly, at most one of a turn.

    Args:
        turn: int64 [T], turn of each token, ascending. wanted: features, ascending.

    Returns:
        By feature its examples, by falling activation (ties: the earlier token): the peak token, and a digit from 0 to
        9 for each token from `CONTEXT` before it to `CONTEXT` after it inside its turn, its activation relative to the
        feature's largest. By feature the number of tokens it fires on.
    """
    d = int(pairs.feature.max()) + 1 if len(pairs.feature) else 1
    fired = np.bincount(pairs.feature, minlength=d)
    order = np.lexsort((pairs.token, -pairs.value, pairs.feature))
    order = order[np.isin(pairs.feature[order], wanted)]
    feature, token, value = pairs.feature[order], pairs.token[order], pairs.value[order]
    # the first of a (feature, turn) is its strongest
    _, first = np.unique(feature * (int(turn.max(initial=0)) + 1) + turn[token], return_index=True)
    first.sort()
    peaks, owners = token[first], feature[first]
    rank = np.arange(len(first)) - np.searchsorted(owners, owners)
    peaks, owners = peaks[rank < most], owners[rank < most]
    keys = pairs.feature * len(turn) + pairs.token
    by_key = np.argsort(keys)
    keys, values = keys[by_key], pairs.value[by_key]
    largest = np.zeros(d, dtype=np.float32)
    np.maximum.at(largest, feature, value)
    found: dict[int, list[tuple[int, str]]] = {int(j): [] for j in wanted}
    start, end = np.searchsorted(turn, turn[peaks]), np.searchsorted(turn, turn[peaks], side="right")
    for peak, owner, low, high in zip(peaks.tolist(), owners.tolist(), start.tolist(), end.tolist(), strict=True):
        near = np.arange(max(low, peak - CONTEXT), min(high, peak + CONTEXT + 1))
        asked = owner * len(turn) + near
        place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
        here = np.where(keys[place] == asked, values[place], 0.0)
        found[owner].append((peak, digits(here, float(largest[owner]))))
    return found, {int(j): int(fired[j]) if j < d else 0 for j in wanted}
