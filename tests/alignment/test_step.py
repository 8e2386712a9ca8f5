"""The step on models of several families, its passes, what it keeps in memory, and the shared prefix."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from remind.alignment.config import Edge, Objective
from remind.alignment.examples import Example
from remind.alignment.model import check_head, trainable
from remind.alignment.objective import pra_loss
from remind.alignment.step import AlignmentModel, Pass, body_of, collate, head_of, plan, run
from remind.core.errors import ModelError

LENGTHS = [(5, 7, 9, 4), (8, 6, 12, 1), (3, 4, 5, 7)]
Gradients = dict[str, Tensor]


def gradients(model: Any) -> Gradients:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def step(
    model: Any, examples: list[Example], objective: Objective, sharing: bool = False, together: bool = False
) -> tuple[dict[str, Tensor], Gradients]:
    """Values and gradients of one step over the examples."""
    batch = collate([(example, 1 / len(examples)) for example in examples])
    passes = (Pass((0, 1, 2), True),) if together else plan(objective, sharing)
    values = run(AlignmentModel(model, objective), batch, passes, lambda loss: loss.backward())
    return values, gradients(model)


def brute_force(model: Any, examples: list[Example]) -> Gradients:
    """Of the mean of `pra_loss` over forwards of the whole model on one sample, without padding or positions."""
    losses = []
    for example in examples:
        levels = []
        for prompt in example.prompts:
            logits = model(input_ids=torch.cat([prompt, example.answer]).long()[None], use_cache=False).logits[0]
            levels.append(logits[len(prompt) - 1 :][: len(example.answer)])
        losses.append(pra_loss(*levels, example.answer.long()).total)
    torch.stack(losses).mean().backward()
    return gradients(model)


def assert_same(a: Gradients, b: Gradients, rtol: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    for name in a:
        atol = rtol * float(b[name].abs().max()) + 1e-14
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol, msg=name)


# models that do something to their logits, or are built in another way

_SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GPT: dict[str, Any] = {"vocab_size": 97, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # dropout of 0.1 is GPT-2's default: with it in place nothing would agree
    "GPT2LMHeadModel": (_GPT, {}),
    "GPTJForCausalLM": (_GPT, {"rotary_dim": 4}),
    "PhiForCausalLM": (_SIZES, {}),
    "Qwen3ForCausalLM": (_SIZES, {"head_dim": 8}),
    "Gemma2ForCausalLM": (_SIZES, {"head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": None}),
    "Gemma3ForCausalLM": (_SIZES, {"head_dim": 8, "final_logit_softcapping": None}),
    "CohereForCausalLM": (_SIZES, {"logit_scale": 0.3}),
    "GraniteForCausalLM": (_SIZES, {"logits_scaling": 4.0}),
    # these do what `Head` knows nothing of
    "HyperCLOVAXForCausalLM": (_SIZES, {"head_dim": 8, "logits_scaling": 4.0}),
    "RecurrentGemmaForCausalLM": (_SIZES, {"logits_soft_cap": 3.0, "lru_width": 16}),
}
REFUSED = ("HyperCLOVAXForCausalLM", "RecurrentGemmaForCausalLM")


def family(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model of weights that give logits of some size."""
    kind, (sizes, more) = getattr(transformers, name), FAMILIES[name]
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes, **more)).to(dtype)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, dtype=dtype)
    return model.eval()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_logits_and_gradients_are_those_of_the_model_itself(name: str, make_examples: Any) -> None:
    model: Any = trainable(family(name), None)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
        found = head_of(model).logits(body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0])
    assert float(logits.abs().max()) > 1
    torch.testing.assert_close(found, logits, rtol=1e-12, atol=1e-12)
    expected = brute_force(model, make_examples(LENGTHS))
    # several compute norms or attention in float32
    assert_same(step(model, make_examples(LENGTHS), Objective(chunk=3))[1], expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_does_more_to_its_logits_is_refused(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match=f"{name} does more") if name in REFUSED else nullcontext():
        check_head(family(name, dtype))


# passes


def test_the_papers_step_is_three_passes_one_of_them_without_gradient() -> None:
    assert plan(Objective()) == (Pass((2,), False), Pass((1,), True), Pass((0,), True))
    edges = (Edge(0, 1), Edge(0, 2))
    assert plan(Objective(edges=edges, teacher_model_kind="base")) == (Pass((0,), True),)
    # x2 only teaches and does so elsewhere; x1 learns
    assert set(plan(Objective(teacher_model_kind="ema"))) == {Pass((1,), True), Pass((0,), True)}
    assert plan(Objective(edges=())) == (Pass((0,), True),)
    assert plan(Objective(edges=(Edge(0, 1),))) == (Pass((1,), False), Pass((0,), True))


def test_the_shared_plan_is_two_passes() -> None:
    assert plan(Objective(), prefix_sharing=True) == (Pass((1, 2), True, True), Pass((0,), True))
    edges = Objective(edges=(Edge(0, 1), Edge(0, 2)))
    assert plan(edges, prefix_sharing=True) == (Pass((1, 2), False, True), Pass((0,), True))
    assert plan(Objective(target_grad="flow"), True) == (Pass((0, 1, 2), True),)
    assert not any(one.shared for one in plan(Objective(hard_levels=(0, 1, 2)), prefix_sharing=True))


def test_only_one_graph_lives_at_a_time(make_model: Any, make_examples: Any) -> None:
    """The step keeps no more for its backward passes than the widest single level does."""
    model, examples = trainable(make_model(), None), make_examples([(30, 30, 30, 5)])

    def peak(objective: Objective, together: bool = False) -> int:
        alive, most = 0, 0

        class Saved:
            def __init__(self, value: Tensor) -> None:
                nonlocal alive, most
                self.value, self.size = value, value.numel()
                alive += self.size
                most = max(most, alive)

            def __del__(self) -> None:
                nonlocal alive
                alive -= self.size

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.value):
            step(model, examples, objective, together=together)
        return most

    fine_tuning = peak(Objective(edges=(), lambda_hard=1.0))
    assert peak(Objective()) < 1.1 * fine_tuning
    assert peak(Objective(), together=True) > 1.8 * fine_tuning


