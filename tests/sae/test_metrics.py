"""Pooled figures and document frequencies against brute force."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sae import DocumentFrequency, FormatError, ShapeError, SparseCodes, TopKSAE, load_idf, save_idf
from sae.buffer import Shuffled
from sae.errors import ActivationError, LayerError
from sae.harvest import TokenBatch
from sae.metrics import Evaluation, LayerEvaluation, density_histogram, evaluate


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
        "relative_norm": sum(float(out[t].norm() / x[t].norm()) for t in range(n)) / n,
        "relative_reconstruction_bias": float(out.pow(2).sum() / (x * out).sum()),
        "l0": float((acts > 0).sum()) / n,
        "dead": sum(not bool((acts[:, j] > 0).any()) for j in range(coder.d_sae)) / coder.d_sae,
    }


def mixed_tokens(n: int = 90) -> tuple[TopKSAE, Tensor, Tensor]:
    """A coder, text and visual tokens about different means, and which are visual."""
    torch.manual_seed(1)
    coder = TopKSAE(6, 40, 3).requires_grad_(False)
    coder.b_enc.copy_(torch.randn(40))
    # products of another number of rows round differently
    coder = coder.double()
    visual = torch.arange(n) % 3 == 1
    h = torch.randn(n, 6, dtype=torch.float64) + torch.where(visual[:, None], 20.0, -3.0)
    return coder, h, visual


def token_batch(h: Tensor, visual: Tensor) -> TokenBatch:
    where = torch.arange(len(h))
    return TokenBatch(activations={2: h, 5: h}, visual=visual, rows=where, positions=where, batch=0)


@pytest.mark.parametrize("chunk", [1 << 24, 30])
def test_text_and_visual_tokens_apart(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sae.metrics._CHUNK", chunk)
    coder, h, visual = mixed_tokens()
    batches = [token_batch(h[:41], visual[:41]), Shuffled({2: h[41:]}, visual[41:])]
    result = evaluate({2: coder}, batches)[2]
    for part, tokens in ((result, h), (result.all, h), (result.text, h[~visual]), (result.visual, h[visual])):
        for name, value in reference(coder, tokens).items():
            assert getattr(part, name) == pytest.approx(value, rel=1e-9), name
    fired = coder.encode(h).dense(40) > 0
    torch.testing.assert_close(result.density, fired.double().mean(0))
    # each kind about its own mean: the pooled spread is mostly that between the kinds
    assert result.text.fvu > 5 * result.fvu
    summary = json.loads(json.dumps(result.summary(), allow_nan=False))
    assert summary["visual"]["fvu"] == result.visual.fvu
    assert summary["fvu"] == result.fvu
    assert "text" not in summary["text"]
    # kinds that were not there, or not known, are None
    [plain] = evaluate({2: coder}, [{2: h}]).values()
    assert plain.tokens == len(h)
    assert plain.text is plain.visual is plain.summary()["text"] is None
    [text] = evaluate({2: coder}, [token_batch(h[~visual], visual[~visual])]).values()
    assert text.visual is None
    assert torch.equal(text.text.sums(), text.all.sums())


def test_two_halves_make_the_whole() -> None:
    coder, h, visual = mixed_tokens()
    whole, first, second = (
        evaluate({2: coder}, [token_batch(h[part], visual[part])])[2]
        for part in (slice(None), slice(0, 37), slice(37, None))
    )
    # what two processes would do: all-reduce by sum, then load
    loaded = LayerEvaluation(6, 40)
    loaded.load_sums(first.sums() + second.sums())
    assert loaded.sums().dtype == torch.float64
    for part, expected in ((loaded, whole), (loaded.text, whole.text), (loaded.visual, whole.visual)):
        assert torch.equal(part.density, expected.density)
        figures = {name: value for name, value in part.summary().items() if isinstance(value, int | float)}
        assert figures == pytest.approx({name: expected.summary()[name] for name in figures}, rel=1e-12)
    with pytest.raises(ShapeError):
        loaded.load_sums(first.all.sums())


@pytest.mark.parametrize("offset", [100.0, 10_000.0])
def test_a_mean_far_from_zero_costs_no_accuracy(offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(600, 8, generator=generator, dtype=torch.float64) / 8**0.5 + offset / 8**0.5
    out = h + 0.3 * torch.randn(600, 8, generator=generator, dtype=torch.float64)
    result = Evaluation(8, 4)
    codes = SparseCodes(torch.zeros(6, 1), torch.zeros(6, 1, dtype=torch.int64))
    for rows, outputs in zip(h.split(6), out.split(6), strict=True):
        result.add(rows, outputs, codes)
    assert result.fvu == pytest.approx(float((h - out).square().sum() / (h - h.mean(0)).square().sum()), rel=1e-6)


def test_figures_that_are_not_defined() -> None:
    coder, h, _ = mixed_tokens()
    same = evaluate({2: coder}, [{2: (1e4 * h[:1]).expand(30, -1)}])[2]
    assert math.isnan(same.fvu)
    assert same.summary()["fvu"] is None
    assert same.summary()["explained_variance"] is None
    assert same.mse > 0
    none = evaluate({2: coder}, [], allow_empty=True)[2]
    summary = json.loads(json.dumps(none.summary(), allow_nan=False))
    assert summary["tokens"] == 0
    assert all(summary[name] is None for name in ("fvu", "mse", "l0", "cosine", "relative_norm", "dead"))
    # predicting the mean leaves everything unexplained
    result, nothing = Evaluation(6, 40), SparseCodes(torch.zeros(90, 2), torch.zeros(90, 2, dtype=torch.int64))
    result.add(h, h.mean(0).expand_as(h), nothing)
    assert result.fvu == pytest.approx(1)
    assert result.dead == 1
    with pytest.raises(ActivationError, match="no tokens"):
        evaluate({2: coder}, [])


@given(st.integers(1, 2000), st.data())
def test_the_density_histogram_counts_each_feature_once(tokens: int, data: st.DataObject) -> None:
    fired = data.draw(st.lists(st.integers(0, tokens), min_size=1, max_size=9))
    # powers of ten lie on edges
    fired += [0, tokens, *(tokens // 10**power for power in range(1, 4) if tokens % 10**power == 0)]
    histogram = density_histogram(torch.tensor(fired, dtype=torch.float64), tokens)
    edges, counts = histogram["edges"], histogram["counts"]
    assert edges[0] == 1e-6
    assert edges[-1] == 1
    assert len(counts) == len(edges) - 1 == 24
    assert histogram["never"] == fired.count(0)
    expected = [0] * len(counts)
    for count in fired:
        if count:
            expected[max(i for i in range(len(counts)) if edges[i] <= count / tokens)] += 1
    assert counts == expected
    json.dumps(histogram)
    # down to one token
    histogram = density_histogram(torch.tensor([1.0, 0.0, 2e7]), 20_000_000)
    assert histogram["edges"][::4] == pytest.approx([10.0**power for power in range(-8, 1)])
    assert (histogram["counts"][2], histogram["counts"][-1], sum(histogram["counts"])) == (1, 1, 2)


def test_batches_that_do_not_fit() -> None:
    coder, h, visual = mixed_tokens()
    with pytest.raises(LayerError, match=r"batch 0 holds layers \[3\]; the coder of 2"):
        evaluate({2: coder}, [{3: h}])
    with pytest.raises(ShapeError, match="batch 1, layer 2: visual"):
        evaluate({2: coder}, [token_batch(h, visual), token_batch(h, visual[1:])])
    broken = h.clone()
    broken[3, 2] = float("nan")
    with pytest.raises(ActivationError, match="batch 1, layer 2: 1 of 90"):
        evaluate({2: coder}, [{2: h}, {2: broken}])
    with pytest.raises(ShapeError):
        Evaluation(6, 40).add(h, h[1:], coder.encode(h))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any), st.data())
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
    for document, features, acts in zip(documents.tolist(), indices.tolist(), values.tolist(), strict=True):
        sets.setdefault(document, set()).update(j for j, act in zip(features, acts, strict=True) if act > 0)
    expected = [sum(j in features for features in sets.values()) for j in range(d_sae)]
    assert frequency.df.tolist() == expected
    assert frequency.n_documents == len(sets)
    idf = [math.log((1 + len(sets)) / (1 + df)) for df in expected]
    torch.testing.assert_close(frequency.idf(), torch.tensor(idf), rtol=1e-6, atol=1e-7)
    late = torch.full((n,), len(lengths))
    frequency.add(SparseCodes(values, indices), late)
    for wrong in (torch.cat([late[1:], late[:1] - 1]), late - 1, late[1:]):
        with pytest.raises(ShapeError):
            frequency.add(SparseCodes(values, indices), wrong)


def test_idf_on_disk(tmp_path: Path) -> None:
    assert load_idf(tmp_path) is None
    frequency = DocumentFrequency(3)
    frequency.add(SparseCodes(torch.ones(2, 1), torch.tensor([[0], [1]])), torch.tensor([0, 0]))
    save_idf(tmp_path, frequency)
    loaded = load_idf(tmp_path)
    torch.testing.assert_close(loaded, torch.tensor([0.0, 0.0, math.log(2)]))
    (tmp_path / "idf.safetensors").write_bytes(b"no")
    with pytest.raises(FormatError, match="cannot be read"):
        load_idf(tmp_path)
