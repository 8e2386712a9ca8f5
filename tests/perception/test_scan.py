from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remind.perception import scan
from remind.perception.ranking import falling
from remind.perception.retrieve import relevance
from remind.perception.scan import Scan, encode_rows

SHAPES = st.tuples(st.integers(1, 60), st.sampled_from([1, 7, 64, 100, 384]), st.integers(0, 10**6))


def vectors_of(n: int, d: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of very different length and spread, one of them zero, and a question."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, d, generator=draw) * torch.rand(n, 1, generator=draw).exp() ** 5
    rows[:, : d // 3] *= 20 * (seed % 2)
    rows[n // 2] = 0
    return rows, torch.randn(d, generator=draw) * 7


def cosines(rows: torch.Tensor, question: torch.Tensor) -> np.ndarray:
    wide, asked = rows.double().numpy(), question.double().numpy()
    norms = np.maximum(np.linalg.norm(wide, axis=1) * np.linalg.norm(asked), 1e-12)
    return np.asarray(wide @ asked / norms)


@pytest.mark.parametrize("kernel", [True, False])
@given(SHAPES)
def test_bounds_hold_and_are_close(kernel: bool, shape: tuple[int, int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SMALL", 0)
        if not kernel:
            patch.setattr(scan, "_kernel", lambda d: None)
        rows, question = vectors_of(*shape)
        made = Scan(rows, encode_rows(rows))
        expected = cosines(rows, question)
        over = made.upper(question) - expected
        assert (over >= 0).all()
        assert over.max() < 0.06


@given(SHAPES, st.randoms(use_true_random=False))
def test_chosen_rows_are_as_in_the_whole(shape: tuple[int, int, int], random: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SMALL", 0)
        rows, question = vectors_of(*shape)
        chosen = np.array(sorted(random.sample(range(len(rows)), random.randint(1, len(rows)))))  # type: ignore[attr-defined]
        made = Scan(rows, encode_rows(rows))
        np.testing.assert_allclose(made.exact(question, chosen), cosines(rows, question)[chosen], atol=1e-6)
        assert np.array_equal(made.exact(question), relevance(question, rows).double().numpy())


@pytest.mark.parametrize("change", ["gone", "wrong", "refuses"])
def test_another_kernel_is_not_trusted(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(question: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if change == "refuses":
            raise RuntimeError("not on this machine")
        return (codes.float() @ question[0].float())[None] * 1.1

    if change == "gone":
        monkeypatch.delattr(torch, "_weight_int8pack_mm", raising=False)
    else:
        monkeypatch.setattr(torch, "_weight_int8pack_mm", wrong, raising=False)
    scan._kernel.cache_clear()
    assert scan._kernel(384) is None
    scan._kernel.cache_clear()


def test_few_vectors_need_no_codes() -> None:
    rows = torch.randn(20, 8)
    assert encode_rows(rows) == {}
    scan_of_few = Scan(rows, {})
    assert not scan_of_few.coded
    assert np.array_equal(scan_of_few.exact(rows[0]), relevance(rows[0], rows).double().numpy())


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
