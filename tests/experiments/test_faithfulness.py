"""Removal, sufficiency and ablation against brute force, and a model that is known to copy one turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.faithfulness.ablation import ablated_logprob, guidance_features
from experiments.faithfulness.config import FaithfulnessConfig
from experiments.faithfulness.logprob import answer_logprobs, target_ids
from experiments.faithfulness.report import summarise
from experiments.faithfulness.run import faithfulness, faithfulness_and_show
from experiments.faithfulness.turns import fill, marked_turns, only_turns, without_turns
from remind.alignment.examples import example_of
from remind.core.errors import ConfigError, DataError, ModelError
from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.evaluation.statistics import bootstrap
from remind.grounding import Grounder, GroundingConfig
from remind.grounding.codes import SparseEncoder
from remind.models.backbone import Backbone, load_backbone
from remind.models.chat import prompt_ids
from remind.models.nano import VOCAB_SIZE, nano_model, nano_tokenizer, save_nano
from remind.states import dataset
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy, render
from remind.states.records import StateRecord, record_of
from remind.viewing.turns import answer_tokens, evidence_turns, prompt_of
from sae import TopKSAE, layer_folder
from sae.hooks import edited

WORD = " garden"
LINES = (
    "we met at the river", "it was cold that day", "I keep a lamp there", "no idea about that",
    "they sold the house", "we never went back", "tea would be nice", "see you on Monday",
)  # fmt: skip


def state(number: int = 0, secret: int | None = 2, first: str = LINES[0]) -> FactualState:
    """Two sessions of four turns each; x0 holds turns 0, 2 and 3 of the first and the second without its first."""
    said = [f"{line}{WORD}" if place == secret else line for place, line in enumerate((first, *LINES[1:]))]
    shown = {6: (Image(0, caption="a red boat"),)}
    turns = tuple(
        Turn(f"d{number}-t{n}", "Ana" if n % 2 else "Ben", text, images=shown.get(n, ())) for n, text in enumerate(said)
    )
    dialogue = Dialogue(f"d{number}", (Session("s1", "1 May", turns[:4]), Session("s2", "2 May", turns[4:])))
    evidence = () if secret is None else (f"d{number}-t{secret}",)
    question = Question(f"q{number}", dialogue.id, "which place?", answers=("the place",), evidence=evidence)
    strategy = Strategy(("find the place",), entities=("place",))
    return FactualState(dialogue, question, (Segment(0, 0), Segment(2, 3), Segment(5, 7)), strategy)


def record(
    number: int = 0, secret: int | None = 2, blocks: tuple[tuple[int, int], ...] = ((1, 1),), **changes: Any
) -> StateRecord:
    """x0 holds dialogue turns 0, 2, 3, 5, 6, 7; blocks count within these."""
    made = record_of(ReflectiveState(AttentionalState(state(number, secret), blocks), "so"), "test")
    return replace(made, **changes)


def write_states(folder: Path, records: Sequence[StateRecord]) -> Path:
    grounding = {"alpha": 6.0, "idf": "dialogue"}
    dataset.write_states(folder, records, {"inputs": {"made.json": "0" * 64}, "config": {"grounding": grounding}})
    return folder


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return Backbone("nano", nano_model().double(), nano_tokenizer(), None, "vlm")


def test_removal_deletes_the_turns_and_nothing_else() -> None:
    x0 = record().x0
    head, tail = x0.text.split("[Session 1, 1 May]\n")[0], x0.text[x0.dialogue[1] :]
    first = "[Session 1, 1 May]\nBen: we met at the river\n[…]\n"
    expected = f"{first}[Session 2, 2 May]\nAna: we never went back\nAna: see you on Monday\n"
    # turn 6 goes with its caption; the gap line before turn 2 stays though no turn follows it in its session
    assert without_turns(x0, [1, 2, 4]) == only_turns(x0, [0, 3, 5]) == head + expected + tail
    assert only_turns(x0, []) == head + "[Session 1, 1 May]\n[…]\n[Session 2, 2 May]\n" + tail
    assert without_turns(x0, []) == only_turns(x0, range(6)) == x0.text


def test_marked_turns_are_those_of_the_blocks_and_evidence_those_annotated_or_with_the_image() -> None:
    assert marked_turns(record(blocks=())) == []
    assert marked_turns(record(blocks=((0, 0), (3, 4)))) == [0, 3, 4]
    assert marked_turns(record(blocks=((1, 2), (5, 5)))) == [1, 2, 5]
    assert evidence_turns(record(secret=3)) == [2]
    assert evidence_turns(record(secret=1)) == []  # not retrieved
    assert evidence_turns(record(visual=True, images=(0,), images_found=(0,))) == [4]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 200), st.randoms(use_true_random=False))
def test_fill_takes_what_fits_and_then_what_comes_nearer(sizes: list[int], budget: int, dice: Any) -> None:
    order = list(range(len(sizes)))
    dice.shuffle(order)
    chosen = fill(order, sizes, budget)
    assert chosen == sorted(set(chosen))
    left = [size for turn, size in enumerate(sizes) if turn not in chosen]
    total = sum(sizes[turn] for turn in chosen)
    if total <= budget:
        assert all(total + size - budget >= budget - total for size in left)
        assert not any(total + size <= budget for size in left)
    else:
        joined = [sizes[turn] for turn in chosen if total - sizes[turn] <= budget]
        assert any(total - budget < budget - (total - size) and all(size <= other for other in left) for size in joined)
    fitting = next((turn for turn in order if sizes[turn] <= budget), None)
    assert fitting is None or fitting in chosen


@pytest.mark.parametrize("template", ["own", "none", "trims"])
@pytest.mark.parametrize("said", ["tea would be nice", "<|im_end|> is written här", "  two  spaces 🙂"])
def test_every_token_is_found_in_its_turn(template: str, said: str) -> None:
    tokenizer = nano_tokenizer()
    if template == "none":
        tokenizer.chat_template = None
    elif template == "trims":
        tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
    rendered = render(state(first=said))
    prompt = prompt_of(tokenizer, rendered)
    assert prompt.ids == prompt_ids(tokenizer, rendered.text)
    for index, turn in enumerate(rendered.turns):
        ids = [token for token, place in zip(prompt.ids, prompt.turn.tolist(), strict=True) if place == index]
        assert tokenizer.decode(ids) == rendered.text[turn.start : turn.end]
    assert prompt.sizes == [int((prompt.turn == n).sum()) for n in range(6)]
    outside = [token for token, place in zip(prompt.ids, prompt.turn.tolist(), strict=True) if place == -1]
    left = without_turns(rendered, range(6))
    assert left.strip() in tokenizer.decode(outside)


def test_target_tokens_are_those_of_training() -> None:
    tokenizer, item = nano_tokenizer(), record()
    ids = target_ids(tokenizer, str(item.target))
    assert ids == example_of(tokenizer, item).answer.tolist()
    inside = answer_tokens(tokenizer, str(item.target))
    assert len(inside) == len(ids)
    text = tokenizer.decode([token for token, chosen in zip(ids, inside, strict=True) if chosen])
    assert "the place" in text
    assert len(text) <= len(">the place<")


def by_hand(model: Any, prompt: list[int], target: list[int]) -> torch.Tensor:
    """Log-probabilities from one plain forward over everything."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *target]])).logits[0]
    return torch.stack([torch.log_softmax(logits[len(prompt) + n - 1], -1)[token] for n, token in enumerate(target)])