# what x1 and x2 have in common, run once


@pytest.fixture
def alike(make_examples: Callable[..., list[Example]]) -> list[Example]:
    """x1 and x2 begin with 12 and with 20 tokens alike, and have 5 and 1 more in x2 before 4 and 3 at the end."""
    made = []
    for example, summary, question in zip(make_examples([(14, 16, 9, 4), (6, 23, 4, 7)]), (5, 1), (4, 3), strict=True):
        x0, x1, other = example.prompts
        other[0] = (x1[-question] + 1) % 80
        made.append(
            Example(example.id, (x0, x1, torch.cat([x1[:-question], other[:summary], x1[-question:]])), example.answer)
        )
    return made


def test_the_attention_is_put_back(make_model: Any, alike: list[Example]) -> None:
    model: Any = trainable(make_model(), None)
    config = model.get_decoder().config
    step(model, alike, Objective(), sharing=True)
    assert config._attn_implementation == "sdpa"
    broken = collate([(example, 1.0) for example in alike])
    broken.input_ids[1][0, 0] = 10**6
    with pytest.raises(IndexError):
        AlignmentModel(model, Objective()).encode_shared(broken)
    assert config._attn_implementation == "sdpa"
    config._attn_implementation = "eager"
    with pytest.raises(ModelError, match="sdpa"):
        step(model, alike, Objective(), sharing=True)
    assert config._attn_implementation == "eager"


def test_attention_over_a_window_is_refused(alike: list[Example]) -> None:
    config = transformers.MistralConfig(**_SIZES, sliding_window=8)
    model = trainable(transformers.MistralForCausalLM(config).double(), None)
    with pytest.raises(ModelError, match="sliding_window"):
        step(model, alike, Objective(), sharing=True)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Qwen3_5TextConfig", {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
        ("FalconH1Config", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}),
        ("MiniMaxConfig", {"head_dim": 8, "num_local_experts": 2, "block_size": 16}),
    ],
)
def test_layers_that_carry_a_state_are_refused(name: str, more: dict[str, Any], alike: list[Example]) -> None:
    """What they take in of the common prefix is not in any keys: the rest of x2 would not know of it."""
    config = getattr(transformers, name)(**_SIZES, **more)
    model = trainable(transformers.AutoModelForCausalLM.from_config(config), None)
    with pytest.raises(ModelError, match="prefix_sharing false"):
        step(model, alike, Objective(), sharing=True)
    step(model, alike, Objective())
