"""Scores against hand-computed values, float64 brute force and the definitions of their sources."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remind.core.errors import ConfigError
from remind.evaluation import metrics

WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "é"]), max_size=8).map(" ".join)


def unit_rows(lines: list[str]) -> torch.Tensor:
    rows = [np.random.default_rng(sum(map(ord, line))).normal(size=5) for line in lines]
    return torch.tensor(np.array([row / np.linalg.norm(row) for row in rows]))


def test_memory_recall_is_that_of_brute_force_over_sets() -> None:
    gold, predicted = ["one", "two", "three"], ["four", "two"]
    expected = [max(float(unit_rows([g])[0] @ unit_rows([p])[0]) for p in predicted) for g in gold]
    for one, other in ((gold, predicted), (gold * 2, predicted * 3)):
        assert metrics.memory_recall_text(one, other, unit_rows) == pytest.approx(sum(expected) / 3, abs=1e-12)
    assert metrics.memory_recall_text([], ["c"], unit_rows) is metrics.memory_recall_text(["a"], [], unit_rows) is None
    assert metrics.memory_recall_visual({0, 3, 5}, {3, 5, 9}) == pytest.approx(2 / 3)
    assert (metrics.memory_recall_visual({1}, set()), metrics.memory_recall_visual(set(), {1})) == (0.0, None)


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("The CAT!", ["the, cat"], 1.0),
        # best reference, whatever the order
        ("hiking", ["a long walk", "hiking"], 1.0),
        ("...", ["a"], 0.0),
        ("Ünïcode 東京", ["東京 ünïcode"], 1.0),
    ],
)
def test_what_words_are_and_the_best_reference(prediction: str, references: list[str], score: float) -> None:
    for metric in (metrics.bleu1, metrics.token_f1):
        assert metric(prediction, references) == pytest.approx(score, abs=1e-12)


@given(WORDS, WORDS)
def test_bleu1_and_f1_against_the_equations(prediction: str, reference: str) -> None:
    p, r = prediction.split(), reference.split()
    overlap = sum(min(p.count(w), r.count(w)) for w in set(p) | set(r))
    bleu = f1 = 0.0
    if overlap:
        precision, recall = overlap / len(p), overlap / len(r)
        bleu = precision * (1.0 if len(p) >= len(r) else math.exp(1 - len(r) / len(p)))
        f1 = 2 * precision * recall / (precision + recall)
    assert metrics.bleu1(prediction, [reference]) == pytest.approx(bleu, abs=1e-12)
    assert metrics.token_f1(prediction, [reference]) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answer", "category", "expected"),
    [
        ("she was running", "run", 4, 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        # the stemmer's default mode maps "dying" to "die" and "ties" to "tie" (plain Porter: "dy", "ti")
        ("dying ties", "die tie", 2, 1.0),
        # commas go before anything else, so "1,000" is one token; in categories 2 to 4 they do not split
        ("1,000 dollars", "1000 dollar", 4, 1.0),
        ("2022", 2022, 2, 1.0),
        ("coffee", "coffee; she dislikes tea", 3, 1.0),
        ("coffee", "coffee; tea", 4, 2 * 1 * 0.5 / 1.5),
        # several answers: best part for each gold part, then the mean over gold parts
        ("pottery, camping", "camping, painting, swimming", 1, 1 / 3),
        ("red cat", "red dog, blue cat", 1, 0.5),
        ("There is No Information Available here", "anything", 5, 1.0),
        ("a lamp", "No information available", 5, 0.0),
        ("the", "the", 4, 0.0),
    ],
)
def test_locomo_f1_by_hand(prediction: str, answer: str, category: int, expected: float) -> None:
    assert metrics.locomo_f1(prediction, answer, category) == pytest.approx(expected, abs=1e-12)


def test_rankings() -> None:
    # DCG = 1 + 1/log2(3), ideal DCG = 1 + 1: ranks 1 and 2 weigh the same
    assert metrics.ndcg_any(["g", "x", "h"], {"g", "h"}, 3) == pytest.approx((1 + 1 / math.log2(3)) / 2)
    # a gold id that was not ranked costs; one ranked twice counts once
    assert metrics.ndcg_any(["g"], {"g", "h"}, 5) == metrics.ndcg_any(["g", "g"], {"g", "h"}, 5) == 0.5
    every = (metrics.recall_any, metrics.recall_all, metrics.ndcg_any)
    assert [metric([], {"g"}, 5) for metric in every] == [0.0, 0.0, 0.0]
    assert [metric(["x"], set(), 5) for metric in every] == [0.0, 1.0, 0.0]
    with pytest.raises(ConfigError, match="at least 1"):
        metrics.recall_any(["g"], {"g"}, 0)
    with pytest.raises(ConfigError, match="no category 6"):
        metrics.locomo_f1("a", "a", 6)
