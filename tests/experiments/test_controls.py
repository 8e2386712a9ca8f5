"""Controls in the SAE's place, against numpy and brute force."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np
import pytest
import torch

from experiments.evidence.controls import (
    CONTROLS,
    Remembering,
    Shuffled,
    ablations,
    controls_for,
    hidden_sample,
    neurons,
    principal_directions,
)
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.grounding import Grounder, GroundingConfig
from remind.models.backbone import Backbone, load_backbone
from remind.states.pyramid import FactualState, Segment, Strategy
from sae import SparseCodes, TopKSAE

D, D_SAE, K = 24, 120, 7
LINES = (
    ("Ana", "My bicycle was stolen on Tuesday."),
    ("Ben", "That is bad news. Did you lock it?"),
    ("Ana", "Of course, at the station."),
    ("Ben", "I saw a red bicycle in the park."),
)


def state() -> FactualState:
    turns = tuple(Turn(str(n), speaker, text) for n, (speaker, text) in enumerate(LINES))
    strategy = Strategy(("Look for lost things.",), entities=("bicycle",))
    return FactualState(
        Dialogue("d", (Session("s", None, turns),)), Question("q", "d", "Lost?"), (Segment(0, 3),), strategy
    )


def coder(seed: int = 0) -> TopKSAE:
    return TopKSAE(D, D_SAE, K, generator=torch.Generator().manual_seed(seed)).requires_grad_(False)


def states(n: int = 300, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.2, 3.0, D)[torch.randperm(D, generator=generator)]
    turn = torch.linalg.qr(torch.randn(D, D, generator=generator)).Q
    return (torch.randn(n, D, generator=generator) * scale) @ turn + 2 * torch.randn(D, generator=generator)


def test_a_remembering_backbone_gives_the_same_and_reads_once(nano: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    remembering, expected = Remembering.of(nano), nano.hidden_states(ids, mask, [1, 2])
    other = nano.hidden_states(ids, None, [1, 2])
    assert not torch.equal(expected[2], other[2])
    for given, states in ((mask, expected), (None, other)):
        assert all(torch.equal(remembering.hidden_states(ids, given, [1, 2])[layer], states[layer]) for layer in states)
    monkeypatch.setattr(remembering, "model", None)
    assert torch.equal(remembering.hidden_states(ids, mask, [1, 2])[2], expected[2])


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano-untrained")


def overlap(codes: SparseCodes) -> torch.Tensor:
    """Features that two tokens share, [T, T]."""
    active = (codes.dense(D_SAE) > 0).double()
    return active @ active.T


def test_shuffled_keeps_every_tokens_values_and_no_identity() -> None:
    h = states().repeat(2, 1)
    plain, shuffled = coder().encode(h), Shuffled(coder(), seed=3).encode(h)
    assert torch.equal(plain.values.sort(-1).values, shuffled.values.sort(-1).values)
    assert bool((shuffled.indices.diff(dim=-1) > 0).all())
    assert int(shuffled.indices.min()) >= 0
    assert int(shuffled.indices.max()) < D_SAE
    pairs = ~torch.eye(len(h), dtype=torch.bool)
    chance = float(plain.active().double().sum(-1).mean()) ** 2 / D_SAE
    assert float(overlap(plain)[pairs].mean()) > 1.15 * chance
    assert float(overlap(shuffled)[pairs].mean()) == pytest.approx(chance, rel=0.03)
    # even the two occurrences of one state share no more than chance
    twins = overlap(plain)[range(300), range(300, 600)], overlap(shuffled)[range(300), range(300, 600)]
    assert float(twins[0].mean()) == K
    assert float(twins[1].mean()) == pytest.approx(chance, rel=0.25)


@pytest.mark.parametrize("d_sae", [96, 97, 128])
def test_shuffled_gives_every_feature_every_name_equally_often(d_sae: int) -> None:
    source = TopKSAE(D, d_sae, 1, generator=torch.Generator().manual_seed(0)).requires_grad_(False)
    same = states(1).expand(20_000, D)
    one, again, other = (Shuffled(source, seed).encode(same).indices for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    counts, expected = torch.bincount(one.flatten(), minlength=d_sae), 20_000 / d_sae
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < d_sae - 1 + 5 * (2 * (d_sae - 1)) ** 0.5
    assert Shuffled(source, 0).coprime.tolist() == [a for a in range(1, d_sae + 1) if gcd(a, d_sae) == 1]


def test_principal_directions_are_those_of_numpys_svd() -> None:
    sample = states(500)
    found = principal_directions(sample, 5)
    assert found.directions is not None
    directions = found.directions.double().numpy()
    np.testing.assert_allclose(directions @ directions.T, np.eye(D), atol=1e-5)
    centred = sample.double().numpy() - sample.double().numpy().mean(0)
    _, singular, rows = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs((directions * rows).sum(1)), 1, atol=1e-4)
    variance = ((centred @ directions.T) ** 2).sum(0)
    np.testing.assert_allclose(variance, singular**2, rtol=1e-4)
    assert (np.diff(variance) < 0).all()


@pytest.mark.parametrize("kind", ["pca", "neurons"])
def test_signed_features_are_the_largest_coordinates(kind: str) -> None:
    sample = states()
    control = principal_directions(sample, K) if kind == "pca" else neurons(D, K)
    codes = control.encode(sample.view(3, 100, D))
    assert codes.values.shape == (3, 100, K)
    rows = sample.numpy()
    if kind == "pca":
        rows = (rows - rows.mean(0)) @ control.directions.numpy().T
    values, indices = codes.values.reshape(-1, K).numpy(), codes.indices.reshape(-1, K).numpy()
    for row, value, feature in zip(rows, values, indices, strict=True):
        expected = sorted((c if row[c] > 0 else D + c, abs(row[c])) for c in np.argsort(-np.abs(row))[:K])
        assert feature.tolist() == [name for name, _ in expected]
        np.testing.assert_allclose(value, [size for _, size in expected], rtol=1e-3, atol=1e-4)
    whole = neurons(D, D)
    torch.testing.assert_close(whole.dense(whole.encode(sample)), sample, rtol=0, atol=0)


def test_a_sample_holds_the_hidden_states_without_sinks(nano: Backbone) -> None:
    texts = ["one two three", "four five six seven eight nine ten"]
    found = hidden_sample(nano, texts, (1, 3), sink_ratio=1e6)
    for layer, rows in found.items():
        with torch.no_grad():
            expected = [
                nano.model(torch.tensor([nano.tokenize(text).ids]), output_hidden_states=True).hidden_states[layer][0]
                for text in texts
            ]
        torch.testing.assert_close(rows, torch.cat(expected), rtol=1e-4, atol=1e-5)
    lengths = found[3].norm(dim=-1).split([len(nano.tokenize(text).ids) for text in texts])
    kept = sum(int((part <= 1.05 * part.median()).sum()) for part in lengths)
    assert len(hidden_sample(nano, texts, (3,), sink_ratio=1.05)[3]) == kept < len(found[3])


@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_goes_where_an_sae_goes(nano: Backbone, name: str) -> None:
    saes = {n: TopKSAE(nano.hidden_size, 256, 8, generator=torch.Generator().manual_seed(n)) for n in (2, 4)}
    sample = hidden_sample(nano, [text for _, text in LINES], (2, 4))
    config = GroundingConfig(context_codes="joint", budget_share=0.6, window=0)
    controls = [controls_for(name, saes, sample, seed=5) for _ in range(2)]
    first, again = (Grounder(nano, control, None, config).trace(state()) for control in controls)
    assert first.state.blocks
    assert first.state == again.state
    assert bool(torch.isfinite(first.combined).all())
    if name == "untrained":
        # h - b_dec is what is projected, so the mean itself activates nothing
        mean = sample[2].mean(0)
        assert torch.equal(controls[0][2].b_dec, mean)
        assert not bool(controls[0][2].encode(mean[None]).active().any())


@pytest.mark.parametrize("name", list(ablations()))
def test_an_ablation_switches_one_part_off(nano: Backbone, name: str) -> None:
    saes = {2: TopKSAE(nano.hidden_size, 256, 8, generator=torch.Generator().manual_seed(2))}
    full = Grounder(nano, saes, None, GroundingConfig()).trace(state())
    cut = Grounder(nano, saes, None, replace(GroundingConfig(), **ablations()[name])).trace(state())
    codes = cut.codes.layers[2]
    if name == "no_smoothing":
        assert torch.equal(cut.smoothed, cut.combined)
        assert torch.equal(cut.combined, full.combined)
        assert not torch.equal(full.smoothed, full.combined)
    elif name == "no_broadcast":
        local = (codes.dialogue.dense(256).double() * cut.guidance[2].double()).sum(-1)
        torch.testing.assert_close(cut.combined.double(), local, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(full.combined, cut.combined)
    else:
        counts = [(tokens.dense(256) > 0).sum(0).float() for tokens in (codes.reasoning, codes.anchors)]
        torch.testing.assert_close(cut.guidance[2], torch.maximum(counts[0], 6 * counts[1]))