def test_log_probability_is_that_of_a_plain_forward(nano: Backbone) -> None:
    item = record()
    target = target_ids(nano.tokenizer, str(item.target))
    texts = [item.x0.text, without_turns(item.x0, [1]), only_turns(item.x0, [1]), "short"]
    prompts = [prompt_ids(nano.tokenizer, text) for text in texts]
    expected = torch.stack([by_hand(nano.model, prompt, target) for prompt in prompts])
    rows: list[int] = []
    handle = nano.model.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[1]))
    for size in (1, 3):
        values = answer_logprobs(nano, prompts, target, size)
        torch.testing.assert_close(torch.stack(values), expected, rtol=0, atol=1e-10)
        assert values[0].dtype == torch.float64
    handle.remove()
    assert set(rows) == {len(target)}  # the head ran at the answer alone
    with pytest.raises(DataError, match=r"40000 \+ 1 tokens, but nano takes 32768"):
        answer_logprobs(nano, [[5] * 40000], [6])


def copier() -> Backbone:
    """One block without MLP, one head that looks for the token `WORD` wherever it stands and adds it to the stream.

    Dimension 0 of every embedding is 1, so that every query asks for the same; the key is in dimension 31, whose rotary
    frequency is about 0.
    """
    tokenizer = nano_tokenizer()
    (word,) = tokenizer(WORD)["input_ids"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=512, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e30},
    )).eval()  # fmt: skip
    tokens = F.normalize(torch.randn(VOCAB_SIZE, 63, generator=torch.Generator().manual_seed(1)), dim=-1)
    block = model.model.layers[0]
    attention = block.self_attn
    for part in (attention.q_proj, attention.k_proj, block.mlp.down_proj):
        part.weight.data.zero_()
    constant = torch.ones(VOCAB_SIZE, 1)
    model.model.embed_tokens.weight.data = torch.cat([constant, tokens], -1)
    model.lm_head.weight.data = torch.cat([0 * constant, tokens], -1)
    attention.q_proj.weight.data[31, 0] = 3.0
    attention.k_proj.weight.data[31, 1:] = tokens[word]
    for part in (attention.v_proj, attention.o_proj):
        part.weight.data = torch.eye(64)
        part.weight.data[0, 0] = 0
    return Backbone("copier", model, tokenizer, None, "causal")


