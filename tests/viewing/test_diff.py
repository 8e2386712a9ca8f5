"""What training changed, against forwards done by hand; and patches of features between two models."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.inside import InsideConfig, _row, inside
from remind.core.errors import ConfigError, DataError, ModelError
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.models.backbone import Backbone, load_backbone
from remind.models.generate import generate
from remind.states.dataset import write_states
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import StateRecord, record_of
from remind.viewing.compare_models import compare_models
from remind.viewing.config import CompareModelsConfig
from remind.viewing.diff import Reading, auc, measure, questions_of, readings
from remind.viewing.patching import AnswerScore, answer_score, patches, score_and_states, whole
from sae import TopKSAE, layer_folder

LINES = ("we met at the river", "it was cold", "I keep a lamp there", "no idea", "they sold it", "tea would be nice")


def record(number: int) -> StateRecord:
    turns = tuple(
        Turn(f"d{number}-t{n}", "Ana" if n % 2 else "Ben", f"{line} {number}") for n, line in enumerate(LINES)
    )
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
    model = copy.deepcopy(before.model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.model.language_model.layers[1].parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return Backbone("after", model, before.tokenizer, before.processor, before.kind)


def saes(width: int) -> dict[int, TopKSAE]:
    made = {}
    for layer in (1, 3):
        made[layer] = TopKSAE(width, 64, 8, torch.Generator().manual_seed(layer)).requires_grad_(False)
    return made


@pytest.fixture(scope="module")
def questions(before: Backbone) -> list[Reading]:
    return readings(before, [record(number) for number in range(3)])


def hidden(backbone: Backbone, ids: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        out = backbone.model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    return tuple(state[0] for state in out.hidden_states)


def test_so_many_questions_of_each_dialogue(before: Backbone, tmp_path: Path) -> None:
    again = [replace(record(number % 3), question_id=f"q{number}") for number in (0, 3, 1, 4, 2, 5)]
    write_states(tmp_path, again)
    for limit, each, wanted in (
        (None, None, (0, 3, 1, 4, 2, 5)),
        (4, None, (0, 3, 1, 4)),
        (None, 1, (0, 1, 2)),
        (2, 1, (0, 1)),
    ):
        found = questions_of(before, str(tmp_path), "test", limit, each)
        assert [one.record.question_id for one in found] == [f"q{number}" for number in wanted]


def test_what_all_levels_share(before: Backbone, questions: list[Reading]) -> None:
    for question in questions:
        ends = [before.tokenizer.decode(prompt[-question.same :]) for prompt in question.prompts]
        assert len(set(ends)) == 1
        assert "which place?" in ends[0]
        # one token more is not the same
        assert len({int(prompt[-question.same - 1]) for prompt in question.prompts}) > 1
        ids = question.ids(0)
        at = question.positions("answer", 0)
        assert torch.equal(torch.cat([ids, question.answer[-1:].long()])[at + 1], question.answer.long())
        said = before.tokenizer.decode(ids[question.positions("dialogue", 0)])
        assert all(line in said for line in LINES)
        assert question.evidence == [2]


def test_shares_and_activations_are_those_of_forwards_by_hand(
    before: Backbone, after: Backbone, questions: list[Reading]
) -> None:
    coders = saes(before.hidden_size)
    diff = measure(before, after, coders, questions)
    sums = torch.zeros(2, 64, dtype=torch.float64)
    for number, question in enumerate(questions):
        base, told, aligned = (
            hidden(before, question.ids(0)),
            hidden(before, question.ids(2)),
            hidden(after, question.ids(0)),
        )
        length, there, n = len(question.prompts[0]), len(question.prompts[2]), len(question.answer)
        m = (aligned[3] - base[3])[length - 1 : length - 1 + n].double()
        delta = told[3][there - 1 : there - 1 + n].double() - base[3][length - 1 : length - 1 + n].double()
        dot, square = diff.moved[number]["residual"][3]["answer"]
        assert dot == pytest.approx(float((m * delta).sum()), rel=1e-4)
        assert square == pytest.approx(float((delta * delta).sum()), rel=1e-4)
        # a random change of the same size moves no stream on average, but exchanges entries of top-k, as x2 does
        where, way = slice(length - 1, length - 1 + n), coders[3].encode(told[3][there - 1 : there - 1 + n]).dense(64)
        way -= coders[3].encode(base[3][where]).dense(64)
        assert diff.moved[number]["random"][3]["answer"][1] == pytest.approx(float(way.square().sum()), rel=1e-4)
        assert diff.moved[number]["random"][3]["answer"][0] > 0
        # below the changed block nothing moves
        assert diff.moved[number]["residual"][1]["answer"][0] == pytest.approx(0, abs=1e-6)
        for place, states in enumerate((base, aligned)):
            sums[place] += coders[3].encode(states[3][length - 1 : length - 1 + n]).dense(64).mean(0).double()
    changes = diff.changes[3]["answer"]
    torch.testing.assert_close(torch.stack([changes.before, changes.after]), sums, rtol=1e-4, atol=1e-4)
    top = changes.top(3)
    assert [row["difference"] for row in top] == [pytest.approx(row["after"] - row["before"]) for row in top]
    assert changes.questions == 3


def test_attention_by_turn_is_that_of_one_forward(before: Backbone, after: Backbone, questions: list[Reading]) -> None:
    question = questions[1]
    # after a batch the model remembers offsets of three sequences
    generate(before, ["hello there"] * 3, 2)
    found = measure(before, after, saes(before.hidden_size), [question]).attention[0]
    assert found is not None
    ids = question.ids(0)[None]
    before.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = before.model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    finally:
        before.model.set_attn_implementation("sdpa")
    assert found.shape == (2, len(weights))
    for layer, one in enumerate(weights):
        read = one[0, :, len(question.prompts[0]) - 1 :].mean((0, 1))
        means = [float(read[: len(question.turn)][question.turn == turn].mean()) for turn in range(len(LINES))]
        others = means[:2] + means[3:]
        assert float(found[0, layer]) == pytest.approx(sum(means[2] > other for other in others) / 5)
    assert before.model.config._attn_implementation == "sdpa"


def test_a_model_compared_with_itself(before: Backbone, questions: list[Reading]) -> None:
    diff = measure(before, before, saes(before.hidden_size), questions)
    kinds = [found for one in diff.moved for layers in one.values() for found in layers.values()]
    assert all(dot == pytest.approx(0, abs=1e-6) for found in kinds for dot, _ in found.values())
    assert all(not changes.top(5) for kinds in diff.changes.values() for changes in kinds.values())
    assert all(one is not None and torch.equal(one[0], one[1]) for one in diff.attention)
    first, second = diff.fit[3]
    assert first.summary() == second.summary()


def test_auc() -> None:
    assert auc(torch.tensor([3.0, 1.0, 2.0, 2.0]), [2]) == pytest.approx((0 + 1 + 0.5) / 3)
    assert auc(torch.tensor([3.0, 1.0]), []) is None
    assert auc(torch.tensor([3.0]), [0]) is None


def test_patches(before: Backbone, after: Backbone, questions: list[Reading]) -> None:
    coders, ids = saes(before.hidden_size), questions[0].ids(0)
    donor = before.hidden_states(ids[None], None, [1, 3])
    other = after.hidden_states(ids[None], None, [1, 3])
    # of one layer, features 5 and 9 alone
    edit = patches(coders, [(3, 9), (3, 5), (1, 2)], donor)
    assert set(edit) == {1, 3}
    wanted, current = (coders[3].encode(states[3]).dense(64) for states in (donor, other))
    expected = other[3] + sum((wanted - current)[..., j, None] * coders[3].W_dec[j] for j in (5, 9))
    torch.testing.assert_close(edit[3](other[3]), expected)
    # the donor's own states are left alone
    torch.testing.assert_close(edit[3](donor[3]), donor[3])
    assert answer_score(before, questions[0], patches(coders, [(3, 9)], donor)) == answer_score(before, questions[0])
    # going on from the model's own states is the same forward
    score, own = score_and_states(after, questions[0], [1, 3])
    assert score == answer_score(after, questions[0])
    assert torch.equal(own[3], other[3])
    for given in (edit, {3: edit[3]}, {1: edit[1]}, whole(donor)):
        assert answer_score(after, questions[0], given, own) == answer_score(after, questions[0], given)


def states_folder(folder: Path, count: int = 3) -> Path:
    write_states(folder, [record(number) for number in range(count)], {"inputs": {"made.json": "0" * 64}})
    return folder


def settings(tmp_path: Path, before: Backbone, after: Backbone) -> dict[str, Any]:
    after.model.save_pretrained(tmp_path / "after")
    before.tokenizer.save_pretrained(tmp_path / "after")
    before.processor.save_pretrained(tmp_path / "after")
    for layer, coder in saes(before.hidden_size).items():
        coder.save(layer_folder(tmp_path / "sae", layer))
    states = states_folder(tmp_path / "states")
    return {"before": "nano", "after": str(tmp_path / "after"), "states": str(states), "sae": str(tmp_path / "sae")}


def test_the_commands(tmp_path: Path, before: Backbone, after: Backbone, capsys: pytest.CaptureFixture[str]) -> None:
    given = settings(tmp_path, before, after)
    result = compare_models(CompareModelsConfig(**given, out=str(tmp_path / "out"), features=2, resamples=50))
    assert json.loads((tmp_path / "out" / "diff.json").read_text()) == result
    assert (tmp_path / "out" / "diff.png").stat().st_size > 5000
    text = (tmp_path / "out" / "diff.md").read_text()
    assert text.strip() in capsys.readouterr().out
    value = result["moved"]["residual"]["3"]["answer"]["value"]
    assert f"| 3 | answer | {value:.3f} [" in text
    assert set(result["salience"]["attention"]) == {"1", "2", "3", "4", "mean"}
    assert len(result["features"]["3"]["question"]) == 2
    with pytest.raises(ConfigError, match=r"diff.json exists"):
        compare_models(CompareModelsConfig(**given, out=str(tmp_path / "out")))

    results = inside(InsideConfig(**given, out=str(tmp_path / "inside"), ks=(1, 64), draws=1, resamples=50))
    assert results["questions"] == 1
    rows = {(row["direction"], row["arm"], row["k"]): row["right"]["value"] for row in results["rows"]}
    assert {arm for _, arm, _ in rows} == {"", "changed", "largest", "random", "all features", "residual"}
    assert (tmp_path / "inside" / "patching.png").stat().st_size > 5000
    paired = {(row["direction"], row["k"], row["minus"]): row["right"]["value"] for row in results["paired"]}
    assert paired["rise", 64, "largest"] == rows["rise", "changed", 64] - rows["rise", "largest", 64]
    # the same run twice: twice as many questions, the same shares
    twice = {"after": [given["after"]] * 2, "states": [given["states"]] * 2}
    settings_of = {**given, **twice, "out": str(tmp_path / "both"), "ks": (1, 64), "draws": 1, "resamples": 50}
    both = inside(InsideConfig(**settings_of))
    assert both["questions"] == 2
    assert [row["right"]["value"] for row in both["rows"]] == list(rows.values())
    # the whole stream of layer 3 of 4 leaves one block of the recipient's own, so what it says differs from both ends
    chances = {(row["direction"], row["arm"]): row["log_probability"]["value"] for row in results["rows"]}
    assert max(chances.values()) < 0
    assert len(set(chances.values())) > 4
    with pytest.raises(ConfigError, match="2 models after, 1 states"):
        inside(InsideConfig(**{**settings_of, "states": given["states"]}))


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_the_share_of_the_way_whichever_way_it_leads(start: float) -> None:
    cfg = InsideConfig("nano", "a", "s", "f", "o", resamples=20)
    one, other = AnswerScore(start, -start - 1), AnswerScore(1 - start, start - 2)
    row = _row("fall", "changed", 1, [one, one, one, other], list("abcd"), cfg, ([one] * 4, [other] * 4))
    assert row["right_way"]["value"] == row["log_probability_way"]["value"] == 0.25


def test_what_cannot_be_compared(tmp_path: Path, before: Backbone, after: Backbone) -> None:
    given = settings(tmp_path, before, after)

    def fails(error: type[Exception], match: str, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            compare_models(CompareModelsConfig(**{**given, "out": str(tmp_path / "out"), **changes}))
        assert not (tmp_path / "out").exists()

    fails(DataError, "no question has a gold answer", split="dev")
    fails(ModelError, "no such|not found|does not exist|nowhere", after=str(tmp_path / "nowhere"))
    TopKSAE(16, 64, 8).save(layer_folder(tmp_path / "narrow", 1))
    narrow = {"sae": str(tmp_path / "narrow")}
    fails(ModelError, "reads hidden states of width 16, but those of nano are 128 wide", **narrow)
    with pytest.raises(ModelError, match="reads hidden states of width 16"):
        inside(InsideConfig(**{**given, **narrow}, out=str(tmp_path / "i")))
    tokenizer = copy.deepcopy(before.tokenizer)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "after")
    fails(ModelError, "have different tokenizers")
    states_folder(tmp_path / "one", 1)
    with pytest.raises(DataError, match="two are needed"):
        inside(InsideConfig(**{**given, "after": "nano", "states": str(tmp_path / "one")}, out=str(tmp_path / "i")))
