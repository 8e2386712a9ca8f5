"""The plan of a step's memory against the most that a step held, tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from held import Held
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from remind.alignment.config import LoraConfig, Objective, TrainConfig, TrainerConfig
from remind.alignment.memory import memory_plan
from remind.alignment.model import checkpoint_activations, trainable
from remind.alignment.optim import make_optimizer
from remind.alignment.step import AlignmentModel, collate, plan, run


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
    ("dtype", "optimizer", "lora"),
    [
        (torch.float32, "adamw", None),
        (torch.bfloat16, "adamw8bit", None),
        (torch.bfloat16, "adamw", LoraConfig(r=8, alpha=16)),
    ],
    ids=["full", "8 bits", "lora"],
)
def test_the_plan_is_what_a_step_needs(dtype: torch.dtype, optimizer: Any, lora: LoraConfig | None, make_examples: Any):
    trainer = TrainerConfig(optimizer=optimizer, batch_size=1, gradient_checkpointing=True)
    cfg = TrainConfig("s", "o", lora=lora, dtype=str(dtype).removeprefix("torch."), trainer=trainer)  # type: ignore[arg-type]
    model = trainable(large_vocabulary(dtype), lora).train()
    checkpoint_activations(model)
    module, passes = AlignmentModel(model, Objective()), plan(Objective(), "sequential", True)
    adam = make_optimizer(module, optimizer, 1e-5, 0.0)
    (example,) = make_examples([(300, 310, 340, 40)])
    batch = collate([example], [1.0])
    run(module, batch, passes, lambda loss: loss.backward())
    adam.step()
    adam.zero_grad()
    planned = memory_plan(model, cfg, 380, 40)
    with Held() as held:
        moments = (value for state in adam.state.values() for value in state.values() if isinstance(value, Tensor))
        for tensor in (*model.parameters(), *moments):
            held.note(tensor.detach())
        run(module, batch, passes, lambda loss: loss.backward())
    assert planned.total() == pytest.approx(held.most, rel=0.1)
    # the head in float32, and its gradient, are no small part of it
    if dtype == torch.bfloat16:
        assert planned.parts["head"] > 0.3 * planned.total()
