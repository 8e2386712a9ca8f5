"""The evidence benchmark: parts against loops and the library's own selection and grounding, and a run end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.evidence.bench import BenchEvidenceConfig, bench_evidence
from experiments.evidence.crossval import CrossValidation, fit_weights, question_shares
from experiments.evidence.data import DialogueQuestions
from experiments.evidence.methods import ABLATIONS, DRAWS, METHODS, Prepared, evidence_ratio, grid
from experiments.evidence.resonance import encode_questions, salience
from remind.core.errors import ModelError
from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.data.sample import sample_path
from remind.grounding import Grounder, GroundingConfig, select_blocks
from remind.grounding.codes import WindowedCodes
from remind.grounding.config import FACTS, SCORES
from remind.models.backbone import Backbone, load_backbone
from remind.states.pyramid import FactualState, Segment, Strategy
from sae import TopKSAE


@pytest.mark.parametrize("window", [0, 2])
def test_the_ratio_is_what_select_blocks_marks(window: int) -> None:
    draws = torch.Generator().manual_seed(window)
    n, questions, budgets = 14, 3, [0, 5, 17, 40, 1000]
    # few distinct values make ties
    scores = torch.randint(0, 5, (n, questions), generator=draws).float()
    scores[torch.rand(n, questions, generator=draws) < 0.15] = -torch.inf
    cost = torch.randint(1, 9, (n,), generator=draws)
    session = torch.tensor([0] * 5 + [1] * 6 + [2] * 3)
    gold = [torch.randperm(n, generator=draws)[:3].sort().values for _ in range(questions)]
    found = evidence_ratio(scores, session[:, None], cost, gold, budgets, window)
    for q in range(questions):
        for b, budget in enumerate(budgets):
            blocks = select_blocks(scores[:, q], cost, budget=budget, window=window, run=session.tolist())
            marked = {k for start, end in blocks for k in range(start, end + 1)}
            assert found[q, b] == pytest.approx(len(marked & set(gold[q].tolist())) / 3)


def test_fitted_weights_are_where_the_gradient_vanishes() -> None:
    draws = torch.Generator().manual_seed(0)
    designs = [torch.randn(9, 4, 3, generator=draws), torch.randn(6, 2, 3, generator=draws)]
    gold = [[torch.tensor([q, q + 2]) for q in range(4)], [torch.tensor([1]), torch.tensor([0, 4, 5])]]
    shares = question_shares(["a", "b"], [4, 2])
    assert shares == [0.125, 0.25]
    w = fit_weights(designs, gold, shares, ridge=0.01).double()
    gradient = 0.02 * w
    for x, found, share in zip(designs, gold, shares, strict=True):
        for q, turns in enumerate(found):
            rows = x[:, q].double()
            p = torch.softmax(rows @ w, 0)
            gradient = gradient + share * (p @ rows - rows[turns].mean(0))
    assert gradient.abs().max() < 1e-4


def small_dialogue() -> Dialogue:
    first = (
        "Good morning! Did you sleep well?",
        "The dog barked all night.",
        "",
        "My bicycle was stolen on Tuesday.",
        "",
    )
    second = ("Did you find a red bicycle near the station?", "It is mine! Thank you.", "Dinner is on you then.")
    images = {2: (Image(0, caption="a brown dog on a sofa"),), 3: (Image(1, caption="an empty rack"),)}
    turns = [
        Turn(f"t{n}", ("Ana", "Ben")[n % 2], text, images=images.get(n, ())) for n, text in enumerate(first + second)
    ]
    return Dialogue("d", (Session("a", "2024-03-01", tuple(turns[:5])), Session("b", "2024-03-05", tuple(turns[5:]))))


@pytest.fixture(scope="module")
def minilm() -> Backbone:
    return load_backbone("minilm")


OTHERS = {"alpha": 0.2, "beta_unit": None, "sigma": 2.0, "agg": "max", "layers": "last", "anchor_idf": False}


@pytest.mark.parametrize("settings", [{"match": "summed", **OTHERS}, {"match": "each"}], ids=["summed", "each"])
def test_resonance_of_many_questions_is_the_grounders(minilm: Backbone, settings: dict[str, Any]) -> None:
    """Full history and a part of it, two questions at once against one state at a time."""
    saes = {n: TopKSAE(minilm.hidden_size, 64, 5, generator=torch.Generator().manual_seed(n)) for n in (4, 5)}
    config = GroundingConfig(**{"anchor_codes": "question", **settings}, context_codes="windowed")
    grounder = Grounder(minilm, saes, None, config)
    dialogue = small_dialogue()
    texts = ["When was Ben's bicycle stolen?", "Which animal kept the house awake at night?"]
    asked = [Question(text, "d", text) for text in texts]
    lost = Strategy(("Look for what was lost.", "Mind the dates."), ("Ben",), ("bicycle", "the station"))
    strategies = [lost, Strategy(("Mind the dates.",), focus=("dog barking",))]
    parts = [[Segment(0, 4), Segment(5, 7)], [Segment(1, 2), Segment(4, 4), Segment(6, 7)]]
    windowed = WindowedCodes(grounder.encoder, config.window_tokens)
    codes = windowed.dialogue_codes(dialogue)
    held = encode_questions(grounder.encoder, codes, dialogue, texts, strategies)
    run = torch.full((8, 2), -1)
    given = zip(asked, parts, strategies, strict=True)
    states = [FactualState(dialogue, question, tuple(part), strategy) for question, part, strategy in given]
    for column, state in enumerate(states):
        run[list(state.positions), column] = torch.tensor(state.runs)
    found = salience(held, config, run, sorted(codes.layers))
    for column, state in enumerate(states):
        expected = torch.tensor(grounder.ground(state).salience)
        torch.testing.assert_close(found[list(state.positions), column], expected, atol=2e-4, rtol=2e-4)


def prepared(dataset: str, name: str, seed: int, telling: str) -> Prepared:
    """A dialogue in which one signal points at the gold turn and all else is noise."""
    draws = torch.Generator().manual_seed(seed)
    n, questions = 20, 6
    turns = tuple(Turn(f"{name}:{k}", "AB"[k % 2], f"word{k}") for k in range(n))
    gold = tuple(torch.randint(0, n, (1,), generator=draws) for _ in range(questions))
    dialogue = Dialogue(name, (Session("s", None, turns),))
    about = tuple(Question(f"{name}/{q}", name, "?", category=q % 2 + 1) for q in range(questions))
    asked = DialogueQuestions(dataset, dialogue, about, gold)
    names = [*SCORES[2:], *FACTS, "dense_plain", "bm25_plain", "resonance/summed/last", "resonance/each/last"]
    names += [f"random/{draw}" for draw in range(DRAWS)]
    signals = {key: torch.randn(n, questions, generator=draws) for key in names}
    signals["length"] = torch.full((n, questions), 2.0)
    for q, found in enumerate(gold):
        signals[telling][found, q] += 12
    run = torch.zeros(n, 1, dtype=torch.int64)
    return Prepared(asked, torch.full((n,), 100), run, signals, None, ())  # type: ignore[arg-type]


def test_an_ablation_has_the_settings_of_the_whole() -> None:
    for method in ABLATIONS:
        assert grid(method, ()) == grid("fused", ())


def test_cross_validation_never_sees_the_dialogue_it_measures() -> None:
    """In the odd dialogue another resonance is the telling one: its fold must choose the others' and miss."""
    ready = [prepared("one", f"d{k}", k, "resonance/each/last") for k in range(3)]
    ready.append(prepared("one", "odd", 9, "resonance/summed/last"))
    validation = CrossValidation(ready, (200, 3200), 200)
    ratios = validation.run()
    assert ratios["resonance"][3][:, 0].mean() < 0.5
    _, choice = validation.all_dialogues()
    # the weights follow the telling signal
    assert max(choice.weights, key=lambda name: choice.weights[name]) == "each"
    assert ratios["fused"][0][:, 0].mean() > 0.9


