"""The scores: RefMem-Bench's (Appendix D.7, Eq. 9-14), LoCoMo's F1, LongMemEval's ranking metrics.

Sample scores only; `remind.evaluation.scores` averages them (Eq. 8) and says which samples take part.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from remind.core.errors import ConfigError
from remind.text.words import stem, words

if TYPE_CHECKING:
    from torch import Tensor

_LOCOMO_DROPPED = re.compile(r"\b(?:a|an|the|and)\b")
_LOCOMO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ABSTAINS = ("no information available", "not mentioned")


def accuracy(predicted: set[str], gold: set[str]) -> float:
    """s_i of Eq. 9 for option tasks: 1.0 if both sets are equal, else 0.0."""
    return float(set(predicted) == set(gold))


def memory_recall_text(
    gold: Sequence[str], predicted: Sequence[str], encode: Callable[[list[str]], Tensor]
) -> float | None:
    """Eq. 10 for one sample: mean over the gold lines of the best cosine with a predicted line.

    Both sides are sets in the paper, so a line given twice counts once.

    Args:
        encode: lines to unit rows [n, d], so that the dot product is the cosine.

    Returns:
        A value in [-1, 1], or None if either side is empty (the sample is not in V).
    """
    expected, predicted_lines = list(dict.fromkeys(gold)), list(dict.fromkeys(predicted))
    if not expected or not predicted_lines:
        return None
    cosines = encode(expected).double() @ encode(predicted_lines).double().T
    # float32 unit rows are unit to 1e-7 only
    return float(cosines.max(dim=1).values.clamp(-1.0, 1.0).mean())


def memory_recall_visual(gold: set[int], predicted: set[int]) -> float | None:
    """Eq. 11 for one sample: share of the gold image indices that were named; None if there are none (not in V_vis)."""
    return len(set(gold) & set(predicted)) / len(set(gold)) if gold else None


def _overlap(predicted: list[str], reference: list[str]) -> int:
    """Eq. 12: clipped unigram overlap."""
    return (Counter(predicted) & Counter(reference)).total()


def _best(prediction: str, references: Sequence[str], score: Callable[[list[str], list[str]], float]) -> float:
    predicted = words(prediction)
    if not predicted:
        return 0.0
    return max((score(predicted, words(reference)) for reference in references), default=0.0)


def bleu1(prediction: str, references: Sequence[str]) -> float:
    """Eq. 13 against the best reference: clipped unigram precision times the brevity penalty.

    0.0 where the prediction has no word, and where there is no reference.
    """

    def score(predicted: list[str], reference: list[str]) -> float:
        precision = _overlap(predicted, reference) / len(predicted)
        return precision * min(1.0, math.exp(1 - len(reference) / len(predicted)))

    return _best(prediction, references, score)


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Eq. 14 against the best reference: 2 Overlap / (|T_p| + |T_r|).

    0.0 where the prediction has no word, and where there is no reference.
    """
    return _best(prediction, references, lambda p, r: 2 * _overlap(p, r) / (len(p) + len(r)))


def _locomo_tokens(text: str) -> list[str]:
    plain = text.replace(",", "").lower().translate(_LOCOMO_PUNCTUATION)
    return [stem(word) for word in _LOCOMO_DROPPED.sub(" ", plain).split()]


def _locomo_bag_f1(prediction: str, answer: str) -> float:
    predicted, gold = _locomo_tokens(prediction), _locomo_tokens(answer)
    overlap = _overlap(predicted, gold)
    return 2 * overlap / (len(predicted) + len(gold)) if overlap else 0.0


def locomo_f1(prediction: str, answer: str, category: int) -> float:
    """LoCoMo's question-answering F1 (its `task_eval/evaluation.py`).

    Both sides: commas deleted, lower case, punctuation deleted, "a", "an", "the", "and" dropped, words Porter-stemmed.
    Categories 2 and 4: F1 of the bags of words. 3: the same, the answer cut at its first ";". 1 (several answers):
    both sides split at ",", mean over the gold parts of the best part. 5 (nothing to find): 1.0 if the prediction says
    "no information available" or "not mentioned", whatever the answer.

    Raises:
        ConfigError: a category LoCoMo does not have.
    """
    answer = str(answer)  # years stand as numbers in the file
    if category == 5:
        return float(any(phrase in prediction.lower() for phrase in _ABSTAINS))
    if category == 1:
        parts, gold = prediction.split(","), answer.split(",")
        return sum(max(_locomo_bag_f1(part, answer_part) for part in parts) for answer_part in gold) / len(gold)
    if category in (2, 3, 4):
        return _locomo_bag_f1(prediction, answer.split(";")[0] if category == 3 else answer)
    raise ConfigError(f"LoCoMo has no category {category!r}; there are 1 to 5")


def _top(ranked: Sequence[str], k: int) -> Sequence[str]:
    if k < 1:
        raise ConfigError(f"k must be at least 1, not {k}")
    return ranked[:k]


def recall_any(ranked: Sequence[str], gold: set[str], k: int) -> float:
    """LongMemEval's recall_any@k: 1.0 if one gold id is among the first k.

    A k beyond the list takes the whole list. No gold: 0.0. Raises ConfigError if k < 1.
    """
    return float(bool(set(gold) & set(_top(ranked, k))))


def recall_all(ranked: Sequence[str], gold: set[str], k: int) -> float:
    """LongMemEval's recall_all@k: 1.0 if every gold id is among the first k.

    A k beyond the list takes the whole list. No gold: 1.0, as nothing is missing; questions without gold evidence
    (LongMemEval's abstentions) are left out of its averages. Raises ConfigError if k < 1.
    """
    return float(set(gold) <= set(_top(ranked, k)))


def ndcg_any(ranked: Sequence[str], gold: set[str], k: int) -> float:
    """LongMemEval's ndcg_any@k, with DCG = rel_1 + sum_{i>=2} rel_i / log2(i): ranks 1 and 2 weigh the same.

    The ideal ranking has min(|gold|, k) gold ids in front, so a gold id that is not ranked at all costs. An id ranked
    twice counts at its first place only. No gold: 0.0. Raises ConfigError if k < 1.
    """
    missing = set(gold)
    gains = []
    for item in _top(ranked, k):
        gains.append(float(item in missing))
        missing.discard(item)
    ideal = _dcg([1.0] * min(len(set(gold)), k))
    return _dcg(gains) / ideal if ideal else 0.0


def _dcg(gains: Sequence[float]) -> float:
    return sum(gain / (math.log2(rank) if rank > 1 else 1.0) for rank, gain in enumerate(gains, start=1))
