"""Examples kept while streaming against a full sort in Python; search against its formula."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sae import ConfigError, LayerError, ShapeError, SparseCodes
from sae.probe.encoder import Encoded, Probe
from sae.probe.examples import TopExamples, collect, search

D_SAE, K = 7, 3


def random_texts(count: int, seed: int, levels: int = 5, longest: int = 9) -> list[Encoded]:
    """Encoded texts with few distinct values, so that many tie; some without tokens, some codes out of order."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for length in torch.randint(0, longest, (count,), generator=generator).tolist():
        indices = torch.rand(length, D_SAE, generator=generator).argsort(-1)[:, :K]
        if seed % 2:
            indices = indices.sort(-1).values
        special = torch.rand(length, generator=generator) < 0.1
        codes = {2: SparseCodes(torch.randint(0, levels, (length, K), generator=generator) / 4, indices)}
        ids, offsets = torch.randint(0, 100, (length,), generator=generator), torch.zeros(length, 2, dtype=torch.int64)
        texts.append(Encoded("", ids, ("",) * length, offsets, codes, special, *[torch.zeros_like(special)] * 2))
    return texts


def brute_force(texts: list[Encoded], d_sae: int, most: int, context: tuple[int, int]) -> list[list[tuple[Any, ...]]]:
    """Per feature: value, text, position, context ids, context activations."""
    dense = [(encoded.codes[2].dense(d_sae) * encoded.counted[:, None]).tolist() for encoded in texts]
    result = []
    for feature in range(d_sae):
        best: dict[int, tuple[float, int]] = {}
        for text, rows in enumerate(dense):
            peaks = [(-row[feature], position) for position, row in enumerate(rows) if row[feature] > 0]
            if peaks:
                best[text] = min(peaks)
        kept: list[tuple[Any, ...]] = []
        for text in sorted(best, key=lambda text: (best[text][0], text))[:most]:
            value, position = best[text]
            window = range(max(position - context[0], 0), min(position + context[1] + 1, len(dense[text])))
            ids = tuple(int(texts[text].ids[i]) for i in window)
            kept.append((-value, text, position, ids, tuple(dense[text][i][feature] for i in window)))
        result.append(kept)
    return result


def kept(examples: TopExamples) -> list[list[tuple[Any, ...]]]:
    return [
        [(e.value, e.source, e.position, e.ids, e.values) for e in examples.examples(feature)]
        for feature in range(examples.d_sae)
    ]


@given(
    st.integers(0, 10_000),
    st.integers(0, 30),
    st.integers(1, 6),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.integers(1, 12),
)
def test_examples_equal_a_full_sort(seed: int, count: int, most: int, context: tuple[int, int], at_once: int) -> None:
    texts = random_texts(count, seed)
    examples = TopExamples(D_SAE, most, context)
    for start in range(0, count, at_once):
        examples.add(texts[start : start + at_once], 2)
    expected = brute_force(texts, D_SAE, most, context)
    assert kept(examples) == expected
    assert examples.features().tolist() == [feature for feature, rows in enumerate(expected) if rows]
    assert (examples.n_texts, examples.n_tokens) == (count, sum(int(text.counted.sum()) for text in texts))
    dense = [(text.codes[2].dense(D_SAE) > 0) & text.counted[:, None] for text in texts]
    assert [sum(examples.histogram(feature)[1]) for feature in range(D_SAE)] == examples.fired.tolist()
    assert examples.fired.tolist() == (torch.cat(dense).sum(0).tolist() if dense else [0] * D_SAE)


def test_memory_does_not_grow_with_the_stream() -> None:
    examples = TopExamples(D_SAE, 3, (1, 1))
    for round_ in range(60):
        examples.add(random_texts(50, round_, levels=1000), 2, [f"{round_}/{i}" for i in range(50)])
    for tensor in examples._ranking.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes <= 8 * D_SAE * 3 * 3
    assert len(examples._labels) <= 2 * D_SAE * 3
    assert examples.n_texts == 3000
    assert all(e.label == f"{e.source // 50}/{e.source % 50}" for f in range(D_SAE) for e in examples.examples(f))


