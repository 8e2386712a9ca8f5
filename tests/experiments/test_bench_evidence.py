"""The evidence benchmark run whole on the bundled sample, and the parts of it that stand in the resonance's place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.evidence.variations import _cosines

from experiments.evidence.bench import BUDGETS, BenchEvidenceConfig, bench_evidence
from experiments.evidence.controls import neurons
from experiments.evidence.data import load
from experiments.evidence.methods import METHODS
from experiments.evidence.resonance import encode_questions
from remind.core.errors import ConfigError, ModelError
from remind.data.sample import sample_path
from remind.grounding import GroundingConfig
from remind.grounding.codes import Part, SparseEncoder, WindowedCodes
from remind.models.backbone import Backbone, load_backbone
from remind.states.pyramid import Strategy
from sae import TopKSAE


@pytest.fixture(scope="module")
def minilm() -> Backbone:
    return load_backbone("minilm")


@pytest.fixture(scope="module")
def sae_folder(minilm: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sae")
    for layer in (4, 5):
        coder = TopKSAE(minilm.hidden_size, 256, 8, generator=torch.Generator().manual_seed(layer))
        coder.save(folder / f"layer_{layer:02d}")
    return folder


@pytest.fixture(scope="module")
def config(sae_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BenchEvidenceConfig:
    folder = tmp_path_factory.mktemp("evidence")
    data, out = str(sample_path() / "dev.jsonl"), str(folder / "result.json")
    cache = str(folder / "cache")
    # the sample's dialogues are short
    return BenchEvidenceConfig(data, out, str(sae_folder), controls=True, sweep=True, limit=6, budget=200, cache=cache)


@pytest.fixture(scope="module")
def result(config: BenchEvidenceConfig) -> dict[str, Any]:
    return bench_evidence(config)


def test_a_run_leaves_rows_table_and_plot(
    config: BenchEvidenceConfig, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(config.out)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = result["rows"]
    assert {row["method"] for row in rows} == set(METHODS)
    assert {row["scope"] for row in rows} == {"full", "retrieved"}
    assert all(0 <= row["low"] <= row["ratio"] + 1e-9 <= row["high"] + 2e-9 <= 1 + 3e-9 for row in rows)
    whole = {(row["method"], row["budget"]): row for row in rows if row["category"] == "all" and row["scope"] == "full"}
    asked, _ = load([str(config.data)], config.limit)
    assert whole["bm25", 800]["n"] == sum(len(one.questions) for one in asked)
    for method in METHODS:
        ratios = [whole[method, budget]["ratio"] for budget in BUDGETS]
        assert ratios[0] < ratios[-1]
    # evidence is what the question speaks of, so what reads it beats chance
    for method in ("bm25", "dense", "bm25+dense", "fused"):
        assert whole[method, 200]["ratio"] > 2 * whole["random", 200]["ratio"]


def test_controls_and_sweep_are_measured_like_the_rest(result: dict[str, Any]) -> None:
    names = {row["method"] for row in result["controls"]}
    assert names == {
        *(f"resonance, {name}" for name in ("no_idf", "no_broadcast", "no_smoothing", "strategy_anchors")),
        *(f"{name} for SAE" for name in ("untrained", "shuffled", "pca", "neurons", "cosine")),
    }
    whole = {(row["method"], row["budget"]): row["ratio"] for row in result["controls"] if row["category"] == "all"}
    resonance = {
        row["budget"]: row["ratio"]
        for row in result["rows"]
        if (row["method"], row["scope"], row["category"]) == ("resonance", "full", "all")
    }
    # features without identity find what chance and thrift find
    assert whole["shuffled for SAE", 400] < resonance[400] - 0.1
    assert {row["baseline"] for row in result["control_differences"]} == names
    moved = {(row["setting"], str(row["value"])): row["ratio"]["refmem"] for row in result["sweep"]}
    assert {name for name, _ in moved} == {"alpha", "beta", "lam", "sigma", "agg", "anchor_idf", "idf", "layers"}
    defaults = [row["ratio"]["refmem"] for row in result["sweep"] if row["default"]]
    assert len(defaults) == 8
    assert max(defaults) - min(defaults) < 1e-9
    assert len(set(moved.values())) > 4


def test_what_cannot_be_run(config: BenchEvidenceConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no SAE"):
        bench_evidence(replace(config, sae=str(tmp_path)))
    one = tmp_path / "one.jsonl"
    lines = (sample_path() / "dev.jsonl").read_text(encoding="utf-8").splitlines()
    contexts = [json.loads(line)["id"] for line in lines if json.loads(line)["type"] == "context"]
    own = [line for line in lines if contexts[0] in (json.loads(line).get("id"), json.loads(line).get("context_id"))]
    one.write_text("\n".join(own), encoding="utf-8")
    with pytest.raises(ConfigError, match="needs two"):
        bench_evidence(replace(config, data=str(one)))
    with pytest.raises(ConfigError, match="two of the data files"):
        bench_evidence(replace(config, data=[str(one), str(one)]))


def test_cosine_of_hidden_states_by_hand(minilm: Backbone) -> None:
    """Turn scores of the control against cosines of the backbone's own hidden states."""
    (asked, *_), _ = load([str(sample_path() / "dev.jsonl")], limit=2)
    width = minilm.hidden_size
    coders = {layer: neurons(width, width) for layer in (4, 5)}
    encoder = SparseEncoder(minilm, coders, 1e6, 8)
    config = GroundingConfig(agg="mean", sigma=0.0, lam=0.5)
    codes = WindowedCodes(encoder, config.window_tokens, 0).dialogue_codes(asked.dialogue)
    texts = [question.text for question in asked.questions]
    held = encode_questions(encoder, codes, asked.dialogue, texts, [Strategy(())] * 2)
    found = _cosines(held, config, asked.session_of[:, None])["resonance/summed/last"]
    dense = neurons(width, width).dense
    states, anchors = dense(codes.layers[5]).double(), dense(held.anchors[5]).double()
    for q in range(2):
        mean = anchors[held.owner == q].mean(0)
        cosine = states @ mean / (states.norm(dim=1) * mean.norm())
        for k, turn in list(enumerate(asked.dialogue.turns))[::9]:
            here = codes.turn == k
            text, caption = (cosine[here & (codes.part == part)] for part in (Part.TEXT, Part.CAPTION))
            parts = [part.mean() for part in (text, caption) if len(part)]
            assert float(found[k, q]) == pytest.approx(float(sum(parts) / len(parts)), abs=1e-4), turn.id
