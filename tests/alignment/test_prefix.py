"""Prefix sharing against separate forwards of x1 and x2, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from remind.alignment.config import Edge, LoraConfig, Objective, StepKind
from remind.alignment.model import checkpoint_activations, trainable
from remind.alignment.prefix import NAME
from remind.alignment.step import AlignmentModel, Pass, collate, common_prefix, plan, run
from remind.alignment.teachers import teach
from remind.alignment.tokens import Example
from remind.core.errors import ModelError

Gradients = dict[str, Tensor]
#: lengths of x0, the common prefix, the summary, the question and the answer
LENGTHS = [(14, 12, 5, 4, 4), (8, 3, 9, 2, 1), (6, 20, 1, 3, 7)]


def examples_of(lengths: list[tuple[int, ...]] = LENGTHS, image: bool = False, seed: int = 0) -> list[Example]:
    """x2 is x1 with a summary before the question."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> Tensor:
        return torch.randint(0, 80, (n,), generator=generator, dtype=torch.int32)

    made = []
    for number, (factual, common, summary, question, answer) in enumerate(lengths):
        block = torch.tensor([92, 90, 90, 90, 90, 93], dtype=torch.int32) if image and number != 1 else ids(0)
        x0, start, tail = torch.cat([ids(factual), block]), torch.cat([ids(3), block, ids(common)]), ids(question)
        # the first token of the summary is not that of the question
        reflection = torch.cat([(tail[:1] + 1) % 80, ids(summary - 1)])
        prompts = (x0, torch.cat([start, tail]), torch.cat([start, reflection, tail]))
        one = Example(f"q{number}", prompts, ids(answer))
        if len(block):
            pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
            shown = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
            # 16 patches, merged to 4 tokens
            object.__setattr__(one, "pixels", lambda shown=shown: shown)
        made.append(one)
    return made


def step(
    model: Any, examples: list[Example], objective: Objective, kind: StepKind = "sequential", sharing: bool = False
) -> tuple[dict[str, Tensor], Gradients]:
    batch = collate(examples, [1 / len(examples)] * len(examples))
    passes = plan(objective, kind, sharing)
    values = run(AlignmentModel(model, objective), batch, passes, lambda loss: loss.backward())
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return values, found


def assert_same(one: tuple[dict[str, Tensor], Gradients], other: tuple[dict[str, Tensor], Gradients]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            scale = float(b[name].abs().max())
            torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-9 * scale + 1e-14, msg=name)


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_shared_is_sequential_is_joint(make_model: Any, checkpointing: bool, image: bool) -> None:
    model = trainable(make_model(), None)
    if checkpointing:
        checkpoint_activations(model)
    examples, objective = examples_of(image=image), Objective(chunk=3)
    expected = step(model, examples, objective)
    assert float(expected[0]["jsd12"].min()) > 1e-4
    assert_same(step(model, examples, objective, sharing=True), expected)
    assert_same(step(model, examples, objective, "joint"), expected)
    assert_same(step(model, examples, objective, "joint", sharing=True), expected)


@pytest.mark.parametrize(
    "objective",
    [
        Objective(edges=(Edge(0, 1), Edge(0, 2, 1.0, 0.1), Edge(1, 2))),
        Objective(edges=(Edge(0, 1), Edge(0, 2))),
        Objective(edges=(Edge(0, 1), Edge(1, 2)), hard_levels=(0, 1)),
        Objective(edges=(Edge(0, 1), Edge(1, 2, gamma=0.0))),
        # here x2 learns, or x1 waits for x0, or x1 or x2 are not run: nothing is shared, and nothing changes
        Objective(hard_levels=(0, 2)),
        Objective(edges=(Edge(0, 2), Edge(1, 0))),
        Objective(edges=(Edge(0, 1), Edge(1, 0))),
        Objective(edges=(Edge(2, 1), Edge(1, 0)), hard_levels=(0, 1, 2)),
        Objective(edges=(), lambda_hard=1.0),
    ],
)
def test_shared_is_sequential_is_joint_for_any_edges(make_model: Any, objective: Objective) -> None:
    model = trainable(make_model(), None)
    expected = step(model, examples_of(), objective)
    for kind, sharing in (("sequential", True), ("joint", False), ("joint", True)):
        assert_same(step(model, examples_of(), objective, kind, sharing), expected)  # type: ignore[arg-type]


