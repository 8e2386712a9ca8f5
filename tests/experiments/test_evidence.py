"""The evidence benchmark's parts against loops, the library's own selection and grounding, and known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.evidence.prepare import DRAWS, Prepared, View
from experiments.evidence.report import Table
from torch import Tensor

from experiments.evidence.crossval import CrossValidation, best_settings, dataset_mean, fit_weights, question_shares
from experiments.evidence.data import DialogueQuestions, gold_turns, load
from experiments.evidence.methods import METHODS, Setting, evidence_ratio, grid, plain_scores
from experiments.evidence.resonance import encode_questions, salience
from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.grounding import Grounder, GroundingConfig, select_blocks
from remind.grounding.codes import WindowedCodes
from remind.grounding.config import FACTS, SCORES
from remind.models.backbone import Backbone, load_backbone
from remind.states.pyramid import FactualState, Segment, Strategy
from sae import TopKSAE


@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_the_ratio_is_what_select_blocks_marks(window: int, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    n, questions, budgets = 14, 3, [0, 5, 17, 40, 1000]
    # few distinct values make ties
    scores = torch.randint(0, 5, (n, questions), generator=draws).float()
    scores[torch.rand(n, questions, generator=draws) < 0.15] = -torch.inf
    cost = torch.randint(1, 9, (n,), generator=draws)
    session = torch.tensor([0] * 5 + [1] * 6 + [2] * 3)
    held = torch.rand(n, questions, generator=draws) < 0.7
    gold = [torch.randperm(n, generator=draws)[:3].sort().values for _ in range(questions)]
    for run in (session[:, None], runs_of(session, held)):
        found = evidence_ratio(scores, run, cost, gold, budgets, window)
        for q in range(questions):
            column = run.expand(n, questions)[:, q]
            kept = (column >= 0).nonzero().squeeze(-1)
            for b, budget in enumerate(budgets):
                blocks = select_blocks(
                    scores[kept, q], cost[kept], budget=budget, window=window, run=column[kept].tolist()
                )
                marked = {int(kept[k]) for start, end in blocks for k in range(start, end + 1)}
                assert found[q, b] == pytest.approx(len(marked & set(gold[q].tolist())) / 3)


def runs_of(session: Tensor, held: Tensor) -> Tensor:
    """Numbers of the runs that retrieval of `held` [n, Q] leaves, -1 elsewhere."""
    out = torch.full(held.shape, -1)
    for q in range(held.shape[1]):
        number, before = -1, None
        for k in held[:, q].nonzero().flatten().tolist():
            if before is None or before != k - 1 or session[before] != session[k]:
                number += 1
            out[k, q], before = number, k
    return out


def test_fitted_weights_are_where_the_gradient_vanishes() -> None:
    draws = torch.Generator().manual_seed(0)
    designs = [torch.randn(9, 4, 3, generator=draws), torch.randn(6, 2, 3, generator=draws)]
    gold = [[torch.tensor([q, q + 2]) for q in range(4)], [torch.tensor([1]), torch.tensor([0, 4, 5])]]
    shares = question_shares(["a", "b"], [4, 2])
    assert shares == [0.125, 0.25]
    assert question_shares(["a", "a", "b"], [1, 3, 2]) == [0.125, 0.125, 0.25]
    w = fit_weights(designs, gold, shares, ridge=0.01).double()
    gradient = 0.02 * w
    for x, found, share in zip(designs, gold, shares, strict=True):
        for q, turns in enumerate(found):
            rows = x[:, q].double()
            p = torch.softmax(rows @ w, 0)
            gradient = gradient + share * (p @ rows - rows[turns].mean(0))
    assert gradient.abs().max() < 1e-4
    only = fit_weights(designs, gold, shares, ridge=0.01, columns=[0, 2])
    assert only[1] == 0
    alone = fit_weights([x[..., [0, 2]] for x in designs], gold, shares, ridge=0.01)
    torch.testing.assert_close(only[[0, 2]], alone)


def small_dialogue() -> Dialogue:
    first = (
        Turn("a0", "Ana", "Good morning! Did you sleep well?"),
        Turn("a1", "Ben", "Not really, the dog barked all night."),
        Turn("a2", "Ana", "", images=(Image(0, caption="a brown dog on a sofa"),)),
        Turn("a3", "Ben", "My bicycle was stolen on Tuesday.", images=(Image(1, caption="an empty rack"),)),
        Turn("a4", "Ben", ""),
    )
    second = (
        Turn("b0", "Ben", "Did you find a red bicycle near the station?"),
        Turn("b1", "Ana", "It is mine! Thank you."),
        Turn("b2", "Ben", "Dinner is on you then."),
    )
    return Dialogue("d", (Session("a", "2024-03-01", first), Session("b", "2024-03-05", second)))


@pytest.fixture(scope="module")
def minilm() -> Backbone:
    return load_backbone("minilm")


SETTINGS: list[dict[str, Any]] = [
    {"match": "summed"},
    {"match": "summed", "alpha": 1.5, "beta": 8.0, "lam": 0.6, "sigma": 0.0, "agg": "mean"},
    {"match": "summed", "alpha": 0.2, "beta_unit": None, "sigma": 2.0, "agg": "max", "layers": "last"}
    | {"anchor_idf": False},
    {"match": "each"},
    {"match": "summed", "anchor_codes": "strategy"},
    {"match": "each", "anchor_codes": "strategy"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_resonance_of_many_questions_is_the_grounders(minilm: Backbone, settings: dict[str, Any]) -> None:
    """Full history and a part of it, two questions at once against one state at a time."""
    saes = {n: TopKSAE(minilm.hidden_size, 64, 5, generator=torch.Generator().manual_seed(n)) for n in (4, 5)}
    config = GroundingConfig(**{"anchor_codes": "question", **settings}, smooth_turns=0.0, context_codes="windowed")
    grounder = Grounder(minilm, saes, None, config)
    dialogue = small_dialogue()
    asked = [
        Question("p", "d", "When was Ben's bicycle stolen?"),
        Question("q", "d", "Which animal kept the house awake at night?"),
    ]
    strategies = [
        Strategy(("Look for things that were lost.", "Mind the dates."), ("Ben",), ("bicycle", "the station")),
        Strategy(("Mind the dates.",), focus=("dog barking",)),
    ]
    parts = [[Segment(0, 4), Segment(5, 7)], [Segment(1, 2), Segment(4, 4), Segment(6, 7)]]
    windowed = WindowedCodes(grounder.encoder, config.window_tokens, 1)
    codes = windowed.dialogue_codes(dialogue)
    texts = [q.text for q in asked]
    held = encode_questions(grounder.encoder, codes, dialogue, texts, strategies, config.anchor_codes)
    run = torch.full((8, 2), -1)
    states = [
        FactualState(dialogue, question, tuple(part), strategy)
        for question, part, strategy in zip(asked, parts, strategies, strict=True)
    ]
    for column, state in enumerate(states):
        run[list(state.positions), column] = torch.tensor(state.runs)
    found = salience(held, config, run, sorted(codes.layers))
    for column, state in enumerate(states):
        expected = torch.tensor(grounder.ground(state).salience)
        torch.testing.assert_close(found[list(state.positions), column], expected, atol=2e-4, rtol=2e-4)


def test_gold_turns_of_text_and_images() -> None:
    dialogue = small_dialogue()
    assert gold_turns(dialogue, Question("q", "d", "?", evidence=("b1", "a1", "b1"))).tolist() == [1, 6]
    visual = Question("q", "d", "?", images=(1,), dimension="personalized_visual_baselines")
    assert gold_turns(dialogue, visual).tolist() == [3]


def prepared(dataset: str, name: str, seed: int, telling: str) -> Prepared:
    """A dialogue in which one signal points at the gold turn and all else is noise."""
    draws = torch.Generator().manual_seed(seed)
    n, questions = 20, 6
    turns = tuple(Turn(f"{name}:{k}", "AB"[k % 2], f"word{k}") for k in range(n))
    gold = tuple(torch.randint(0, n, (1,), generator=draws) for _ in range(questions))
    asked = DialogueQuestions(
        dataset,
        Dialogue(name, (Session("s", None, turns),)),
        tuple(Question(f"{name}/{q}", name, "?", category=q % 2 + 1) for q in range(questions)),
        gold,
    )
    names = [*SCORES[2:], *FACTS, "dense_plain", "bm25_plain", "resonance/summed/last", "resonance/each/last"]
    names += [f"random/{draw}" for draw in range(DRAWS)]
    signals = {key: torch.randn(n, questions, generator=draws) for key in names}
    signals["length"] = torch.full((n, questions), 2.0)
    for q, found in enumerate(gold):
        signals[telling][found, q] += 12
    view = View(torch.zeros(n, 1, dtype=torch.int64), signals)
    return Prepared(asked, torch.full((n,), 100), {"full": view, "retrieved": view}, None, ())  # type: ignore[arg-type]


def test_cross_validation_never_sees_the_dialogue_it_measures() -> None:
    """In the odd dialogue another resonance is the telling one: its fold must choose the others' and miss."""
    ready = [prepared("one", f"d{k}", k, "resonance/each/last") for k in range(3)]
    ready.append(prepared("one", "odd", 9, "resonance/summed/last"))
    validation = CrossValidation(ready, (200, 3200), 200)
    ratios, folds = validation.run()
    assert len(folds) == 4
    assert folds[3].settings["resonance"]["full"][200].resonance == "resonance/each/last"
    assert ratios["resonance", "full"][3][:, 0].mean() < 0.5
    whole, choice = validation.all_dialogues()
    assert {method for method, _ in ratios} >= set(METHODS)
    # the weights follow the telling signal
    assert max(choice.weights, key=lambda name: choice.weights[name]) == "each"
    assert ratios["fused", "full"][0][:, 0].mean() > 0.9
    assert whole["resonance", "full"][0].shape == (6, 2)


