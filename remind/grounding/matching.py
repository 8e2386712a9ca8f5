"""A question's own words against the turns: their codes, and a resonance counted word by word.

Eq. 4 adds all strategy tokens up into one guidance vector, in which a common word weighs as much as a telling one that
half the turns lack. `match_each` instead looks for each question token's best partner in the turn, and counts by how
far that partner stands out among the turns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from remind.data.dialogue import Dialogue
from remind.grounding.encode import SparseEncoder
from remind.grounding.signals import empty_words, name_words
from remind.states.pyramid import one_line
from sae import SparseCodes

#: Entries of [tokens of the dialogue, tokens of questions] in memory at a time.
_BLOCK = 1 << 24


def content_tokens(text: str, offsets: Sequence[tuple[int, int]], skip: frozenset[str]) -> list[bool]:
    """Whether each token belongs to a word that is not skipped; all tokens where every word is.

    Args:
        offsets: character spans in `text`.
    """
    kept = [match.span() for match in re.finditer(r"\w+", text) if match.group().lower() not in skip]
    inside = [any(first < end and start < stop for first, stop in kept) for start, end in offsets]
    return inside if any(inside) else [True] * len(inside)


def question_codes(
    encoder: SparseEncoder, dialogue: Dialogue, questions: Sequence[str]
) -> tuple[dict[int, SparseCodes], Tensor]:
    """Codes of the content tokens of each question; speakers' names, function and question words have none.

    Returns:
        Layer to [tokens, k]; number of the question of each token, int64 [tokens], ascending.
    """
    skip = empty_words() | name_words(dialogue)
    ids, kept, owners = [], [], []
    for number, question in enumerate(map(one_line, questions)):
        tokens = encoder.backbone.tokenize(question)
        length = min(len(tokens.ids), encoder.max_tokens)
        ids.append(tokens.ids[:length])
        kept += content_tokens(question, tokens.offsets[:length], skip)
        owners += [number] * length
    codes = encoder.encode([one for one in ids if one])
    inside = torch.tensor(kept, dtype=torch.bool)
    return {layer: found[inside] for layer, found in codes.items()}, torch.tensor(owners, dtype=torch.int64)[inside]


def unit_features(codes: SparseCodes, idf: Tensor) -> SparseCodes:
    """Activations as √(idf · h̃), so that a product of two is idf · √(h̃ h̃'), and rows of length 1 (or 0)."""
    active = codes.values > 0
    weights = idf.clamp(min=0)[torch.where(active, codes.indices, 0)]
    values = torch.where(active, codes.values.float() * weights, 0.0).sqrt()
    length = values.square().sum(-1, keepdim=True).sqrt()
    return SparseCodes(values / length.clamp(min=1e-12), codes.indices)


def best_partners(codes: SparseCodes, turn: Tensor, n_turns: int, query: SparseCodes, idf: Tensor) -> Tensor:
    """Largest similarity (0 to 1) of each query token to any token of each turn; float32 [n_turns, query tokens].

    Args:
        codes: [T, k]. turn: int64 [T], ascending, turn of each token; -1: of none.
        query: [·, k]. idf: [d_sae].
    """
    inside = turn >= 0
    rows, tokens = unit_features(codes[inside], idf), unit_features(query, idf)
    lengths = torch.bincount(turn[inside], minlength=n_turns)
    best = torch.zeros(n_turns, len(tokens.values))
    if not len(tokens.values) or not int(lengths.sum()):
        return best
    table = torch.zeros(len(idf), len(tokens.values))
    table.scatter_add_(0, tokens.indices.T, tokens.values.T)
    step = max(1, _BLOCK // len(tokens.values))
    ends = lengths.cumsum(0)
    first = 0
    while first < n_turns:
        # whole turns, as many as fit a block, at least one
        start = int(ends[first] - lengths[first])
        last = max(first + 1, int(torch.searchsorted(ends, start + step, right=True)))
        part = rows[start : int(ends[last - 1])]
        products = F.embedding_bag(part.indices, table, per_sample_weights=part.values, mode="sum")
        best[first:last] = torch.segment_reduce(products, "max", lengths=lengths[first:last], unsafe=True, initial=0.0)
        first = last
    return best


def match_each(partners: Tensor, owner: Tensor, inside: Tensor) -> Tensor:
    """Salience by words: Σ over a question's tokens of (best partner − its mean over the turns at hand)²; [n, Q].

    Only what a turn has above the mean counts.

    Args:
        partners: [n, tokens] from `best_partners`.
        owner: int64 [tokens], question of each token.
        inside: bool [n, Q] or [n, 1]: the turns at hand; others get 0.
    """
    questions = inside.shape[1] if inside.shape[1] > 1 else int(owner.max()) + 1 if len(owner) else 1
    whole = inside.expand(-1, questions)
    held = whole[:, owner].float()
    mean = (partners * held).sum(0) / held.sum(0).clamp(min=1)
    excess = (partners - mean).clamp(min=0).square() * held
    return torch.zeros(len(partners), questions).index_add_(1, owner, excess)