def test_with_adapters_and_checkpointing(make_model: Any) -> None:
    model = trainable(make_model(), LoraConfig(r=2, alpha=4))
    checkpoint_activations(model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
        elif "lora_A" in name:
            parameter.data = parameter.data.double()
    expected = step(model, examples_of(), Objective())
    assert all("lora" in name for name in expected[1])
    assert_same(step(model, examples_of(), Objective(), sharing=True), expected)


def test_an_image_after_the_common_prefix_is_not_shared(make_model: Any) -> None:
    model = trainable(make_model(), None)
    examples = examples_of(image=True)
    moved = []
    for example in examples:
        x0, x1, x2 = (p.clone() for p in example.prompts)
        x2[0] = (x2[0] + 1) % 80
        one = Example(example.id, (x0, x1, x2), example.answer)
        object.__setattr__(one, "pixels", example.pixels)
        moved.append(one)
    assert collate(moved, [1.0] * 3).common.tolist() == [0, 0, 0]
    assert_same(step(model, moved, Objective(), sharing=True), step(model, moved, Objective()))


def test_only_the_rest_of_x2_is_run(make_model: Any) -> None:
    model = trainable(make_model(), None)
    tokens: list[tuple[int, bool]] = []
    layer = model.model.language_model.layers[1]  # type: ignore[union-attr]
    layer.register_forward_hook(lambda _, args, out: tokens.append((args[0].shape[1], torch.is_grad_enabled())))  # type: ignore[union-attr]
    examples = examples_of(LENGTHS[:1])
    step(model, examples, Objective(), sharing=True)
    x0, x1 = (len(examples[0].prompts[level]) + 3 for level in (0, 1))
    assert tokens == [(x1, True), (5 + 4 + 3, False), (x0, True)]


def test_hidden_states_of_teachers_are_the_same_shared(make_model: Any) -> None:
    wrapped = AlignmentModel(trainable(make_model(), None), Objective())
    batch = collate(examples_of(), [1.0] * 3)
    plain, shared = teach(wrapped, batch, (1, 2)), teach(wrapped, batch, (1, 2), prefix_sharing=True)
    for level in (1, 2):
        torch.testing.assert_close(shared[level], plain[level], rtol=1e-10, atol=1e-12)
        assert not shared[level].requires_grad


def test_the_attention_is_put_back(make_model: Any) -> None:
    model = trainable(make_model(), None)
    config: Any = model.get_decoder().config  # type: ignore[operator]
    step(model, examples_of(), Objective(), sharing=True)
    assert config._attn_implementation == "sdpa"
    wrapped = AlignmentModel(model, Objective())
    broken = collate(examples_of(), [1.0] * 3)
    broken.input_ids[1][0, 0] = 10**6
    with pytest.raises(IndexError):
        wrapped.encode_shared(broken)
    assert config._attn_implementation == "sdpa"
    config._attn_implementation = "eager"
    with pytest.raises(ModelError, match="sdpa"):
        step(model, examples_of(), Objective(), sharing=True)
    assert config._attn_implementation != NAME


def test_attention_over_a_window_is_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(vocab_size=97, num_hidden_layers=1, sliding_window=8, **sizes)
    with pytest.raises(ModelError, match="sliding_window"):
        step(trainable(MistralForCausalLM(config).double(), None), examples_of(), Objective(), sharing=True)


def test_common_prefix_leaves_each_prompt_its_last_token() -> None:
    for one, other, expected in (
        ([1, 2, 3], [1, 2, 4, 3], 2), ([1, 2, 3], [1, 2, 3], 2), ([1, 2], [1, 2, 2, 2], 1),
        ([5], [5, 6], 0), ([1], [2], 0),
    ):  # fmt: skip
        assert common_prefix(torch.tensor(one), torch.tensor(other)) == expected


def test_the_shared_plan_is_two_passes() -> None:
    assert plan(Objective(), prefix_sharing=True) == (Pass((1, 2), True, True), Pass((0,), True))
    edges = Objective(edges=(Edge(0, 1), Edge(0, 2)))
    assert plan(edges, prefix_sharing=True) == (Pass((1, 2), False, True), Pass((0,), True))
    assert plan(Objective(target_grad="flow"), "joint", True) == (Pass((0, 1, 2), True),)
    assert plan(Objective(), "joint", True) == (Pass((0, 1, 2), True, True),)
    assert not any(one.shared for one in plan(Objective(hard_levels=(0, 1, 2)), prefix_sharing=True))
