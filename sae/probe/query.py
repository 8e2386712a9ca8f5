"""Search features by words in their top examples."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sae.errors import ConfigError, ShapeError
from sae.probe.examples import Example, TopExamples

_WORD = re.compile(r"\w+")
#: Texts given to a scorer at a time.
_CHUNK = 1024


class FeatureMatch(NamedTuple):
    """A feature, its score, and the example that matched best (the strongest of equals)."""

    feature: int
    score: float
    example: Example

    def __str__(self) -> str:
        return f"{self.feature:>6}  {self.score:6.3f}  {self.example}"


def search(
    examples: TopExamples,
    query: str,
    n: int = 10,
    *,
    peak_weight: float = 0.5,
    min_examples: int = 1,
    scorer: Callable[[list[str]], Tensor] | None = None,
) -> list[FeatureMatch]:
    """Features whose top examples match a query best.

    With v_e > 0 the activation of example e of a feature and m_e in [0, 1] its match, the feature's score is the mean
    of m weighted by activation, Σ_e v_e m_e / Σ_e v_e. The match is lexical: of the query's distinct words,

        m_e = peak_weight · (share found at the peak) + (1 - peak_weight) · (share found anywhere in the context),

    where words are \\w+ casefolded, and those at the peak are the whole words that share a character with the peak
    token. A score of 1: the peak token of every example is (part of) the query's one word.

    Args:
        examples: of one layer.
        query: words; order does not count.
        n: features at most; with the lexical score only such with a score above 0.
        peak_weight: see above, in [0, 1].
        min_examples: features with fewer examples are left out.
        scorer: m_e from context texts instead (list of n strings to [n], any scale), for instance their cosine with an
            embedding of the query; the query itself is then not looked at.

    Returns:
        By falling score; among equals the feature with more examples, then the lower one.

    Raises:
        ConfigError: a query without words, or a weight out of range.
        ShapeError: a scorer that does not give one finite number per text.
    """
    words = {word.casefold() for word in _WORD.findall(query)}
    if scorer is None and not words:
        raise ConfigError(f"the query {query!r} has no words")
    if not 0 <= peak_weight <= 1:
        raise ConfigError(f"peak_weight {peak_weight} must lie between 0 and 1")
    pending: list[list[Example]] = []
    matches: list[tuple[float, int, int, Example]] = []

    def settle() -> None:
        flat = [example for group in pending for example in group]
        if scorer is None:
            scores = [_lexical(example, words, peak_weight) for example in flat]
        else:
            scores = _scored(scorer, [example.text for example in flat])
        at = 0
        for group in pending:
            mine, at = scores[at : at + len(group)], at + len(group)
            total = sum(example.value for example in group)
            score = sum(example.value * m for example, m in zip(group, mine, strict=True)) / total
            if scorer is not None or score > 0:
                matches.append((score, len(group), group[0].feature, group[mine.index(max(mine))]))
        matches.sort(key=lambda match: (-match[0], -match[1], match[2]))
        del matches[max(n, 0) :]
        pending.clear()

    held = 0
    for feature in examples.features().tolist():
        group = examples.examples(feature)
        if len(group) < min_examples:
            continue
        pending.append(group)
        held += len(group)
        if held >= _CHUNK:
            settle()
            held = 0
    if pending:
        settle()
    return [FeatureMatch(feature, score, example) for score, _, feature, example in matches]


def _lexical(example: Example, words: set[str], peak_weight: float) -> float:
    text = example.text
    start, end = example.span
    context: set[str] = set()
    peak: set[str] = set()
    for found in _WORD.finditer(text):
        word = found[0].casefold()
        if word in words:
            context.add(word)
            if found.start() < end and found.end() > start:
                peak.add(word)
    return (peak_weight * len(peak) + (1 - peak_weight) * len(context)) / len(words)


def _scored(scorer: Callable[[list[str]], Tensor], texts: list[str]) -> list[float]:
    scores = torch.as_tensor(scorer(texts))
    if scores.shape != (len(texts),) or not bool(torch.isfinite(scores).all()):
        raise ShapeError(f"the scorer gave {list(scores.shape)} for {len(texts)} texts: must be one finite number each")
    result: list[float] = scores.detach().cpu().double().tolist()
    return result
