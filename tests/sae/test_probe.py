"""Codes of texts against transformers' own hidden states; the strongest features against dense codes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sae import ShapeError, SparseCodes
from sae.probe.encoder import Encoded, Probe, top_features


@pytest.fixture
def make_probe(gpt2: Any, make_tokenizer: Any) -> Any:
    return partial(Probe, gpt2, make_tokenizer())


def same(one: Encoded, other: Encoded) -> None:
    for name in ("ids", "offsets", "special", "sink", "visual"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.text, one.tokens, list(one.codes)) == (other.text, other.tokens, list(other.codes))
    for layer, codes in one.codes.items():
        assert torch.equal(codes.indices, other.codes[layer].indices)
        torch.testing.assert_close(codes.values, other.codes[layer].values, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "side"), [("bert", "left"), ("gpt2", "right"), ("gpt2", "left")])
def test_padding_and_company_change_nothing(name, side, request, make_tokenizer, make_texts, make_coder, dense) -> None:
    model, coder, texts = request.getfixturevalue(name), make_coder(16), make_texts(23, 20)
    # layer 2 lies before the final norm, which transformers puts into its last entry
    probe = Probe(model, make_tokenizer(side), {2: coder}, batch_size=4)
    for text, encoded in zip(texts, probe.encode(texts), strict=True):
        same(encoded, probe.encode(text))
        h = model(encoded.ids[None], output_hidden_states=True).hidden_states[2][0]
        expected = dense(coder, h)
        expected[~encoded.counted] = 0
        torch.testing.assert_close(encoded.codes[2].dense(48), expected, rtol=0, atol=1e-12)


def test_tokens_stand_as_in_the_text(make_probe: Any, make_coder: Any) -> None:
    encoded = make_probe({1: make_coder(16)}, sink_factor=None).encode("The CAT  sat\non Za")
    assert encoded.tokens == ("[BOS]", "The", "CAT", "sat", "on", "Za", "[EOS]")
    assert encoded.offsets.tolist() == [[0, 0], [0, 3], [4, 7], [9, 12], [13, 15], [16, 18], [0, 0]]
    # the unknown token is one of the tokenizer's special tokens
    assert encoded.special.tolist() == [True, False, False, False, False, True, True]
    assert encoded.tokens_in(2, 5).nonzero().squeeze(-1).tolist() == [1, 2]
    bare = make_probe({1: make_coder(16)}, special_ids=[6], add_special_tokens=False)
    assert bare.encode("the cat sat Za").special.tolist() == [False, True, False, False]
    empty, full = bare.encode(["", "the cat"])
    assert (len(empty), empty.tokens, len(full)) == (0, (), 2)
    assert top_features(empty, 1) == bare.encode([]) == []
    with pytest.raises(ShapeError, match="text 1 has 33 tokens, the model takes 32"):
        bare.encode(["a cat", "cat " * 33])


def test_prepared_inputs_with_an_image(qwen3_vl, picture, make_tokenizer, make_coder, dense) -> None:
    coders = {0: make_coder(32), 3: make_coder(32, seed=2)}
    # the placeholder counts, whatever the tokenizer says of it
    probe = Probe(qwen3_vl, make_tokenizer(), coders, special_ids=[0, 1, 2, 45, 47, 48], sink_factor=None)
    first, second = probe.encode_inputs(picture)
    states = qwen3_vl(**picture, output_hidden_states=True).hidden_states
    assert first.visual.nonzero().flatten().tolist() == [3, 4, 5, 6, 7, 8]
    for layer, coder in coders.items():
        for row, encoded in enumerate((first, second)):
            expected = dense(coder, states[layer][row, : len(encoded)])
            expected[encoded.special] = 0
            torch.testing.assert_close(encoded.codes[layer].dense(48), expected, rtol=0, atol=1e-12)
    assert second.tokens == tuple(second.text[start:end] for start, end in second.offsets.tolist())
    # what an image forward leaves in the model does not reach later texts
    fresh = copy.deepcopy(qwen3_vl)
    fresh.model.rope_deltas = None
    same(probe.encode("the cat sat"), Probe(fresh, make_tokenizer(), coders, sink_factor=None).encode("the cat sat"))


@given(st.integers(0, 10_000), st.sampled_from(["max", "mean", "sum"]), st.booleans(), st.booleans())
def test_top_features_equal_brute_force(seed: int, by: Any, part: bool, weighted: bool) -> None:
    n, generator = seed % 11, torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(12)])
    # few distinct values, so that features tie
    values = torch.randint(0, 4, (12, 5), generator=generator).double() / 2
    special, sink = (torch.rand(12, generator=generator) < 0.15 for _ in range(2))
    values[special | sink] = 0
    starts, tokens, codes = torch.arange(12) * 3, tuple(f"t{i}" for i in range(12)), {4: SparseCodes(values, indices)}
    offsets = torch.stack([starts, starts + 2], 1)
    encoded = Encoded("ab " * 12, starts, tokens, offsets, codes, special, sink, torch.zeros_like(sink))
    dense, idf = codes[4].dense(9), torch.linspace(2, 0.25, 9).float() if weighted else None
    start, end = seed % 20, seed % 20 + 1 + seed % 15
    chosen = [i for i in range(12) if not part or any(start <= at < end for at in (3 * i, 3 * i + 1))]
    chosen = [i for i in chosen if not special[i] and not sink[i]]
    expected = []
    for feature in range(9):
        column = [float(dense[i, feature]) for i in chosen]
        if any(column):
            value = {"max": max(column), "sum": sum(column), "mean": sum(column) / len(column)}[by]
            score = value * (float(idf[feature]) if idf is not None else 1)
            peak = next(i for i in chosen if float(dense[i, feature]) == max(column))
            expected.append((-score, feature, value, sum(x > 0 for x in column), peak))
    got = top_features(encoded, 4, span=(start, end) if part else None, n=n, by=by, idf=idf)
    wanted = [(f, pytest.approx(-s), pytest.approx(v), c, at, f"t{at}") for s, f, v, c, at in sorted(expected)[:n]]
    assert [tuple(activation) for activation in got] == wanted