def test_the_measurement_finds_the_copied_turn_and_clears_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone = copier()
    backbone.model.save_pretrained(tmp_path / "copier")
    backbone.tokenizer.save_pretrained(tmp_path / "copier")
    place = {0: 0, 2: 1, 3: 2, 5: 3, 6: 4, 7: 5}
    target = f"<answer>{WORD}</answer>"
    right = [record(n, s, ((place[s], place[s]),), target=target) for n, s in enumerate((0, 2, 3, 5, 6, 7))]
    wrong = [record(n, s, ((place[s - 1], place[s - 1]),), target=target) for n, s in enumerate((3, 6, 7))]
    results = {}
    for name, records in (("right", right), ("wrong", wrong)):
        folder = write_states(tmp_path / name, records)
        cfg = FaithfulnessConfig(str(folder), str(tmp_path / "copier"), str(tmp_path / f"{name}-out"), draws=3)
        results[name] = faithfulness(cfg)
    removed = results["right"]["methods"]["removed"]
    assert removed["marked"]["answer"]["high"] < -1
    assert abs(removed["random"]["answer"]["value"]) < 0.2
    assert results["right"]["paired"]["removed"]["answer"]["high"] < -1
    assert results["right"]["paired"]["kept"]["answer"]["low"] > 1
    assert removed["evidence"]["answer"]["value"] == pytest.approx(removed["marked"]["answer"]["value"], abs=0.2)
    assert abs(results["wrong"]["methods"]["removed"]["marked"]["answer"]["value"]) < 0.2
    assert results["wrong"]["methods"]["removed"]["evidence"]["answer"]["value"] < -1
    faithfulness_and_show(replace(cfg, overwrite=True))
    assert "turns removed" in capsys.readouterr().out


