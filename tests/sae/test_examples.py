"""Examples kept while streaming against a full sort in Python; search against its formula."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sae import ConfigError, FormatError, LayerError, ShapeError, SparseCodes
from sae.probe.encoder import Encoded, Probe
from sae.probe.examples import CONFIG, TENSORS, TopExamples, collect, search

D_SAE, K = 7, 3


def random_texts(count: int, seed: int, levels: int = 5, longest: int = 9) -> list[Encoded]:
    """Encoded texts with few distinct values, so that many tie; some without tokens, some codes out of order."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in torch.randint(0, longest, (count,), generator=generator).tolist():
        indices = torch.rand(length, D_SAE, generator=generator).argsort(-1)[:, :K]
        if seed % 2:
            indices = indices.sort(-1).values
        special = torch.rand(length, generator=generator) < 0.1
        found.append(
            Encoded(
                text="",
                ids=torch.randint(0, 100, (length,), generator=generator),
                tokens=("",) * length,
                offsets=torch.zeros(length, 2, dtype=torch.int64),
                codes={2: SparseCodes(torch.randint(0, levels, (length, K), generator=generator) / 4, indices)},
                special=special,
                sink=torch.zeros_like(special),
                visual=torch.zeros_like(special),
            )
        )
    return found


def brute_force(texts: list[Encoded], d_sae: int, most: int, context: tuple[int, int]) -> list[list[tuple[Any, ...]]]:
    """Per feature: value, text, position, context ids, context activations."""
    dense = [(encoded.codes[2].dense(d_sae) * encoded.counted[:, None]).tolist() for encoded in texts]
    result = []
    for feature in range(d_sae):
        tokens = [
            (-row[feature], text, position)
            for text, rows in enumerate(dense)
            for position, row in enumerate(rows)
            if row[feature] > 0
        ]
        kept: list[tuple[Any, ...]] = []
        seen: set[int] = set()
        for value, text, position in sorted(tokens):
            if len(kept) == most or text in seen:
                continue
            seen.add(text)
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
    assert examples.fired.tolist() == (torch.cat(dense).sum(0).tolist() if dense else [0] * D_SAE)


def test_the_peak_lies_in_its_context() -> None:
    texts = random_texts(40, 3)
    examples = TopExamples(D_SAE, 4, (2, 1))
    examples.add(texts, 2, [f"text {i}" for i in range(40)])
    for feature in range(D_SAE):
        for example in examples.examples(feature):
            assert example.ids[example.peak] == int(texts[example.source].ids[example.position])
            assert example.values[example.peak] == example.value
            assert example.label == f"text {example.source}"
            assert example.text[slice(*example.span)] == str(example.ids[example.peak])
    assert len(examples.examples(0, 2)) == 2
    lines = examples.to_text(0, 3).splitlines()
    assert len(lines) == 4
    assert lines[1].count("«") == 1


def test_memory_does_not_grow_with_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(examples: TopExamples) -> tuple[int, int]:
        tensors = examples._ranking.tensors.values()
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors), len(examples._labels)

    examples = TopExamples(D_SAE, 3, (1, 1))
    empty = held(examples)[0]
    for round_ in range(60):
        examples.add(random_texts(50, round_, levels=1000), 2, [f"{round_}/{i}" for i in range(50)])
    assert held(examples)[0] == empty
    assert held(examples)[1] <= 2 * D_SAE * 3
    assert examples.n_texts == 3000
    assert all(e.label == f"{e.source // 50}/{e.source % 50}" for f in range(D_SAE) for e in examples.examples(f))


def test_what_cannot_be_added() -> None:
    [text] = [text for text in random_texts(5, 1) if len(text) > 3][:1]
    with pytest.raises(ShapeError, match="these are examples of 0 to 2"):
        TopExamples(3).add(text, 2)
    with pytest.raises(LayerError, match="layer 5 was not encoded"):
        TopExamples(D_SAE).add(text, 5)
    with pytest.raises(ShapeError, match="2 labels for 1 texts"):
        TopExamples(D_SAE).add([text], 2, ["a", "b"])
    with pytest.raises(ConfigError, match="feature 9 does not exist"):
        TopExamples(D_SAE).examples(9)
    with pytest.raises(ConfigError, match="at least 1"):
        TopExamples(D_SAE, 0)


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

    found = collect(probe, source(), per_feature=4, context=(2, 3), progress=done.append)
    assert list(found) == [1, 3]
    assert done[-1] == 150
    assert ahead < 100
    # in the same batches: equal beginnings of two texts may differ in the last bit in others
    encoded = list(probe.stream(texts))
    for layer, examples in found.items():
        alone = [replace(text, codes={2: text.codes[layer]}) for text in encoded]
        expected = brute_force(alone, 48, 4, (2, 3))
        for feature, rows in enumerate(expected):
            got = examples.examples(feature)
            assert [(e.source, e.position, e.ids) for e in got] == [row[1:4] for row in rows]
            for example, row in zip(got, rows, strict=True):
                assert example.value == row[0]
                assert example.values == pytest.approx(row[4], rel=1e-6)
                assert example.label == f"#{example.source}"
                assert example.text.split() == [alone[example.source].tokens[i] for i in places(example)]
                assert example.text[slice(*example.span)] == alone[example.source].tokens[example.position]
        assert examples.metadata == {"layer": layer}


