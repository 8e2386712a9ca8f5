from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from remind.perception.ranking import Ranking


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 70), st.randoms(use_true_random=False))
def test_falls_by_score_then_position_and_scores_exactly_what_it_must(
    levels: list[int], first: int, random: object
) -> None:
    scores = np.array(levels, dtype=float)
    slack = np.array([random.choice([0, 0.5, 3]) for _ in levels])  # type: ignore[attr-defined]
    looked: list[int] = []

    def exact(rows: np.ndarray) -> np.ndarray:
        looked.extend(rows.tolist())
        return scores[rows]

    expected = sorted(range(len(levels)), key=lambda place: (-scores[place], place))
    assert list(chain(*Ranking(scores).falling(first))) == expected
    assert list(chain(*Ranking(scores + slack, exact).falling(first))) == expected
    assert sorted(looked) == list(range(len(levels)))


def test_the_best_need_few_exact_scores() -> None:
    scores = np.random.default_rng(0).normal(size=10_000)
    looked: list[int] = []

    def exact(rows: np.ndarray) -> np.ndarray:
        looked.extend(rows.tolist())
        return scores[rows]

    ranking = Ranking(scores + 0.05, exact)
    first = next(ranking.falling(50))
    order = np.argsort(-scores).tolist()
    assert first[:20] == order[:20]
    assert len(looked) == 50
    assert ranking.following(first[-1], np.arange(10_000)) == order[len(first)]
    assert len(looked) < 100


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 9), st.data())
def test_what_follows_among_some(levels: list[int], first: int, data: st.DataObject) -> None:
    scores = np.array(levels, dtype=float)
    slack = np.array(data.draw(st.lists(st.sampled_from([0, 1, 9]), min_size=len(levels), max_size=len(levels))))
    order = sorted(range(len(levels)), key=lambda place: (-scores[place], place))
    for ranking in (Ranking(scores), Ranking(scores + slack, lambda rows: scores[rows])):
        position = next(ranking.falling(first))[-1]
        for _ in range(4):
            among = sorted(data.draw(st.sets(st.sampled_from(range(len(levels))))))
            expected = next((place for place in order[order.index(position) + 1 :] if place in among), None)
            assert ranking.following(position, np.array(among, dtype=np.int64)) == expected
            position = position if expected is None else expected