@pytest.mark.parametrize("corpus", [False, True])
def test_guidance_features_are_those_of_grounding(corpus: bool) -> None:
    nano = load_backbone("nano")
    coders = {n: TopKSAE(128, 256, 8, generator=torch.Generator().manual_seed(n)) for n in (2, 3)}
    config = GroundingConfig(context_codes="joint")
    idf = {n: torch.rand(256, generator=torch.Generator().manual_seed(n)) for n in coders} if corpus else None
    trace = Grounder(nano, coders, idf, config).trace(state())
    encoder = SparseEncoder(nano, coders, config.sink_ratio, 1)
    for count in (5, None):
        found = guidance_features(encoder, record().x0, config, idf or {}, count)
        for layer in coders:
            expected = [feature for feature, _ in trace.guiding_features(layer, count or 256)]
            assert found[layer] == expected
            assert expected


def test_ablation_takes_the_features_out_on_those_tokens_alone(nano: Backbone) -> None:
    coders = {n: TopKSAE(128, 256, 8, generator=torch.Generator().manual_seed(n)).double() for n in (2, 3)}
    prompt, target = prompt_of(nano.tokenizer, record().x0), [7, 8, 9]
    features = {2: list(range(0, 256, 2)), 3: [1, 5, 9], 4: []}
    ids = torch.tensor([[*prompt.ids, *target[:-1]]])
    places = torch.zeros(ids.shape[1], dtype=torch.bool)
    for turn in (1, 4):
        places[: len(prompt.ids)] |= prompt.turn == turn

    def without(layer: int) -> Any:
        def edit(h: torch.Tensor) -> torch.Tensor:
            codes, out = coders[layer].encode(h[0]), h.clone()
            for token in places.nonzero().flatten().tolist():
                for value, feature in zip(codes.values[token], codes.indices[token].tolist(), strict=True):
                    if feature in features[layer]:
                        out[0, token] -= value * coders[layer].W_dec[feature]
            return out

        return edit

    with edited(nano.model, {2: without(2), 3: without(3)}), torch.no_grad():
        logits = nano.model(input_ids=ids).logits[0, -3:]
    expected = torch.log_softmax(logits, -1)[torch.arange(3), torch.tensor(target)]
    found = ablated_logprob(nano, coders, features, prompt, [1, 4], target)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    (plain,) = answer_logprobs(nano, [prompt.ids], target)
    assert not torch.equal(found, plain)
    for nothing in (({2: []}, [1]), (features, [])):
        value = ablated_logprob(nano, coders, nothing[0], prompt, nothing[1], target)
        torch.testing.assert_close(value, plain, rtol=0, atol=1e-12)


def test_summary_is_mean_interval_and_paired_difference() -> None:
    def change(value: float) -> dict[str, float]:
        return {"sum": value, "per_token": value / 2, "answer": 0.0, "tokens": 10}

    rows: list[dict[str, Any]] = [
        {
            "logprob": change(-5.0),
            "changes": {"removed": {"marked": change(marked), "random": change(random)}},
            "tokens": {"marked": 10, "turns": 40},
        }
        for marked, random in ((-3, -1), (-4, 0), (-2, -1.5))
    ]
    result = summarise(rows, 200, 3)
    assert result["methods"]["removed"]["marked"]["sum"] == bootstrap([-3, -4, -2], 200, 3)
    assert result["paired"]["removed"]["sum"] == bootstrap([-2, -4, -0.5], 200, 3)
    assert result["paired"]["removed"]["per_token"]["value"] == pytest.approx(-6.5 / 6)
    assert (result["marked_share"]["value"], result["logprob"]["sum"]["value"]) == (0.25, -5)
    assert list(result["methods"]) == ["removed"]


