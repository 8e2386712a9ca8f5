"""Codes of a question's own words, each seen in the whole question, in place of anchors taken apart from it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from remind.data.dialogue import Dialogue
from remind.grounding.encode import SparseEncoder
from remind.grounding.signals import empty_words, name_words
from remind.states.pyramid import one_line
from sae import SparseCodes


def content_tokens(text: str, offsets: Sequence[tuple[int, int]], skip: frozenset[str]) -> list[bool]:
    """Whether each token belongs to a word that is not skipped; all tokens where every word is.

    Args:
        offsets: character spans in `text`.
    """
    kept = [match.span() for match in re.finditer(r"\w+", text) if match.group().lower() not in skip]
    found = [any(first < end and start < stop for first, stop in kept) for start, end in offsets]
    return found if any(found) else [True] * len(found)


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
