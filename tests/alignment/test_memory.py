"""The plan of a step's memory against the most that a step held, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from held import Held
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from remind import PRAConfig, PRATrainer
from remind.alignment.arguments import rounding_optimizer
from remind.alignment.config import LoraConfig, Objective
from remind.alignment.model import trainable
from remind.alignment.step import AlignmentModel, collate, memory_plan, plan, run
from remind.core.errors import ConfigError
from remind.models.backbone import inner_model


def large_vocabulary(dtype: torch.dtype) -> Any:
    """A Qwen3-VL whose head weighs against its blocks as that of the 8B model does against a few of its own."""
    text = {
        "vocab_size": 16_384, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 4,
    }  # fmt: skip
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "optim", "lora"),
    [
        (torch.float32, "adamw_torch", None),
        (torch.bfloat16, "adamw_torch_8bit", None),
        (torch.bfloat16, "adamw_torch", LoraConfig(r=8, alpha=16)),
    ],
    ids=["full", "8 bits", "lora"],
)
def test_the_plan_is_what_a_step_needs(
    dtype: torch.dtype, optim: str, lora: LoraConfig | None, make_examples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "8bit" in optim:
        pytest.importorskip("torchao", reason="torchao is not installed: nothing is trained in bfloat16")
        # compiled, it would take a minute longer
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    args = PRAConfig("o", optim=optim, batch_size=1, gradient_checkpointing=True, use_cpu=True)
    model: Any = trainable(large_vocabulary(dtype), lora)
    inner_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    module, passes = AlignmentModel(model, Objective()), plan(Objective(), True)
    kind, options = rounding_optimizer(args, model) or (torch.optim.AdamW, {"lr": 1e-5})
    adam = kind([p for p in model.parameters() if p.requires_grad], **options)
    (example,) = make_examples([(300, 310, 340, 40)])
    batch = collate([(example, 1.0)])
    run(module, batch, passes, lambda loss: loss.backward())
    adam.step()
    adam.zero_grad()
    planned = memory_plan(model, args, 380, 40)
    with Held() as held:
        moments = [value for state in adam.state.values() for value in state.values() if isinstance(value, Tensor)]
        for tensor in (*model.parameters(), *moments):
            parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
            for part in [getattr(tensor, name) for name in parts] or [tensor]:
                held.note(part.detach())
        run(module, batch, passes, lambda loss: loss.backward())
    assert planned.total() == pytest.approx(held.most, rel=0.2)
    # the head in float32, and its gradient, are no small part of it
    if dtype == torch.bfloat16:
        assert planned.parts["logits"] > 0.3 * planned.total()


def test_what_is_too_large_is_said_before_the_first_step(
    make_record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remind.core.memory.capacity", lambda _: 10**6)
    rows = [make_record(0)]
    with pytest.raises(ConfigError, match=r"^the run needs more memory than there is \(main memory: weights [^\n]*$"):
        PRATrainer("nano-untrained", PRAConfig(str(tmp_path), use_cpu=True), rows)
