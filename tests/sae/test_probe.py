"""Codes of texts against transformers' own hidden states; the strongest features against dense codes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sae import ActivationError, ConfigError, LayerError, ShapeError, SparseCodes
from sae.hooks import hidden_states
from sae.probe.encoder import Encoded, Probe, top_features
from sae.probe.pieces import Pieces


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


@pytest.mark.parametrize("name", ["bert", "gpt2", "qwen3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_company_change_nothing(name, side, request, make_tokenizer, make_coder, dense) -> None:
    model, coder = request.getfixturevalue(name), make_coder(16)
    texts = request.getfixturevalue("make_texts")(23, 20)
    # layer 2 lies before the final norm, which transformers puts into its last entry
    probe = Probe(model, make_tokenizer(side), {2: coder}, batch_size=4)
    batched = probe.encode(texts)
    assert [encoded.text for encoded in batched] == texts
    for text, encoded in zip(texts, batched, strict=True):
        same(encoded, probe.encode(text))
        with torch.no_grad():
            h = model(encoded.ids[None], output_hidden_states=True).hidden_states[2][0]
        expected = dense(coder, h)
        expected[~encoded.counted] = 0
        torch.testing.assert_close(encoded.codes[2].dense(48), expected, rtol=0, atol=1e-12)


def test_tokens_stand_as_in_the_text(make_probe: Any, make_coder: Any) -> None:
    probe = make_probe({1: make_coder(16), 3: make_coder(16, seed=1)}, sink_factor=None)
    encoded = probe.encode("The CAT  sat\non Zanzibar")
    assert encoded.tokens == ("[BOS]", "The", "CAT", "sat", "on", "Zanzibar", "[EOS]")
    assert encoded.offsets.tolist() == [[0, 0], [0, 3], [4, 7], [9, 12], [13, 15], [16, 24], [0, 0]]
    # the unknown token is one of the tokenizer's special tokens
    assert encoded.special.tolist() == [True, False, False, False, False, True, True]
    assert not bool(encoded.codes[1].values[encoded.special].any())
    assert bool((encoded.codes[1].values[~encoded.special] > 0).any(-1).all())
    assert encoded.tokens_in(2, 5).nonzero().squeeze(-1).tolist() == [1, 2]
    assert encoded.tokens_in(7, 9).sum() == 0
    assert all(part in str(encoded) for part in ("The CAT", "layer 3"))


def test_each_text_has_its_own_sinks(make_probe: Any, make_coder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def loud(model: Any, layers: Any, **inputs: Any) -> dict[int, Tensor]:
        states = hidden_states(model, layers, **inputs)
        # a loud text, and one token that would be lost among its norms
        scale = torch.where((inputs["input_ids"] == 5).any(1), 100.0, 1.0)[:, None, None]
        sink = torch.where(inputs["input_ids"] == 6, 40.0, 1.0)[..., None]
        return {layer: state * scale * (sink if layer == 2 else 1) for layer, state in states.items()}

    coders = {1: make_coder(16), 2: make_coder(16)}
    probe = make_probe(coders)
    text = "the cat sat on the mat"
    assert not bool(probe.encode(text).sink.any())
    monkeypatch.setattr("sae.hooks.hidden_states", loud)
    for encoded in (probe.encode(text), probe.encode(["a dog ran " * 5, text])[1]):
        assert encoded.sink.tolist() == [False, False, True, False, False, False, False, False]
        assert not any(bool(encoded.codes[layer].values[2].any()) for layer in coders)
        assert bool(encoded.codes[2].values[1].any())
    keep = make_probe(coders, sink_factor=None)
    assert bool(keep.encode(text).codes[2].values[2].any())


def test_forwards_stay_within_bounds(make_probe, make_coder, make_texts, monkeypatch) -> None:
    shapes: list[tuple[int, int]] = []

    def watch(model: Any, layers: Any, **inputs: Any) -> dict[int, Tensor]:
        shapes.append(tuple(inputs["input_ids"].shape))
        return hidden_states(model, layers, **inputs)

    monkeypatch.setattr("sae.hooks.hidden_states", watch)
    texts = iter(make_texts(100, 25))
    probe = make_probe({1: make_coder(16)}, batch_size=6, batch_tokens=60)
    stream = probe.stream(texts)
    next(stream)
    assert len(list(texts)) == 52
    assert len(list(stream)) == 47
    assert all(rows <= 6 and rows * width <= 60 for rows, width in shapes)
    assert any(rows == 6 for rows, _ in shapes)
    shapes.clear()
    make_probe({1: make_coder(16)}, batch_tokens=3).encode(["the cat sat", "a dog"])
    assert shapes == [(1, 5), (1, 4)]


def test_texts_without_special_tokens(make_probe: Any, make_coder: Any) -> None:
    probe = make_probe({1: make_coder(16)}, special_ids=[6], add_special_tokens=False)
    assert probe.encode("the cat sat Zanzibar").special.tolist() == [False, True, False, False]
    empty, full = probe.encode(["", "the cat"])
    assert (len(empty), empty.tokens, len(full)) == (0, (), 2)
    assert empty.codes[1].values.shape == (0, 4)
    assert top_features(empty, 1) == []
    assert len(probe.encode("")) == 0
    assert probe.encode([]) == []


def test_what_cannot_be_probed(gpt2, make_tokenizer, make_probe, make_coder, monkeypatch) -> None:
    coder, slow = make_coder(16), type("Slow", (), {"is_fast": False})()
    for tokenizer, coders, options, error, message in (
        (slow, {1: coder}, {}, ConfigError, "Slow has no character offsets"),
        (make_tokenizer(), {4: coder}, {}, LayerError, "layer 4 does not exist"),
        (make_tokenizer(), {}, {}, LayerError, "no layer"),
        (make_tokenizer(), {1: make_coder(8)}, {}, ShapeError, "hidden states of 8, the model has 16"),
        (make_tokenizer(), {1: coder}, {"batch_size": 0}, ConfigError, "batch_size 0"),
    ):
        with pytest.raises(error, match=message):
            Probe(gpt2, tokenizer, coders, **options)
    probe = make_probe({1: coder})
    assert probe.max_length == len(probe.encode("cat " * 30)) == 32
    with pytest.raises(ShapeError, match="text 1 has 33 tokens, the model takes 32"):
        probe.encode(["a cat", "cat " * 31])
    with pytest.raises(ShapeError, match="row 0 has 40 tokens, the model takes 32"):
        probe.encode_inputs({"input_ids": torch.full((1, 40), 5)})
    with pytest.raises(ConfigError, match="text 1 is a NoneType"):
        probe.encode(["a", None])  # type: ignore[list-item]
    with pytest.raises(LayerError, match=r"layer 2 was not encoded, only \[1\]"):
        top_features(probe.encode("a cat"), 2)
    with pytest.raises(ConfigError, match="training mode"):
        Probe(copy.deepcopy(gpt2).train(), make_tokenizer(), {1: coder}).encode("a cat")

    def broken(model: Any, layers: Any, **inputs: Any) -> dict[int, Tensor]:
        states = hidden_states(model, layers, **inputs)
        wrong = (inputs["input_ids"] == 7) | (inputs["attention_mask"] == 0)
        return {layer: state.masked_fill(wrong[..., None], float("nan")) for layer, state in states.items()}

    monkeypatch.setattr("sae.hooks.hidden_states", broken)
    assert len(probe.encode(["a cat", "the cat sat on"])) == 2
    with pytest.raises(ActivationError, match="text 2: hidden states of layer 1 are not finite"):
        probe.encode(["a cat", "the cat sat on", "a dog"])


def test_prepared_inputs_with_an_image(qwen3_vl, picture, make_tokenizer, make_coder, dense) -> None:
    coders = {0: make_coder(32), 3: make_coder(32, seed=2)}
    # the placeholder counts, whatever the tokenizer says of it
    probe = Probe(qwen3_vl, make_tokenizer(), coders, special_ids=[0, 1, 2, 45, 47, 48], sink_factor=None)
    first, second = probe.encode_inputs(picture)
    with torch.no_grad():
        states = qwen3_vl(**picture, output_hidden_states=True).hidden_states
    assert first.visual.nonzero().flatten().tolist() == [3, 4, 5, 6, 7, 8]
    assert first.special.nonzero().flatten().tolist() == [2, 9]
    assert not bool(second.visual.any() | second.special.any())
    assert (len(first), len(second)) == (12, 5)
    for layer, coder in coders.items():
        for row, encoded in enumerate((first, second)):
            expected = dense(coder, states[layer][row, : len(encoded)])
            expected[encoded.special] = 0
            torch.testing.assert_close(encoded.codes[layer].dense(48), expected, rtol=0, atol=1e-12)
    assert bool((first.codes[3].values[first.visual] > 0).any(-1).all())
    assert second.tokens == tuple(second.text[start:end] for start, end in second.offsets.tolist())
    assert second.text.split() == ["sat", "ran", "saw", "on", "under"]
    # what an image forward leaves in the model does not reach later texts
    fresh = copy.deepcopy(qwen3_vl)
    fresh.model.rope_deltas = None
    same(probe.encode("the cat sat"), Probe(fresh, make_tokenizer(), coders, sink_factor=None).encode("the cat sat"))
    with pytest.raises(ShapeError, match="attention_mask"):
        probe.encode_inputs({**picture, "attention_mask": torch.ones(2, 1, 12, 12)})


def test_left_padded_rows_lose_their_padding(qwen3: Any, make_tokenizer: Any, make_coder: Any) -> None:
    probe = Probe(qwen3, make_tokenizer(), {2: make_coder(16)})
    ids = torch.tensor([[0, 0, 6, 9, 10], [7, 8, 9, 10, 11]])
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    rows = probe.encode_inputs({"input_ids": ids, "attention_mask": (ids > 0).long(), "position_ids": positions})
    for got, row in zip(rows, ([6, 9, 10], [7, 8, 9, 10, 11]), strict=True):
        same(got, probe.encode_inputs({"input_ids": torch.tensor([row])})[0])


def random_encoded(seed: int, length: int = 12, k: int = 5, d_sae: int = 9) -> Encoded:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randperm(d_sae, generator=generator)[:k] for _ in range(length)])
    # few distinct values, so that features tie
    values = torch.randint(0, 4, (length, k), generator=generator).double() / 2
    special, sink = (torch.rand(length, generator=generator) < 0.15 for _ in range(2))
    values[special | sink] = 0
    starts = torch.arange(length) * 3
    tokens, offsets = tuple(f"t{i}" for i in range(length)), torch.stack([starts, starts + 2], 1)
    codes = {4: SparseCodes(values, indices)}
    return Encoded("ab " * length, starts, tokens, offsets, codes, special, sink, torch.zeros_like(sink))


@given(
    st.integers(0, 10_000), st.sampled_from(["max", "mean", "sum"]), st.booleans(), st.booleans(), st.integers(0, 10)
)
def test_top_features_equal_brute_force(seed: int, by: Any, part: bool, weighted: bool, n: int) -> None:
    encoded = random_encoded(seed)
    dense = encoded.codes[4].dense(9)
    idf = torch.linspace(2, 0.25, 9).float() if weighted else None
    start, end = seed % 20, seed % 20 + 1 + seed % 15
    chosen = [i for i in range(12) if not part or any(start <= at < end for at in (3 * i, 3 * i + 1))]
    chosen = [i for i in chosen if not encoded.special[i] and not encoded.sink[i]]
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


def test_top_features_refuses() -> None:
    encoded = random_encoded(0)
    spans = [({"span": span}, "not a span of a text of 36 characters") for span in [(3, 3), (-1, 4), (0, 37)]]
    for options, message in [*spans, ({"by": "median"}, "by = 'median'")]:
        with pytest.raises(ConfigError, match=message):
            top_features(encoded, 4, **options)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"idf \[3\]"):
        top_features(encoded, 4, idf=torch.ones(3))
    assert "peak at" in str(top_features(encoded, 4)[0])


def test_pieces_of_a_byte_level_tokenizer() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    text = "né 🙂x!"
    ids = fast(text)["input_ids"]
    assert len(ids) == len(text.encode())
    pieces = Pieces(fast)
    got, spans = pieces.join(ids)
    assert got == text
    # each byte has the span of the character it is a part of
    assert spans == [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
    # cut in the middle of a character
    cut, spans = pieces.join(ids[6:])
    assert cut == "��x!"
    assert spans == [(i, i + 1) for i in range(4)]
    assert Pieces().join([3, 17]) == ("3 17", [(0, 1), (1, 4)])
