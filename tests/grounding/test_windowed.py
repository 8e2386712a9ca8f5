"""Codes kept in memory and on disk: the same bits as without, keyed by all they depend on."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from remind.grounding.codes import SparseEncoder, StateCodes, WindowedCodes
from remind.models.backbone import Backbone, load_backbone
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
    """To the bit."""
    leaves = [tree_leaves(asdict(codes)) for codes in (first, second)]
    for one, other in zip(*leaves, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_another_process_finds_the_same_bits_and_encodes_only_its_strategy(nano: Backbone, tmp_path: Path) -> None:
    without = WindowedCodes(encoder(nano), 24).state_codes(state_of())
    first, second = spy(nano), spy(load_backbone("nano"))
    assert_same(without, WindowedCodes(first, 24, tmp_path).state_codes(state_of()))
    again = WindowedCodes(second, 24, tmp_path)
    renamed = state_of(of=dialogue("the same under another name"))
    for _ in range(2):
        assert_same(without, again.state_codes(renamed))
    texts = ("Look for things that were lost.", "Ana", "bicycle", "station")
    assert second.tokens == 2 * sum(len(nano.tokenize(text).ids) for text in texts) < first.tokens
    (path,) = tmp_path.rglob("*.safetensors")
    # a file that is cut short is computed again and replaced
    path.write_bytes(path.read_bytes()[:-3])
    assert_same(without, WindowedCodes(encoder(nano), 24, tmp_path).state_codes(state_of()))


def test_the_key_of_an_entry_has_all_it_depends_on(nano: Backbone, tmp_path: Path) -> None:
    def entries(one: SparseEncoder, window: int = 24, word: str = "station") -> int:
        WindowedCodes(one, window, tmp_path).dialogue_codes(dialogue(word=word))
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
