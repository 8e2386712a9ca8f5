"""Fused salience against loops in float64, and what the grounder makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
import torch
from torch import Tensor

from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue, Session, Turn
from remind.grounding import Grounder, GroundingConfig
from remind.grounding.config import FACTS, SCORES, WEIGHTS, FusionConfig
from remind.grounding.fusion import TurnIndex, best_partners, closeness, fuse, match_each, turn_days
from remind.models.backbone import Backbone
from remind.models.encoder import SentenceEncoder
from remind.states.pyramid import Segment
from remind.text.days import spans
from sae import SparseCodes
from tests.grounding.conftest import dialogue, saes_for, state_of


def z(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std() if values.std() > 1e-6 else 0 * values


def fused_by_hand(signals: dict[str, np.ndarray], runs: Sequence[int], config: FusionConfig) -> np.ndarray:
    run, place = np.array(runs), np.arange(len(runs))
    away = abs(place[:, None] - place)
    near = np.exp(-(away**2) / (2 * config.sigma**2)) * (away <= math.ceil(3 * config.sigma)) * (run[:, None] == run)
    total = sum(getattr(config, name) * signals.get(name, np.zeros(len(run))) for name in FACTS)
    for name in SCORES:
        if name in signals:
            own = z(signals[name])
            context = z(near @ own / near.sum(1))
            total = total + getattr(config, name) * own + getattr(config, f"{name}_context") * context
    return total


def random_config(seed: int, sigma: float) -> FusionConfig:
    draws = torch.randn(len(WEIGHTS), generator=torch.Generator().manual_seed(seed)).tolist()
    return FusionConfig(**dict(zip(WEIGHTS, draws, strict=True)), sigma=sigma)


def test_fuse_is_the_weighted_sum_of_its_definition() -> None:
    """Each question has its own turns at hand; the others count nowhere."""
    draws = torch.Generator().manual_seed(3)
    signals = {name: torch.randn(9, 3, generator=draws) for name in (*SCORES, *FACTS)}
    columns = [[0, 0, 0, 1, 1, 2, 3, 3, 3], [0, 0, -1, -1, 1, 1, 1, -1, 2], [-1, -1, -1, 4, -1, -1, -1, -1, -1]]
    runs, config = torch.tensor(columns).T, random_config(1, 1.5)
    fused = fuse(signals, runs, config)
    for q, column in enumerate(columns):
        inside = [k for k, run in enumerate(column) if run >= 0]
        own = {name: values[inside, q].double().numpy() for name, values in signals.items()}
        expected = fused_by_hand(own, [column[k] for k in inside], config)
        np.testing.assert_allclose(fused[inside, q], expected, atol=1e-4, rtol=1e-4)


def test_signals_of_turns(sentences: SentenceEncoder) -> None:
    found = TurnIndex(dialogue(), sentences).signals(
        ["Did Ben's bicycle get stolen in March?", "Was it Ana, on 04.03.2024?"]
    )
    assert found["speaker"].T.tolist() == [[0, 1, 0, 1, 0, 1, 1, 0, 1, 0], [1, 0, 1, 0, 1, 0, 0, 1, 0, 1]]
    assert found["asks"][:, 0].tolist() == [1, *[0] * 8, 1]
    # an answer follows a question in its own session
    assert found["answers"][:, 0].tolist() == [0, 1, *[0] * 8]
    assert found["date"].T.tolist() == [[1.0] * 10, [*[0] * 6, *[0.5] * 4]]
    assert found["bm25"][:, 0].argmax() == 4
    assert found["bm25"][[0, 1, 2, 3, 5, 7, 8, 9], 0].abs().max() == 0
    lines = ["Ana: My bicycle was stolen on Tuesday, by the way.", "Ana: It is mine! Thank you."]
    asked = sentences.encode(["Did bicycle get stolen in March?"])[0]
    vectors = sentences.encode(lines)
    torch.testing.assert_close(found["dense"][[4, 7], 0], vectors @ asked)


def test_how_close_days_are() -> None:
    days = [date(2023, 12, 31), date(2024, 1, 2), date(2024, 1, 3), None]

    def close(text: str) -> list[float]:
        return closeness(days, [*spans(text, None, days[2])]).tolist()

    assert close("on 31.12.2023, may they march?") == [1, 0.5, 0, 0]
    assert close("in January") == [0, 1, 1, 0]
    turns = (Turn("a", "Ana", "x"), Turn("b", "Ana", "x", time="2024-03-09T10:00:00"))
    assert turn_days(Dialogue("d", (Session("s", "2024-03-01", turns),))) == [date(2024, 3, 1), date(2024, 3, 9)]


def random_codes(n: int, d_sae: int, k: int, seed: int) -> SparseCodes:
    draws = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randperm(d_sae, generator=draws)[:k] for _ in range(n)])
    return SparseCodes((torch.rand(n, k, generator=draws) - 0.25).clamp(min=0), indices)


def as_dense(codes: SparseCodes, d_sae: int) -> Tensor:
    return torch.zeros(len(codes.values), d_sae).scatter_add(1, codes.indices, codes.values).double()


def test_matching_by_words_is_its_definition() -> None:
    d_sae = 30
    codes, query = random_codes(40, d_sae, 4, 1), random_codes(6, d_sae, 4, 2)
    turn = torch.tensor([0] * 7 + [-1] * 3 + [2] * 12 + [3] * 1 + [4] * 17)
    owner = torch.tensor([0, 0, 0, 1, 1, 1])
    idf = torch.rand(d_sae, generator=torch.Generator().manual_seed(3)) + 0.1
    idf[4] = -1e-8
    features = (as_dense(codes, d_sae) * idf.clamp(min=0).double()).sqrt()
    asked = (as_dense(query, d_sae) * idf.clamp(min=0).double()).sqrt()
    cosine = torch.nan_to_num(features @ asked.T / features.norm(dim=1)[:, None] / asked.norm(dim=1)[None])
    expected = torch.zeros(5, 6).double()
    for k in (0, 2, 3, 4):
        expected[k] = cosine[turn == k].amax(0)
    found = best_partners(codes, turn, 5, query, idf)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    inside = torch.tensor([[True, True], [False, False], [True, False], [True, True], [True, True]])
    by_question = match_each(found, owner, inside)
    for q, held in enumerate(inside.T):
        own = expected[:, owner == q]
        sums = (own - own[held].mean(0)).clamp(min=0).square().sum(1)
        torch.testing.assert_close(by_question[:, q].double(), torch.where(held, sums, 0.0), atol=1e-5, rtol=1e-5)


def test_the_grounder_fuses_what_it_grounds(minilm: Backbone, sentences: SentenceEncoder) -> None:
    saes = saes_for(minilm, (4, 5), 64, 5)
    config = GroundingConfig(anchor_codes="question", layers="last", window=0)
    state = state_of(segments=(Segment(0, 2), Segment(4, 8)))
    alone = {
        kind: np.array(Grounder(minilm, saes, None, replace(config, match=kind)).ground(state).salience)
        for kind in ("summed", "each")
    }
    weights = random_config(8, 1.5)
    with pytest.raises(ConfigError, match="sentence encoder"):
        Grounder(minilm, saes, None, replace(config, fuse=weights))
    trace = Grounder(minilm, saes, None, replace(config, fuse=weights), sentences).trace(state)
    assert list(trace.codes.layers) == [5]
    silent = np.isinf(alone["each"])
    assert silent.nonzero()[0].tolist() == [4]
    read = TurnIndex(state.dialogue, sentences).signals([state.question.text])
    signals = {name: values[list(state.positions), 0].double().numpy() for name, values in read.items()}
    signals |= {kind: np.where(silent, values[~silent].min(), values) for kind, values in alone.items()}
    signals["length"] = trace.codes.turn_tokens.double().log1p().numpy()
    expected = np.where(silent, -np.inf, fused_by_hand(signals, state.runs, weights))
    np.testing.assert_allclose(trace.state.salience, expected, atol=2e-3)
