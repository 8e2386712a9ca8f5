from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from remind.perception.ranking import falling


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 70), st.randoms(use_true_random=False))
def test_falls_by_score_then_position_and_scores_each_item_once(levels: list[int], first: int, random: object) -> None:
    scores = np.array(levels, dtype=float)
    slack = np.array([random.choice([0, 0.5, 3]) for _ in levels])  # type: ignore[attr-defined]
    scored: list[int] = []

    def exact(rows: np.ndarray) -> np.ndarray:
        scored.extend(rows.tolist())
        return scores[rows]

    expected = sorted(range(len(levels)), key=lambda place: (-scores[place], place))
    assert list(chain(*falling(scores, first))) == expected
    assert list(chain(*falling(scores + slack, first, exact))) == expected
    assert sorted(scored) == list(range(len(levels)))


def test_the_best_need_few_exact_scores() -> None:
    scores = np.random.default_rng(0).normal(size=10_000)
    scored: list[int] = []

    def exact(rows: np.ndarray) -> np.ndarray:
        scored.extend(rows.tolist())
        return scores[rows]

    assert next(falling(scores + 0.05, 50, exact))[:20] == np.argsort(-scores).tolist()[:20]
    assert len(scored) == 50