def test_every_dataset_weighs_the_same_in_a_choice() -> None:
    names = ["one", "one", "one", "two"]
    values = [np.ones((6, 1)), np.zeros((6, 1)), np.zeros((6, 1)), np.ones((6, 1))]
    assert float(dataset_mean(values, names)[0]) == pytest.approx((1 / 3 + 1) / 2)
    # the setting that is better by dataset, though worse by question
    table = {Setting(): values, Setting("window 1"): [np.ones((6, 1))] * 3 + [np.zeros((6, 1))]}
    assert best_settings(table, names, [0, 1, 2, 3]) == [Setting()]
    assert best_settings(table, names, [0, 1, 2]) == [Setting("window 1")]


def test_settings_smooth_and_save_as_they_say() -> None:
    one = prepared("one", "d", 0, "dense_plain")
    view = one.views["full"]
    plain = plain_scores(view, ["dense_plain"], Setting())
    expected = view.signals["dense_plain"]
    expected = (expected - expected.mean(0)) / expected.std(0, unbiased=False)
    torch.testing.assert_close(plain, expected)
    lent = plain_scores(view, ["dense_plain"], Setting("neighbours"))
    torch.testing.assert_close(lent[5], (0.5 * plain[4] + plain[5] + 0.5 * plain[6]) / 2)
    torch.testing.assert_close(lent[0], (plain[0] + 0.5 * plain[1]) / 1.5)
    thrifty = plain_scores(view, ["dense_plain"], Setting(thrift=0.5))
    torch.testing.assert_close(thrifty, plain - 0.5 * view.signals["length"])
    assert Setting("window 2").window == 2
    assert Setting("context").window == 0
    for method in METHODS:
        options = grid(method, ["resonance/each/last"])
        assert len(set(options)) == len(options)


