"""Examples kept while streaming against a full sort in Python; search against its formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from sae import SparseCodes
from sae.probe.encoder import Encoded, Probe
from sae.probe.examples import TopExamples, collect, search

D_SAE, K = 7, 3


def random_texts(count: int, seed: int) -> list[Encoded]:
    """Encoded texts with few distinct values, so that many tie; some without tokens, some codes out of order."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for length in torch.randint(0, 9, (count,), generator=generator).tolist():
        indices = torch.rand(length, D_SAE, generator=generator).argsort(-1)[:, :K]
        if seed % 2:
            indices = indices.sort(-1).values
        special = torch.rand(length, generator=generator) < 0.1
        codes = {2: SparseCodes(torch.randint(0, 5, (length, K), generator=generator) / 4, indices)}
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


@given(st.integers(0, 10_000), st.integers(0, 30), st.integers(1, 6), st.integers(0, 3), st.integers(1, 12))
def test_examples_equal_a_full_sort(seed: int, count: int, most: int, before: int, at_once: int) -> None:
    context = (before, (seed + before) % 4)
    texts = random_texts(count, seed)
    examples = TopExamples(D_SAE, most, context)
    for start in range(0, count, at_once):
        examples.add(texts[start : start + at_once], 2)
    got = [[(e.value, e.source, e.position, e.ids, e.values) for e in examples.examples(f)] for f in range(D_SAE)]
    expected = brute_force(texts, D_SAE, most, context)
    assert got == expected
    assert examples.features().tolist() == [feature for feature, rows in enumerate(expected) if rows]
    assert (examples.n_texts, examples.n_tokens) == (count, sum(int(text.counted.sum()) for text in texts))
    dense = [(text.codes[2].dense(D_SAE) > 0) & text.counted[:, None] for text in texts]
    assert [sum(examples.histogram(feature)[1]) for feature in range(D_SAE)] == examples.fired.tolist()
    assert examples.fired.tolist() == (torch.cat(dense).sum(0).tolist() if dense else [0] * D_SAE)


def test_collect_and_search(gpt2: Any, make_tokenizer: Any, make_coder: Any, make_texts: Any) -> None:
    probe, texts = Probe(gpt2, make_tokenizer(), {1: make_coder(16)}, batch_size=8), make_texts(150, 20)
    examples = collect(probe, ((f"#{n}", text) for n, text in enumerate(texts)), per_feature=4, context=(2, 3))[1]
    # in the same batches: equal beginnings of two texts may differ in the last bit in others
    encoded = [replace(text, codes={2: text.codes[1]}) for text in probe.stream(texts)]
    for example in (one for feature in range(48) for one in examples.examples(feature)):
        tokens, start = encoded[example.source].tokens, example.position - example.peak
        assert example.label == f"#{example.source}"
        assert example.text.split() == list(tokens[start : start + len(example.ids)])
        assert example.text[slice(*example.span)] == tokens[example.position]
    best = search(examples, "The CAT!", 3)[0]
    assert best.score == max(match.score for match in search(examples, "the cat", 48))
    assert {"the", "cat"} & set(best.example.text.split())
    assert search(examples, "zebra") == []