def test_left_out_questions_are_counted_and_nothing_is_half_written(tmp_path: Path) -> None:
    records = [
        record(0),
        record(1, blocks=()),
        record(2, blocks=((0, 0), (1, 2), (3, 5))),
        record(3, target=None),
        record(4, target="word " * 40000),
    ]
    folder = write_states(tmp_path / "states", records)
    out = tmp_path / "out"
    cfg = FaithfulnessConfig(str(folder), "nano", str(out), draws=2)
    with pytest.raises(DataError, match=r"\[q4\]: prompt and answer of"):
        faithfulness(cfg)
    assert not out.exists()
    result = faithfulness(replace(cfg, on_long="skip"))
    assert result["counts"]["measured"] == 1
    assert result["left_out"] == {"no_marks": ["q1"], "few_unmarked": ["q2"], "no_target": ["q3"], "too_long": ["q4"]}
    with pytest.raises(ConfigError, match="overwrite"):
        faithfulness(cfg)
    with pytest.raises(DataError, match="none of 1 questions can be measured: 1 without marked turns"):
        faithfulness(replace(cfg, states=str(write_states(tmp_path / "bare", records[1:2])), out=str(tmp_path / "o2")))
    with pytest.raises(DataError, match="no states of split 'dev'"):
        faithfulness(replace(cfg, split="dev", out=str(tmp_path / "o2")))
    with pytest.raises(ModelError, match="encoder"):
        faithfulness(replace(cfg, model="minilm", out=str(tmp_path / "o2")))
    TopKSAE(64, 128, 4).save(layer_folder(tmp_path / "sae", 2))
    for folder_of_sae, message in ((tmp_path / "sae", "hidden states of 64"), (tmp_path / "none", "holds no SAE")):
        with pytest.raises(ModelError, match=message):
            faithfulness(replace(cfg, sae=str(folder_of_sae), out=str(tmp_path / "o2")))
    assert not (tmp_path / "o2").exists()
    for wrong in ({"draws": 0}, {"backbone": "nano"}):
        with pytest.raises(ConfigError):
            replace(cfg, **wrong)


def test_a_run_with_ablation_on_nano(tmp_path: Path) -> None:
    nano = save_nano(tmp_path / "nano")
    TopKSAE(128, 256, 8, generator=torch.Generator().manual_seed(0)).save(layer_folder(tmp_path / "sae", 2))
    records = [record(0), record(1, blocks=((2, 2), (4, 4)))]
    states, sae = write_states(tmp_path / "states", records), str(tmp_path / "sae")
    cfg = FaithfulnessConfig(str(states), str(nano), str(tmp_path / "a"), sae=sae, draws=2, bootstrap=50)
    first = faithfulness(cfg)
    second = faithfulness(replace(cfg, out=str(tmp_path / "b"), batch_size=1))
    assert set(first["methods"]) == {"removed", "kept", "ablated"}
    assert json.loads((tmp_path / "a" / "result.json").read_text()) == json.loads(json.dumps(first))
    assert (tmp_path / "a" / "faithfulness.png").read_bytes()[:4] == b"\x89PNG"
    rows = [json.loads(line) for line in (tmp_path / "a" / "questions.jsonl").read_text().splitlines()]
    assert len(rows) == first["counts"]["measured"] == first["counts"]["dialogues"] == 2
    backbone = load_backbone(str(nano))
    for row, item in zip(rows, records, strict=True):
        target, turns = target_ids(backbone.tokenizer, str(item.target)), marked_turns(item)
        assert [item.x0.turns[turn].turn_id for turn in turns] == row["turns"]["marked"]
        before, after = (
            by_hand(backbone.model, prompt_ids(backbone.tokenizer, text), target).sum()
            for text in (item.x0.text, without_turns(item.x0, turns))
        )
        assert row["changes"]["removed"]["marked"]["sum"] == pytest.approx(float(after - before), abs=1e-3)
        assert row["changes"]["removed"]["random"]["tokens"] == pytest.approx(row["tokens"]["marked"], rel=0.5)
    for kind, methods in first["methods"].items():
        for name, method in methods.items():
            assert second["methods"][kind][name]["sum"]["value"] == pytest.approx(method["sum"]["value"], abs=1e-3)
    assert first["hashes"]["model"] == second["hashes"]["model"]
    assert set(first["hashes"]["sae"]) == {"layer_02"}
