"""The step on models of several families, its passes, what it keeps in memory, the shared prefix, fixed teachers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from cases import batch
from held import Held
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from remind import PRAConfig
from remind.alignment.arguments import rounding_optimizer
from remind.alignment.config import LoraConfig, Objective
from remind.alignment.examples import Example
from remind.alignment.model import check_head, trainable
from remind.alignment.objective import pra_loss
from remind.alignment.step import AlignmentModel, collate, memory_plan, most_memory, plan, run
from remind.core.errors import ModelError
from remind.models.backbone import inner_model
from remind.models.nano import nano_config

EXAMPLES = batch("prefix")[:3]


def step(made: Any, objective: Objective, sharing: bool = False, passes: Any = None) -> dict[str, Tensor]:
    """Gradients of one step over the examples."""
    samples = collate([(example, 1 / len(EXAMPLES)) for example in EXAMPLES])
    run(AlignmentModel(made, objective), samples, passes or plan(objective, sharing), lambda loss: loss.backward())
    found = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    return found


# models that do something to their logits, or are built in another way

_SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GPT: dict[str, Any] = {"vocab_size": 97, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    # dropout of 0.1 is GPT-2's default: with it in place nothing would agree
    "GPT2LMHeadModel": _GPT,
    "GPTJForCausalLM": _GPT | {"rotary_dim": 4},
    "Gemma2ForCausalLM": _SIZES | {"head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": None},
    "CohereForCausalLM": _SIZES | {"logit_scale": 0.3},
    "GraniteForCausalLM": _SIZES | {"logits_scaling": 4.0},
}
#: These do what `Head` knows nothing of.
REFUSED: dict[str, dict[str, Any]] = {
    "HyperCLOVAXForCausalLM": _SIZES | {"head_dim": 8, "logits_scaling": 4.0},
    "RecurrentGemmaForCausalLM": _SIZES | {"logits_soft_cap": 3.0, "lru_width": 16},
}


def family(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model of weights that give logits of some size."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    made = kind(kind.config_class(**(FAMILIES | REFUSED)[name])).to(dtype)
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, dtype=dtype)
    return made.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_whole_forwards(name: str) -> None:
    made: Any = trainable(family(name), None)
    losses = []
    for example in EXAMPLES:
        levels = []
        for prompt in example.prompts:
            logits = made(input_ids=torch.cat([prompt, example.answer]).long()[None], use_cache=False).logits[0]
            levels.append(logits[len(prompt) - 1 : -1])
        losses.append(pra_loss(*levels, example.answer.long()).total)
    torch.stack(losses).mean().backward()
    expected = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    found = step(made, Objective(chunk=3))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # several compute norms or attention in float32
        assert float((found[key] - value).abs().max()) <= 1e-6 * float(value.abs().max()), key


@pytest.mark.parametrize("name", [*FAMILIES, *REFUSED])
def test_a_model_that_does_more_to_its_logits_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} does more") if name in REFUSED else nullcontext():
        check_head(family(name, torch.bfloat16))


# passes and memory


@pytest.mark.parametrize("lora", [None, LoraConfig(r=8, alpha=16)], ids=["full", "lora"])
def test_the_plan_of_memory_is_what_a_step_holds_at_most(lora: LoraConfig | None) -> None:
    """On a Qwen3-VL whose head weighs against its blocks as that of the 8B model does against a few of its own."""
    shape = nano_config(hidden_size=128, layers=4, vision_size=16)
    shape.text_config.vocab_size = 16_384
    made = Qwen3VLForConditionalGeneration(shape).to(torch.float32 if lora is None else torch.bfloat16)
    args = PRAConfig("o", batch_size=1, gradient_checkpointing=True, use_cpu=True)
    made = trainable(made, lora)
    inner_model(made).gradient_checkpointing_enable({"use_reentrant": False})
    module, passes = AlignmentModel(made, Objective()), plan(Objective(), True)
    assert rounding_optimizer(args, made) is None
    adam = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-5)
    *prompts, answer = (torch.randint(0, 80, (n,), dtype=torch.int32) for n in (300, 310, 340, 40))
    samples = collate([(Example("q", tuple(prompts), answer), 1.0)])
    run(module, samples, passes, lambda loss: loss.backward())
    adam.step()
    adam.zero_grad()
    with Held() as held:
        moments = [value for state in adam.state.values() for value in state.values()]
        for tensor in (*made.parameters(), *moments):
            held.note(tensor.detach())
        run(module, samples, passes, lambda loss: loss.backward())
    assert most_memory(memory_plan(made, args, 380, 40)) == pytest.approx(held.most, rel=0.2)


# what x1 and x2 have in common, run once


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("MistralConfig", {"sliding_window": 8}),
        ("Qwen3_5TextConfig", {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
        ("FalconH1Config", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}),
    ],
)
def test_nothing_is_shared_past_windows_and_states(name: str, more: dict[str, Any], caplog: Any) -> None:
    """What they take in of the common prefix is not in any keys: the rest of x2 would not know of it."""
    config = getattr(transformers, name)(**_SIZES, **more)
    made = trainable(transformers.AutoModelForCausalLM.from_config(config), None)
    shared, apart = (step(made, Objective(), sharing=sharing) for sharing in (True, False))
    assert all(torch.allclose(shared[name], grad, atol=1e-7) for name, grad in apart.items())
    assert caplog.text.count("what x1 and x2 have in common is read twice") == 1
