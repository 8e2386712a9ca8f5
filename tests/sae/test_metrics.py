"""Pooled figures and document frequencies against brute force."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sae import DocumentFrequency, SparseCodes, TopKSAE
from sae.harvest import TokenBatch
from sae.metrics import LayerEvaluation, evaluate


def reference(coder: TopKSAE, h: Tensor) -> dict[str, float]:
    """The figures of [N, d] by their definitions, token by token, in float64."""
    x, out, acts = h.double(), coder(h).double(), coder.encode(h).dense(coder.d_sae)
    n, error, spread = len(x), float((x - out).pow(2).sum()), float((x - x.mean(0)).pow(2).sum())
    return {
        "tokens": n,
        "fvu": error / spread,
        "explained_variance": 1 - error / spread,
        "mse": error / n,
        "cosine": sum(float(x[t] @ out[t] / x[t].norm() / out[t].norm()) for t in range(n)) / n,
        "l0": float((acts > 0).sum()) / n,
        "dead": sum(not bool((acts[:, j] > 0).any()) for j in range(coder.d_sae)) / coder.d_sae,
    }


def token_batch(h: Tensor, visual: Tensor) -> TokenBatch:
    where = torch.arange(len(h))
    return TokenBatch(activations={2: h, 5: h}, visual=visual, rows=where, positions=where, batch=0)


def test_text_and_visual_tokens_apart(make_coder: Any) -> None:
    coder, visual = make_coder(6, d_sae=40), torch.arange(90) % 3 == 1
    # about different means
    h = torch.randn(90, 6, dtype=torch.float64) + torch.where(visual[:, None], 20.0, -3.0)
    result = evaluate({2: coder}, [token_batch(h[:41], visual[:41]), token_batch(h[41:], visual[41:])])[2]
    for part, tokens in ((result, h), (result.all, h), (result.text, h[~visual]), (result.visual, h[visual])):
        for name, value in reference(coder, tokens).items():
            assert getattr(part, name) == pytest.approx(value, rel=1e-9), name
    density = (coder.encode(h).dense(40) > 0).double().mean(0)
    torch.testing.assert_close(result.density, density)
    assert result.summary()["density_histogram"]["never"] == int((density == 0).sum())
    [plain] = evaluate({2: coder}, [token_batch(h, visual > 1)]).values()
    assert (plain.tokens, plain.visual) == (90, None)
    # what two processes would do: all-reduce by sum, then load
    first, second = (evaluate({2: coder}, [token_batch(h[p], visual[p])])[2] for p in (slice(37), slice(37, None)))
    loaded = LayerEvaluation(6, 40)
    loaded.load_sums(first.sums() + second.sums())
    torch.testing.assert_close(loaded.sums(), result.sums(), rtol=1e-12, atol=0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any), st.integers(0, 99), st.integers(0, 48))
def test_document_frequency_matches_sets(lengths: list[int], seed: int, cut: int) -> None:
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    n, k, d_sae, generator = len(documents), 3, 7, torch.Generator().manual_seed(seed)
    indices = torch.rand(n, d_sae, generator=generator).argsort(1)[:, :k]
    values = torch.rand(n, k, generator=generator) * (torch.rand(n, k, generator=generator) > 0.4)
    frequency = DocumentFrequency(d_sae)
    for part in (slice(0, cut), slice(cut, n)):
        frequency.add(SparseCodes(values[part], indices[part]), documents[part])
    sets: dict[int, set[int]] = {}
    for document, features, acts in zip(documents.tolist(), indices.tolist(), values.tolist(), strict=True):
        sets.setdefault(document, set()).update(j for j, act in zip(features, acts, strict=True) if act > 0)
    expected = [sum(j in features for features in sets.values()) for j in range(d_sae)]
    assert (frequency.df.tolist(), frequency.n_documents) == (expected, len(sets))
    idf = [math.log((1 + len(sets)) / (1 + df)) for df in expected]
    torch.testing.assert_close(frequency.idf(), torch.tensor(idf), rtol=1e-6, atol=1e-7)
