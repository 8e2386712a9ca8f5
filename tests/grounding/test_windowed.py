"""Codes kept in memory and on disk: the same bits as without, keyed by all they depend on."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remind.grounding import Grounder, GroundingConfig
from remind.grounding.codes import SparseEncoder, StateCodes, WindowedCodes
from remind.models.backbone import Backbone, load_backbone
from remind.states.pyramid import Segment, Strategy
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
    pairs = [(getattr(first, name), getattr(second, name)) for name in ("turn", "part", "turn_tokens")]
    for one, other in zip(first.layers.values(), second.layers.values(), strict=True):
        codes = [(getattr(one, name), getattr(other, name)) for name in ("dialogue", "reasoning", "anchors")]
        pairs += [
            (one.idf, other.idf),
            *((getattr(a, n), getattr(b, n)) for a, b in codes for n in ("values", "indices")),
        ]
    assert all(torch.equal(a, b) for a, b in pairs)


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


def test_the_key_of_an_entry_has_all_it_depends_on(nano: Backbone, tmp_path: Path) -> None:
    def entries(one: SparseEncoder, window: int = 24, word: str = "station") -> int:
        WindowedCodes(one, window, 1, tmp_path).dialogue_codes(dialogue(word=word))
        return len(list(tmp_path.rglob("*.safetensors")))

    assert entries(encoder(nano)) == entries(encoder(nano, batch_size=2)) == 1
    assert entries(encoder(nano), word="harbour") == 2
    assert entries(encoder(nano), window=9) == 3
    assert entries(encoder(nano, sink_ratio=9.0)) == 4
    coder = encoder(nano)
    coder.saes[3].b_enc[7] += 1e-3  # type: ignore[attr-defined]
    assert entries(coder) == 5
    model = copy.deepcopy(nano.model)
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[-1].add_(1e-3)
    assert entries(encoder(replace(nano, model=model))) == 6


@pytest.mark.parametrize("mode", ["joint", "windowed"])
def test_results_depend_neither_on_batch_size_nor_on_the_caches(nano: Backbone, mode: str) -> None:
    def grounder(**more: Any) -> Grounder:
        config = GroundingConfig(budget_share=0.6, window=0, context_codes=mode, window_tokens=12, **more)  # type: ignore[arg-type]
        return Grounder(nano, saes_for(nano, (1, 3), k=24), None, config)

    states = [state_of(), state_of(Strategy(("Look for a red bicycle.",), entities=("park",)), (Segment(1, 7),))]
    plain = [grounder().ground(one) for one in states]
    other = grounder(batch_size=3).ground(states[0])
    assert other.salience == pytest.approx(plain[0].salience, rel=1e-4, abs=1e-4)
    used = grounder(cached_dialogues=2)
    assert [used.ground(states[n]) for n in (0, 1, 1, 0)] == [plain[n] for n in (0, 1, 1, 0)]
