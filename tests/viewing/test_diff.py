"""What training changed, against forwards done by hand; and patches of features between two models."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FalconConfig, Lfm2Config

from remind.core.errors import ConfigError, DataError, ModelError
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.models.backbone import Backbone, load_backbone
from remind.states.dataset import write_states
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import ABSENT, StateRecord, record_of
from remind.viewing.config import CompareModelsConfig
from remind.viewing.diff import Reading, auc, compare_models, figures_of, measure, readings
from remind.viewing.patching import answer_score, patches, whole
from sae import TopKSAE, layer_folder
from tests.viewing.conftest import saes

LINES = ("we met at the river", "it was cold", "I keep a lamp there", "no idea", "they sold it", "tea would be nice")


def record(number: int) -> StateRecord:
    turns = tuple(Turn(f"d{number}-t{n}", ("Ben", "Ana")[n % 2], f"{line} {number}") for n, line in enumerate(LINES))
    dialogue = Dialogue(f"d{number}", (Session("s1", "1 May", turns),))
    question = Question(f"q{number}", dialogue.id, "which place?", answers=("the river",), evidence=(turns[2].id,))
    state = FactualState(dialogue, question, (Segment(0, 5),), Strategy(("find the place",), entities=("place",)))
    return record_of(ReflectiveState(AttentionalState(state, ((2, 2),)), f"Ben keeps a lamp {number}"), "test")


@pytest.fixture(scope="module")
def before() -> Backbone:
    return load_backbone("nano")


@pytest.fixture(scope="module")
def after(before: Backbone) -> Backbone:
    """The same with other weights in its second block."""
    model, generator = copy.deepcopy(before.model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.model.language_model.layers[1].parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return Backbone("after", model, before.tokenizer, before.processor, before.kind)


@pytest.fixture(scope="module")
def coders() -> dict[int, TopKSAE]:
    return saes(1, 3, d_sae=64)


@pytest.fixture(scope="module")
def questions(before: Backbone) -> list[Reading]:
    return readings(before, [record(number) for number in range(3)])


def hidden(backbone: Backbone, ids: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        out = backbone.model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    return tuple(state[0] for state in out.hidden_states)


def test_shares_and_activations_are_those_of_forwards_by_hand(
    before: Backbone, after: Backbone, questions: list[Reading], coders: dict[int, TopKSAE]
) -> None:
    diff = measure(before, after, coders, questions)
    sums = torch.zeros(2, 64, dtype=torch.float64)
    for number, question in enumerate(questions):
        base, aligned, told = (hidden(one, question.ids(n)) for one, n in ((before, 0), (after, 0), (before, 2)))
        n, at, there = len(question.answer), len(question.prompts[0]) - 1, len(question.prompts[2]) - 1
        first, second, third = base[3][at : at + n], aligned[3][at : at + n], told[3][there : there + n]
        m, delta = (second - first).double(), third.double() - first.double()
        found = diff.moved[number]
        expected = float((m * delta).sum()), float((delta**2).sum())
        assert found["residual"][3]["answer"] == pytest.approx(expected, rel=1e-4)
        # a random change of the same size exchanges entries of top-k, as x2 does
        way = coders[3].encode(third).dense(64) - coders[3].encode(first).dense(64)
        assert found["random"][3]["answer"][1] == pytest.approx(float(way.square().sum()), rel=1e-4)
        # below the changed block nothing moves
        assert found["residual"][1]["answer"][0] == pytest.approx(0, abs=1e-6)
        sums += torch.stack([coders[3].encode(one).dense(64).mean(0).double() for one in (first, second)])
        assert question.evidence == [2]
    changes = diff.changes[3]["answer"]
    torch.testing.assert_close(torch.stack([changes.before, changes.after]), sums, rtol=1e-4, atol=1e-4)


def attended(backbone: Backbone, question: Reading) -> list[float]:
    """By layer that has attention, the AUC of the gold turn, from one forward by transformers alone."""
    backbone.model.set_attn_implementation("eager")
    with torch.no_grad():
        given = {"input_ids": question.ids(0)[None], "output_attentions": True, "use_cache": False}
        weights = backbone.model(**given).attentions
    backbone.model.set_attn_implementation("sdpa")
    found = []
    for one in weights:
        read = one[0, :, len(question.prompts[0]) - 1 :].mean((0, 1))[: len(question.turn)]
        means = [float(read[question.turn == turn].mean()) for turn in range(len(LINES))]
        found.append(sum(means[2] > other for other in means[:2] + means[3:]) / 5)
    return found


def test_attention_by_turn_is_that_of_one_forward(before: Any, after: Any, questions: Any, coders: Any) -> None:
    found = measure(before, after, coders, questions[1:2]).attention[0]
    assert found.tolist() == [pytest.approx(attended(one, questions[1])) for one in (before, after)]
    assert auc(torch.tensor([3.0, 1.0, 2.0, 2.0]), [2]) == pytest.approx((0 + 1 + 0.5) / 3)


def hybrid(tokenizer: Any, config: Any) -> Backbone:
    shape = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**shape, pad_token_id=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return Backbone("hybrid", model, tokenizer, None, "causal")


def test_layers_without_attention_have_no_figure(before: Backbone) -> None:
    """Two of four layers are convolutions: what the others attend to stands under their own numbers."""
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    settings = {"intermediate_size": 32, "num_key_value_heads": 1, "layer_types": kinds}
    mixed = hybrid(before.tokenizer, partial(Lfm2Config, **settings))
    asked, coder = readings(mixed, [record(0)]), TopKSAE(16, 32, 4).requires_grad_(False)
    diff = measure(mixed, mixed, {2: coder}, asked)
    assert set(figures_of(diff, resamples=10)["salience"]["attention"]) == {"2", "4", "mean"}
    assert diff.attention[0][1, [1, 3]].tolist() == pytest.approx(attended(mixed, asked[0]))
    # one whose attention is none of transformers' functions would be read wrongly
    old = hybrid(before.tokenizer, partial(FalconConfig, alibi=True))
    with pytest.raises(ModelError, match="no layer of hybrid has attention that can be read: set attention false"):
        measure(old, old, {2: coder}, asked)


def test_patches(before: Backbone, after: Backbone, questions: list[Reading], coders: dict[int, TopKSAE]) -> None:
    ids = questions[0].ids(0)
    donor, other = (one.hidden_states(ids[None], None, [1, 3]) for one in (before, after))
    # of one layer, features 5 and 9 alone
    edit = patches(coders, [(3, 9), (3, 5), (1, 2)], donor)
    wanted, current = (coders[3].encode(states[3]).dense(64) for states in (donor, other))
    expected = other[3] + sum((wanted - current)[..., j, None] * coders[3].W_dec[j] for j in (5, 9))
    torch.testing.assert_close(edit[3](other[3]), expected)
    untouched = answer_score(before, questions[0])
    assert answer_score(before, questions[0], patches(coders, [(3, 9)], donor)) == untouched
    # above the deepest layer the models are alike
    assert answer_score(after, questions[0], whole(donor)) == pytest.approx(untouched)


def test_the_command(tmp_path: Path, before: Backbone, after: Backbone, coders: Any, capsys: Any) -> None:
    for part in (after.model, before.tokenizer, before.processor):
        part.save_pretrained(tmp_path / "after")
    for layer, coder in coders.items():
        coder.save(layer_folder(tmp_path / "sae", layer))
    write_states(tmp_path / "states", [record(number) for number in range(3)])
    given = {"states": str(tmp_path / "states"), "sae": str(tmp_path / "sae"), "out": str(tmp_path / "out")}
    given |= {"before": "nano", "after": str(tmp_path / "after")}

    result = compare_models(CompareModelsConfig(**given, features=2, resamples=50))
    assert json.loads((tmp_path / "out" / "diff.json").read_text()) == result
    text, html = ((tmp_path / "out" / f"diff.{kind}").read_text() for kind in ("md", "html"))
    assert text.strip() in capsys.readouterr().out
    value = result["moved"]["residual"]["3"]["answer"]["value"]
    assert f"| 3 | answer | {value:.3f} [" in text
    assert f'<bdi dir="auto">{value:.3f} [' in html
    TopKSAE(16, 64, 8).save(layer_folder(tmp_path / "narrow", 1))
    write_states(tmp_path / "x0", [replace(record(number), x1=ABSENT, x2=ABSENT) for number in range(3)])
    (tmp_path / "file").write_text("")
    for changes, error, match in (
        ({"states": str(tmp_path / "x0")}, DataError, "x2"),
        ({"out": str(tmp_path / "file")}, ConfigError, "is a file; choose another out"),
        ({"out": given["out"]}, ConfigError, r"diff.json exists"),
        ({"split": "dev"}, DataError, "no question has a gold answer"),
        ({"sae": str(tmp_path / "narrow")}, ModelError, "reads hidden states of width 16"),
    ):
        with pytest.raises(error, match=match):
            compare_models(CompareModelsConfig(**{**given, "out": str(tmp_path / "none"), **changes}))
