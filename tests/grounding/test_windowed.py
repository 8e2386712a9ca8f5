"""Codes kept in memory and on disk: the same bits as without, keyed by all they depend on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remind.grounding.codes import SparseEncoder, StateCodes, WindowedCodes, turn_idf
from remind.models.backbone import Backbone, load_backbone
from sae import SparseCodes
from tests.grounding.conftest import dialogue, saes_for, state_of


def encoder(backbone: Backbone, batch_size: int = 4, sink_ratio: float = 10.0, k: int = 5) -> SparseEncoder:
    return SparseEncoder(backbone, saes_for(backbone, (1, 3), 80, k), sink_ratio, batch_size)


class Spy(SparseEncoder):
    """Counts the tokens it encodes."""

    tokens = 0

    def encode(self, sequences):
        self.tokens += sum(map(len, sequences))
        return super().encode(sequences)


def spy(backbone: Backbone) -> Spy:
    return Spy(backbone, encoder(backbone).saes, 10.0, 4)


def assert_same(first: StateCodes, second: StateCodes) -> None:
    assert (first.text, first.spans, list(first.layers)) == (second.text, second.spans, list(second.layers))
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("turn", "part", "turn_tokens"))
    for one, other in zip(first.layers.values(), second.layers.values(), strict=True):
        assert torch.equal(one.idf, other.idf)
        for name in ("dialogue", "reasoning", "anchors"):
            a, b = getattr(one, name), getattr(other, name)
            assert torch.equal(a.values, b.values)
            assert torch.equal(a.indices, b.indices)


def test_another_process_finds_the_same_bits_and_encodes_only_its_strategy(nano: Backbone, tmp_path: Path) -> None:
    without = WindowedCodes(encoder(nano), 24, 1).state_codes(state_of())
    first, second = spy(nano), spy(load_backbone("nano"))
    assert_same(without, WindowedCodes(first, 24, 1, tmp_path).state_codes(state_of()))
    again = WindowedCodes(second, 24, 1, tmp_path)
    renamed = state_of(of=dialogue("the same under another name"))
    for _ in range(2):
        assert_same(without, again.state_codes(renamed))
    texts = ("Look for things that were lost.", "Ana", "bicycle", "station")
    assert second.tokens == 2 * sum(len(nano.tokenize(text).ids) for text in texts) < first.tokens
    (path,) = tmp_path.rglob("*.safetensors")
    # a file that is cut short is computed again and replaced
    path.write_bytes(path.read_bytes()[:-3])
    assert_same(without, WindowedCodes(encoder(nano), 24, 1, tmp_path).state_codes(state_of()))


def changed(backbone: Backbone, change: Callable[[torch.nn.Module], object]) -> Backbone:
    model = copy.deepcopy(backbone.model)
    with torch.no_grad():
        change(model)
    return replace(backbone, model=model)


def test_the_key_of_an_entry_has_all_it_depends_on(nano: Backbone, tmp_path: Path) -> None:
    def entries(one: SparseEncoder, window: int = 24, word: str = "station") -> int:
        WindowedCodes(one, window, 1, tmp_path).dialogue_codes(dialogue(word=word))
        return len(list(tmp_path.rglob("*.safetensors")))

    assert entries(encoder(nano)) == entries(encoder(nano, batch_size=2)) == 1
    assert entries(encoder(nano), word="harbour") == 2
    assert entries(encoder(nano), window=9) == 3
    assert entries(encoder(nano, sink_ratio=9.0)) == 4
    assert entries(encoder(nano, k=4)) == 5
    coder = encoder(nano)
    coder.saes[3].b_enc[7] += 1e-3  # type: ignore[attr-defined]
    assert entries(coder) == 6
    assert entries(encoder(changed(nano, lambda model: list(model.parameters())[-1].view(-1)[-1].add_(1e-3)))) == 7
    settings = changed(nano, lambda model: setattr(model.config.get_text_config(), "rms_norm_eps", 0.1))
    assert entries(encoder(settings)) == 8
    assert entries(encoder(load_backbone("nano", dtype="bfloat16"))) == 9


@given(st.lists(st.lists(st.sets(st.integers(0, 11), max_size=3), max_size=4), max_size=9))
def test_idf_counts_the_turns_a_feature_is_active_in(turns: list[list[set[int]]]) -> None:
    rows = [(n, features) for n, tokens in enumerate(turns) for features in tokens]
    values, indices = torch.zeros(len(rows), 3), torch.zeros(len(rows), 3, dtype=torch.int64)
    for t, (_, features) in enumerate(rows):
        # unused entries carry indices too
        indices[t] = torch.tensor([*features, *(set(range(12)) - features)][:3])
        values[t, : len(features)] = 1.5
    found = turn_idf(SparseCodes(values, indices), torch.tensor([n for n, _ in rows], dtype=torch.int64), 12)
    documents = [tokens for tokens in turns if tokens]
    df = [sum(any(feature in token for token in tokens) for tokens in documents) for feature in range(12)]
    assert found.tolist() == pytest.approx([math.log((1 + len(documents)) / (1 + n)) for n in df], abs=1e-6)
