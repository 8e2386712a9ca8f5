"""Codes kept in memory and on disk: the same bits as without, keyed by all they depend on, safe against bad files."""

from __future__ import annotations

import copy
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.grounding import encode
from remind.grounding.codes import StateCodes
from remind.grounding.encode import SparseEncoder, turn_idf
from remind.grounding.windowed import WindowedCodes
from remind.models.backbone import Backbone
from remind.models.load import load_backbone
from remind.states.pyramid import FactualState, Segment, Strategy
from sae import SparseCodes
from tests.grounding.conftest import saes_for

D_SAE, K = 80, 5


def dialogue(name: str = "d", word: str = "station") -> Dialogue:
    lines = (
        ("Ana", "My bicycle was stolen on Tuesday."),
        ("Ben", f"Where, at the {word}?"),
        ("Ana", "Yes, while I was buying a ticket to the sea, and nobody saw anything."),
        ("Ben", "I am sorry."),
    )
    turns = [Turn(str(n), speaker, text) for n, (speaker, text) in enumerate(lines)]
    turns[3] = replace(turns[3], images=(Image(0, caption="an empty bicycle rack"),))
    return Dialogue(name, (Session("a", None, tuple(turns[:2])), Session("b", None, tuple(turns[2:]))))


def state(target: Dialogue | None = None) -> FactualState:
    strategy = Strategy(("Look for lost things.",), speakers=("Ana",), entities=("bicycle",))
    return FactualState(
        target or dialogue(), Question("q", "d", "What was lost?"), (Segment(0, 1), Segment(3, 3)), strategy
    )


def encoder(backbone: Backbone, batch_size: int = 4, sink_ratio: float = 10.0, k: int = K) -> SparseEncoder:
    return SparseEncoder(backbone, saes_for(backbone, (1, 3), D_SAE, k), sink_ratio, batch_size)


def assert_same(first: StateCodes, second: StateCodes, atol: float = 0.0) -> None:
    assert (first.text, first.spans, list(first.layers)) == (second.text, second.spans, list(second.layers))
    assert torch.equal(first.turn, second.turn)
    assert torch.equal(first.part, second.part)
    assert torch.equal(first.turn_tokens, second.turn_tokens)
    for one, other in zip(first.layers.values(), second.layers.values(), strict=True):
        assert torch.equal(one.idf, other.idf)
        for name in ("dialogue", "reasoning", "anchors"):
            a, b = getattr(one, name), getattr(other, name)
            assert a.values.dtype == b.values.dtype
            assert a.indices.dtype == b.indices.dtype == torch.int64
            torch.testing.assert_close(a.dense(D_SAE), b.dense(D_SAE), rtol=0, atol=atol)


class Spy(SparseEncoder):
    """Counts the tokens it encodes."""

    tokens = 0

    def encode(self, sequences):
        self.tokens += sum(map(len, sequences))
        return super().encode(sequences)


def spy(backbone: Backbone) -> Spy:
    plain = encoder(backbone)
    return Spy(backbone, plain.saes, plain.sink_ratio, plain.batch_size)


def test_another_process_finds_the_same_bits_and_encodes_only_its_strategy(nano: Backbone, tmp_path: Path) -> None:
    without = WindowedCodes(encoder(nano), 24, 1).state_codes(state())
    first, second = spy(nano), spy(load_backbone("nano"))
    assert_same(without, WindowedCodes(first, 24, 1, tmp_path).state_codes(state()))
    again = WindowedCodes(second, 24, 1, tmp_path)
    assert_same(without, again.state_codes(state(dialogue("the same under another name"))))
    strategy = sum(len(nano.tokenize(text).ids) for text in ("Look for lost things.", "Ana", "bicycle"))
    assert second.tokens == strategy < first.tokens
    assert len(list(tmp_path.iterdir())) == 1
    # and from memory
    assert_same(without, again.state_codes(state(dialogue("the same under another name"))))


def test_looking_a_dialogue_up_hashes_nothing(nano: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Dialogue) -> int:
        raise AssertionError("hashing a dialogue goes through all its turns")

    monkeypatch.setattr(Dialogue, "__hash__", refuse)
    counted = spy(nano)
    codes = WindowedCodes(counted, 24, 2)
    found = [codes.dialogue_codes(dialogue(name)) for name in ("d", "e", "d", "f", "d", "e")]
    assert found[0] is found[2] is found[4]
    assert found[1] is not found[5]
    length = len(found[0].turn)
    assert counted.tokens == 4 * length


def test_tokens_are_coded_alike_however_many_at_a_time(nano: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [list(range(20, 20 + n)) for n in (50, 3, 17)]
    whole = encoder(nano).encode(sequences)
    monkeypatch.setattr(encode, "_CHUNK", 7 * D_SAE)
    for layer, codes in encoder(nano).encode(sequences).items():
        torch.testing.assert_close(codes.dense(D_SAE), whole[layer].dense(D_SAE), rtol=1e-4, atol=1e-4)


@given(
    st.lists(st.lists(st.sets(st.integers(0, 11), max_size=3), min_size=0, max_size=4), max_size=9),
    st.sampled_from([12, 24, 1 << 20]),
)
def test_idf_counts_the_turns_a_feature_is_active_in(turns: list[list[set[int]]], at_once: int) -> None:
    rows = [(n, features) for n, tokens in enumerate(turns) for features in tokens]
    values, indices = torch.zeros(len(rows), 3), torch.zeros(len(rows), 3, dtype=torch.int64)
    for t, (_, features) in enumerate(rows):
        # unused entries carry indices too
        padded = [*features, *(set(range(12)) - features)][:3]
        indices[t] = torch.tensor(padded)
        values[t, : len(features)] = 1.5
    turn = torch.tensor([n for n, _ in rows], dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_SEEN", at_once)
        found = turn_idf(SparseCodes(values, indices), turn, 12)
    documents = [tokens for tokens in turns if tokens]
    expected = [
        math.log((1 + len(documents)) / (1 + sum(any(feature in token for token in tokens) for tokens in documents)))
        for feature in range(12)
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


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


@pytest.mark.parametrize("damage", ["cut short", "a folder", "a file in the way", "a full disk"])
def test_what_cannot_be_read_or_written_is_computed_with_a_warning(
    nano: Backbone, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "codes"
    sound = WindowedCodes(encoder(nano), 24, 1, folder).state_codes(state())
    (path,) = folder.rglob("*.safetensors")
    content = path.read_bytes()[:-3]
    path.unlink()
    if damage == "cut short":
        path.write_bytes(content)
    elif damage == "a folder":
        path.mkdir()
    elif damage == "a file in the way":
        shutil.rmtree(folder)
        folder.write_text("in the way")
    else:

        def full(tensors, path, metadata) -> None:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("safetensors.torch.save_file", full)
    with caplog.at_level(logging.WARNING):
        assert_same(sound, WindowedCodes(encoder(nano), 24, 1, folder).state_codes(state()))
    assert str(folder) in caplog.text
    assert all("\n" not in record.getMessage() for record in caplog.records)
    if damage == "cut short":  # it was replaced
        last = spy(nano)
        assert_same(sound, WindowedCodes(last, 24, 1, folder).state_codes(state()))
        assert last.tokens < 20
    elif damage == "a full disk":
        assert not [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"]
