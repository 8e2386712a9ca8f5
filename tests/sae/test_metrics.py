"""Pooled figures and document frequencies against brute force."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sae import DocumentFrequency, FormatError, ShapeError, SparseCodes, TopKSAE, load_idf, save_idf
from sae.errors import ActivationError
from sae.metrics import Evaluation, evaluate


def test_figures_are_pooled_over_unequal_batches() -> None:
    torch.manual_seed(0)
    coder = TopKSAE(6, 20, 3).requires_grad_(False)
    h = torch.randn(50, 6) * torch.rand(50, 1) * 9 + 4
    [result] = evaluate({4: coder}, ({4: part} for part in h.split([1, 30, 19]))).values()
    out = coder(h).double()
    acts = coder.encode(h).dense(20)
    x = h.double()
    assert result.tokens == 50
    assert result.fvu == pytest.approx(float((x - out).pow(2).sum() / (x - x.mean(0)).pow(2).sum()), rel=1e-9)
    assert result.cosine == pytest.approx(float(torch.cosine_similarity(x, out, dim=1).mean()), rel=1e-9)
    assert result.l0 == pytest.approx(float((acts > 0).sum(1).double().mean()))
    assert result.dead == pytest.approx(float(((acts > 0).sum(0) == 0).double().mean()))
    torch.testing.assert_close(result.density, (acts > 0).double().mean(0))


def test_predicting_the_mean_leaves_everything_unexplained() -> None:
    h = torch.randn(30, 4) + 100
    result = Evaluation(4, 8)
    codes = SparseCodes(torch.zeros(30, 2), torch.zeros(30, 2, dtype=torch.int64))
    result.add(h, h.mean(0).expand_as(h), codes)
    assert result.fvu == pytest.approx(1, rel=1e-4)
    assert result.dead == 1
    with pytest.raises(ActivationError):
        evaluate({1: TopKSAE(4, 8, 2)}, [])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_document_frequency_matches_sets(lengths: list[int], data: st.DataObject) -> None:
    documents = torch.tensor(
        [number for number, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64
    )
    n, k, d_sae = len(documents), 3, 7
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    indices = torch.rand(n, d_sae, generator=generator).argsort(1)[:, :k]
    values = torch.rand(n, k, generator=generator) * (torch.rand(n, k, generator=generator) > 0.4)
    cut = data.draw(st.integers(0, n))
    frequency = DocumentFrequency(d_sae)
    for part in (slice(0, cut), slice(cut, n)):
        frequency.add(SparseCodes(values[part], indices[part]), documents[part])
    sets: dict[int, set[int]] = {}
    for t in range(n):
        active = {int(j) for j, v in zip(indices[t], values[t], strict=True) if v > 0}
        sets.setdefault(int(documents[t]), set()).update(active)
    expected = [sum(j in features for features in sets.values()) for j in range(d_sae)]
    assert frequency.df.tolist() == expected
    assert frequency.n_documents == len(sets)
    idf = [math.log((1 + len(sets)) / (1 + df)) for df in expected]
    torch.testing.assert_close(frequency.idf(), torch.tensor(idf), rtol=1e-6, atol=1e-7)


def test_documents_out_of_order_are_refused() -> None:
    codes = SparseCodes(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64))
    frequency = DocumentFrequency(3)
    with pytest.raises(ShapeError, match="ascending"):
        frequency.add(codes, torch.tensor([2, 1]))
    frequency.add(codes, torch.tensor([1, 2]))
    with pytest.raises(ShapeError, match="ascending"):
        frequency.add(codes, torch.tensor([1, 3]))
    with pytest.raises(ShapeError):
        frequency.add(codes, torch.tensor([3]))


def test_idf_on_disk(tmp_path: Path) -> None:
    assert load_idf(tmp_path) is None
    frequency = DocumentFrequency(3)
    frequency.add(SparseCodes(torch.ones(2, 1), torch.tensor([[0], [1]])), torch.tensor([0, 0]))
    save_idf(tmp_path, frequency)
    loaded = load_idf(tmp_path)
    assert loaded is not None
    torch.testing.assert_close(loaded, torch.tensor([0.0, 0.0, math.log(2)]))
    (tmp_path / "idf.safetensors").write_bytes(b"no")
    with pytest.raises(FormatError, match="damaged"):
        load_idf(tmp_path)