def test_rows_and_differences() -> None:
    asked = [prepared("one", "d0", 0, "bm25").asked, prepared("one", "d1", 1, "bm25").asked]
    budgets = [200, 3200]
    low = [np.tile([0.2, 0.6], (6, 1)), np.tile([0.2, 0.4], (6, 1))]
    high = [np.tile([0.3, 0.9], (6, 1)), np.tile([0.3, 0.5], (6, 1))]
    ratios = {("bm25", "full"): low, ("dense", "full"): [v / 2 for v in low], ("fused", "full"): high}
    table = Table(asked, ratios, budgets)
    rows = table.rows()
    assert len(rows) == 3 * 3 * 2
    whole = next(r for r in rows if (r["category"], r["method"], r["budget"]) == ("all", "fused", 3200))
    assert whole["ratio"] == pytest.approx(0.7)
    assert whole["n"] == 12
    assert whole["low"] < 0.7 < whole["high"]
    assert next(r for r in rows if r["category"] == "2")["n"] == 6
    first, second = table.differences("fused", ["bm25", "dense"], "full")
    assert first["baseline"] == "bm25"
    assert first["difference"] == pytest.approx(0.1)
    assert (first["low"], first["clustered_high"]) == (pytest.approx(0.1), pytest.approx(0.1))
    assert second["difference"] == pytest.approx(0.2)
    assert (second["clustered_low"], second["clustered_high"]) == (pytest.approx(0.1), pytest.approx(0.3))


def test_data_without_evidence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    said = '[{"id": "A", "text": "hello"}, {"id": "B", "text": "hi"}]'
    path.write_text(f'{{"personas": [["a"], ["b"]], "dialog": {said}}}\n')
    with pytest.raises(ConfigError, match="no question with gold evidence"):
        load([str(path)])