def test_what_cannot_be_done() -> None:
    text = next(text for text in random_texts(5, 1) if len(text) > 3)
    examples = TopExamples(D_SAE)
    for call, error, message in (
        (lambda: TopExamples(3).add(text, 2), ShapeError, "these are examples of 0 to 2"),
        (lambda: examples.add(text, 5), LayerError, "layer 5 was not encoded"),
        (lambda: examples.add([text], 2, ["a", "b"]), ShapeError, "2 labels for 1 texts"),
        (lambda: examples.examples(9), ConfigError, "feature 9 does not exist"),
        (lambda: TopExamples(D_SAE, 0), ConfigError, "at least 1"),
        (lambda: search(examples, "?!"), ConfigError, "has no words"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.fixture
def probe(gpt2: Any, make_tokenizer: Any, make_coder: Any) -> Probe:
    return Probe(gpt2, make_tokenizer(), {1: make_coder(16), 3: make_coder(16, seed=1)}, batch_size=8)


def test_collect_streams_and_is_exact(probe: Probe, make_texts: Any) -> None:
    texts = make_texts(150, 20)
    ahead, taken, done = 0, 0, []

    def source() -> Iterator[tuple[str, str]]:
        nonlocal taken, ahead
        for number, text in enumerate(texts):
            taken += 1
            ahead = max(ahead, taken - (done[-1] if done else 0))
            yield f"#{number}", text

    collected = collect(probe, source(), per_feature=4, context=(2, 3), progress=done.append)
    assert list(collected) == [1, 3]
    assert done[-1] == 150
    assert ahead < 100
    # in the same batches: equal beginnings of two texts may differ in the last bit in others
    encoded = list(probe.stream(texts))
    for layer, examples in collected.items():
        alone = [replace(text, codes={2: text.codes[layer]}) for text in encoded]
        expected = brute_force(alone, 48, 4, (2, 3))
        for feature, rows in enumerate(expected):
            got = examples.examples(feature)
            assert [(e.value, e.source, e.position, e.ids) for e in got] == [row[:4] for row in rows]
            for example, row in zip(got, rows, strict=True):
                assert example.values == pytest.approx(row[4], rel=1e-6)
                assert example.label == f"#{example.source}"
                tokens, start = alone[example.source].tokens, example.position - example.peak
                assert example.text.split() == list(tokens[start : start + len(example.ids)])
                assert example.text[slice(*example.span)] == tokens[example.position]
        assert examples.metadata == {"layer": layer}
    feature = int(collected[1].features()[0])
    lines = collected[1].to_text(feature, 1).splitlines()
    assert len(lines) == 2
    assert lines[1].count("«") == 1
    with pytest.raises(LayerError, match="layer 2 does not exist"):
        collect(probe, texts, 2)
    with pytest.raises(ConfigError, match="text 1 is a int"):
        collect(probe, ["a", 3])  # type: ignore[list-item]


def test_search_follows_its_formula(probe: Probe, make_texts: Any) -> None:
    examples = collect(probe, make_texts(120, 15), 3, per_feature=6, context=(2, 2))[3]

    def words_of(text: str) -> set[str]:
        return set(re.findall(r"\w+", text.lower()))

    for query in ("The CAT!", "cat", "dog tree", "blue"):
        words, rows = words_of(query), []
        for feature in range(48):
            group = examples.examples(feature)
            # tokens of this tokenizer are whole words
            found = [len(words & words_of(e.text[slice(*e.span)])) + len(words & words_of(e.text)) for e in group]
            score = sum(e.value * count for e, count in zip(group, found, strict=True)) / 2 / len(words)
            if score > 0:
                rows.append((-score / sum(e.value for e in group), -len(group), feature))
        wanted = sorted(rows)[:7]
        got = search(examples, query, 7)
        assert [match.feature for match in got] == [feature for *_, feature in wanted]
        assert [match.score for match in got] == pytest.approx([-score for score, *_ in wanted])
    assert got
    assert search(examples, "zebra") == []
    assert str(got[0].feature) in str(got[0])


def test_peak_words_are_whole_words() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "play": 2, "##ing": 3, "Now": 4}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    examples = TopExamples(2, 1, (1, 1), tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    ids = torch.tensor([2, 3, 4])
    codes = SparseCodes(torch.tensor([[0.0], [2.0], [0.0]]), torch.tensor([[1]] * 3))
    nothing = torch.zeros(3, dtype=torch.bool)
    text = Encoded("playing Now", ids, ("play", "ing", "Now"), torch.zeros(3, 2), {0: codes}, *[nothing] * 3)
    examples.add(text, 0)
    [example] = examples.examples(1)
    assert (example.text, example.offsets) == ("playing Now", ((0, 4), (4, 7), (7, 11)))
    assert example.text[slice(*example.span)] == "ing"
    assert [(match.feature, match.score) for match in search(examples, "Playing")] == [(1, 1.0)]
    assert search(examples, "NOW")[0].score == 0.5
    assert search(examples, "ing") == []