@pytest.mark.slow
def test_a_run_leaves_rows_table_and_plot(minilm: Backbone, tmp_path: Path) -> None:
    data, out, cache = str(sample_path() / "dev.jsonl"), tmp_path / "result.json", str(tmp_path / "cache")
    # the sample's dialogues are short
    config = BenchEvidenceConfig(data, str(out), str(tmp_path), controls=True, limit=6, budget=200, cache=cache)
    with pytest.raises(ModelError, match="holds no SAE"):
        bench_evidence(config)
    for layer in (4, 5):
        coder = TopKSAE(minilm.hidden_size, 256, 8, generator=torch.Generator().manual_seed(layer))
        coder.save(tmp_path / f"layer_{layer:02d}")
    result = bench_evidence(config)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    rows = result["rows"]
    assert {row["method"] for row in rows} == set(METHODS)
    whole = {(row["method"], row["budget"]): row for row in rows if row["category"] == "all"}
    # evidence is what the question speaks of, so what reads it beats chance
    assert whole["fused", 200]["ratio"] > 2 * whole["random", 200]["ratio"]
    [gain] = [row for row in result["differences"] if (row["method"], row["budget"]) == ("fused", 200)]
    best = max(whole[name, 200]["ratio"] for name in ("random", "bm25", "dense", "bm25+dense"))
    assert gain["difference"] == pytest.approx(whole["fused", 200]["ratio"] - best)
    assert {"resonance, no_idf", "untrained for SAE"} <= {row["method"] for row in result["controls"]}