def places(example: Any) -> range:
    start = example.position - example.peak
    return range(start, start + len(example.ids))


def test_examples_go_on(probe: Probe, make_texts: Any) -> None:
    texts = make_texts(60, 12)
    whole = collect(probe, texts, 3, per_feature=3)[3]
    part = collect(probe, iter(texts[:25]), [3], per_feature=3)
    part[3].add(probe.encode(texts[25:]), 3)
    assert [[e[:3] for e in rows] for rows in kept(part[3])] == [
        [(pytest.approx(e[0], abs=1e-12), *e[1:3]) for e in rows] for rows in kept(whole)
    ]
    with pytest.raises(LayerError, match="layer 2 does not exist"):
        collect(probe, texts, 2)
    with pytest.raises(ConfigError, match="text 1 is a int"):
        collect(probe, ["a", 3])  # type: ignore[list-item]


def test_saved_and_loaded(probe: Probe, make_texts: Any, tmp_path: Path) -> None:
    texts = make_texts(40, 12)
    examples = collect(probe, enumerate_labels(texts[:20]), 1, per_feature=3)[1]
    examples.save(tmp_path / "layer_01")
    loaded = TopExamples.load(tmp_path / "layer_01")
    for feature in range(48):
        assert loaded.examples(feature) == examples.examples(feature)
    assert (loaded.n_texts, loaded.n_tokens, loaded.metadata) == (20, examples.n_tokens, {"layer": 1})
    assert torch.equal(loaded.fired, examples.fired)
    loaded = TopExamples.load(tmp_path / "layer_01", probe.tokenizer)
    for both in (loaded, examples):
        both.add(probe.encode(texts[20:]), 1, [f"text {number}" for number in range(20)])
    for feature in range(48):
        assert loaded.examples(feature) == examples.examples(feature)


def enumerate_labels(texts: list[str]) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(texts):
        yield f"text {number}", text


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file"):
        TopExamples.load(tmp_path)
    one, other = TopExamples(D_SAE, 3), TopExamples(D_SAE, 3)
    one.add(random_texts(20, 1), 2)
    other.add(random_texts(20, 2), 2)
    one.save(tmp_path / "one")
    other.save(tmp_path / "other")
    with pytest.raises(FormatError, match="cannot be written as JSON"):
        TopExamples(D_SAE, metadata={"layer": object()}).save(tmp_path / "bad")
    config = json.loads((tmp_path / "one" / CONFIG).read_text())
    for change in ({"d_sae": 9}, {"context": [1]}, {"labels": None}, {"pieces": 3}, {"spread": [3]}, {"n_texts": None}):
        (tmp_path / "one" / CONFIG).write_text(json.dumps(config | change))
        with pytest.raises(FormatError, match=rf"{CONFIG}: is damaged"):
            TopExamples.load(tmp_path / "one")
    (tmp_path / "one" / CONFIG).write_text(json.dumps(config | {"version": 7}))
    with pytest.raises(FormatError, match="of version 1"):
        TopExamples.load(tmp_path / "one")
    (tmp_path / "one" / CONFIG).write_text(json.dumps(config))
    assert kept(TopExamples.load(tmp_path / "one")) == kept(one)
    (tmp_path / "one" / TENSORS).write_bytes((tmp_path / "other" / TENSORS).read_bytes())
    with pytest.raises(FormatError, match="collect the examples again"):
        TopExamples.load(tmp_path / "one")


def test_search_follows_its_formula(probe: Probe, make_texts: Any) -> None:
    examples = collect(probe, make_texts(120, 15), 3, per_feature=6, context=(2, 2))[3]

    def expected(words: set[str]) -> list[tuple[float, int, int]]:
        rows = []
        for feature in range(48):
            top = below = 0.0
            group = examples.examples(feature)
            for example in group:
                context = set(re.findall(r"\w+", example.text.lower()))
                # tokens of this tokenizer are whole words
                peak = set(re.findall(r"\w+", example.text[slice(*example.span)].lower()))
                match = (len(words & peak) + len(words & context)) / 2 / len(words)
                top, below = top + example.value * match, below + example.value
            if top > 0:
                rows.append((-top / below, -len(group), feature))
        return sorted(rows)

    for query in ("The CAT!", "cat", "dog tree", "blue"):
        words = set(re.findall(r"\w+", query.lower()))
        wanted = expected(words)[:7]
        got = search(examples, query, 7)
        assert [match.feature for match in got] == [feature for *_, feature in wanted]
        assert [match.score for match in got] == pytest.approx([-score for score, *_ in wanted])
    assert got
    assert search(examples, "zebra") == []
    some = examples.examples(int(examples.features()[0]))[0]
    word = some.text[slice(*some.span)]
    best = search(examples, word.upper(), 1)[0]
    assert word in best.example.text
    assert str(best.feature) in str(best)


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


def test_search_refuses() -> None:
    with pytest.raises(ConfigError, match="has no words"):
        search(TopExamples(D_SAE), "?!")
