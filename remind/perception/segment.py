"""u_n of Section 4.2: each session cut into topical segments of contiguous turns.

A boundary stands where the topic shifts: the similarity of the turns before and after it dips below its surroundings
(TextTiling's depth score, on sentence vectors instead of word counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from remind.data.dialogue import Dialogue
from remind.perception.config import SegmentConfig
from remind.states.pyramid import Segment


def segment(
    dialogue: Dialogue, turn_vectors: Tensor, config: SegmentConfig, turn_tokens: Sequence[int]
) -> list[Segment]:
    """Segments in time order that hold every turn exactly once; none crosses a session.

    Args:
        dialogue: n turns.
        turn_vectors: φ of every turn, unit rows [n, d].
        turn_tokens: tokens of every turn [n].
    """
    vectors = turn_vectors.detach().cpu().double().numpy()
    tokens = np.asarray(turn_tokens, dtype=np.int64)

    bounds, start = [], 0
    for session in dialogue.sessions:
        if session.turns:
            bounds.append((start, start + len(session.turns)))
        start += len(session.turns)
    similarities = [_gap_similarities(vectors[first:end], config.window) for first, end in bounds]
    depths = [_depths(similarity) for similarity in similarities]
    every = np.concatenate(depths)
    threshold = every.mean() + config.depth * every.std() if len(every) else np.inf

    segments: list[Segment] = []
    for (first, end), similarity, depth in zip(bounds, similarities, depths, strict=True):
        cuts = _dips(depth, threshold, config.min_turns)
        edges = [0, *cuts, end - first]
        for low, high in pairwise(edges):
            for a, b in _within_cap(low, high, similarity, tokens[first:end], config):
                segments.append(Segment(first + a, first + b - 1))
    return segments


def _gap_similarities(vectors: np.ndarray, window: int) -> np.ndarray:
    """Cosine between the summed turns before and after each of the n - 1 gaps of a session."""
    gaps = []
    for gap in range(1, len(vectors)):
        left = vectors[max(0, gap - window) : gap].sum(axis=0)
        right = vectors[gap : gap + window].sum(axis=0)
        norm = np.linalg.norm(left) * np.linalg.norm(right)
        gaps.append(float(left @ right / norm) if norm > 0 else 0.0)
    return np.asarray(gaps, dtype=np.float64)


def _depths(similarity: np.ndarray) -> np.ndarray:
    """How far each gap lies below the nearest peaks on its two sides, summed."""
    depths = np.zeros_like(similarity)
    for gap, value in enumerate(similarity):
        for step in (-1, 1):
            peak, here = value, gap + step
            while 0 <= here < len(similarity) and similarity[here] >= peak:
                peak = similarity[here]
                here += step
            depths[gap] += peak - value
    return depths


def _dips(depth: np.ndarray, threshold: float, min_turns: int) -> list[int]:
    """Boundaries (turn numbers that begin a segment): deepest first, none closer than `min_turns` to another."""
    n = len(depth) + 1
    taken = [0, n]
    for gap in np.argsort(-depth, kind="stable"):
        cut = int(gap) + 1
        if depth[gap] < threshold or depth[gap] <= 0:
            break
        if all(abs(cut - other) >= min_turns for other in taken):
            taken.append(cut)
    return sorted(taken[2:])


def _within_cap(
    low: int, high: int, similarity: np.ndarray, tokens: np.ndarray, config: SegmentConfig
) -> list[tuple[int, int]]:
    """Turns low to high (exclusive) cut at their weakest gaps until each part fits the cap or is a single turn."""
    todo, done = [(low, high)], []
    while todo:
        a, b = todo.pop()
        if b - a == 1 or tokens[a:b].sum() <= config.max_tokens:
            done.append((a, b))
            continue
        allowed = range(a + config.min_turns, b - config.min_turns + 1) or range(a + 1, b)
        cut = min(allowed, key=lambda c: similarity[c - 1])
        todo += [(cut, b), (a, cut)]
    return done
