"""The step against one-sample forwards of the whole model, without padding, and the contract's `pra_loss`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from remind.alignment.config import Edge, LoraConfig, Objective, StepKind
from remind.alignment.model import checkpoint_activations, head_weight, trainable
from remind.alignment.objective import HiddenTeacher, pra_loss
from remind.alignment.step import AlignmentModel, Pass, collate, common_prefix, plan, run
from remind.alignment.teachers import teach
from remind.alignment.tokens import Example
from remind.core.errors import ConfigError, ModelError

LENGTHS = [(5, 7, 9, 4), (8, 6, 12, 1), (3, 4, 5, 7)]
Gradients = dict[str, Tensor]


def gradients(model: Any) -> Gradients:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def step(
    model: Any, examples: list[Example], objective: Objective, kind: StepKind = "sequential", sharing: bool = False
) -> tuple[dict[str, Tensor], Gradients]:
    """Values and gradients of one step over the examples."""
    batch = collate(examples, [1 / len(examples)] * len(examples))
    values = run(AlignmentModel(model, objective), batch, plan(objective, kind, sharing), lambda loss: loss.backward())
    return values, gradients(model)


def answer_logits(model: Any, example: Example, level: int) -> Tensor:
    """[L, V] by one forward over prompt and whole answer, no padding, positions left to the model."""
    ids = torch.cat([example.prompts[level], example.answer]).long()[None]
    start = len(example.prompts[level]) - 1
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits[start : start + len(example.answer)]


def brute_force(model: Any, examples: list[Example], target_grad: Any = "detach") -> tuple[list[Any], Gradients]:
    losses = []
    for example in examples:
        levels = [answer_logits(model, example, level) for level in range(3)]
        losses.append(pra_loss(*levels, example.answer.long(), target_grad=target_grad))
    torch.stack([loss.total for loss in losses]).mean().backward()
    return losses, gradients(model)


def assert_same(a: Gradients, b: Gradients, rtol: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    for name in a:
        atol = rtol * float(b[name].abs().max()) + 1e-14
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol, msg=name)


@pytest.fixture
def model(make_model: Any) -> Any:
    return trainable(make_model(), None)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kind", ["sequential", "joint"])
def test_a_step_is_the_mean_of_pra_loss_over_samples(
    make_model: Any, make_examples: Any, kind: StepKind, tie: bool
) -> None:
    model = trainable(make_model(tie=tie), None)
    examples = make_examples(LENGTHS)
    losses, expected = brute_force(model, examples)
    values, found = step(model, examples, Objective(chunk=3), kind)
    for name in ("dist01", "dist12", "jsd01", "jsd12"):
        torch.testing.assert_close(values[name], torch.stack([getattr(loss, name).detach() for loss in losses]))
    torch.testing.assert_close(values["hard0"], torch.stack([loss.hard.detach() for loss in losses]))
    assert_same(found, expected)


def test_flow_needs_the_joint_step_and_differs(model: Any, make_examples: Any) -> None:
    examples = make_examples(LENGTHS)
    flow = Objective(target_grad="flow")
    _, expected = brute_force(model, examples, "flow")
    _, found = step(model, examples, flow, "joint")
    assert_same(found, expected)
    _, detached = step(model, examples, Objective(), "joint")
    assert not torch.allclose(found["lm_head.weight"], detached["lm_head.weight"])
    with pytest.raises(ConfigError, match="joint"):
        plan(flow, "sequential")


def test_the_papers_step_is_three_passes_one_of_them_without_gradient() -> None:
    assert plan(Objective()) == (Pass((2,), False), Pass((1,), True), Pass((0,), True))
    edges = (Edge(0, 1), Edge(0, 2))
    assert plan(Objective(edges=edges, teacher_weights="base")) == (Pass((0,), True),)
    assert plan(Objective(edges=())) == (Pass((0,), True),)
    assert plan(Objective(edges=(Edge(0, 1),))) == (Pass((1,), False), Pass((0,), True))
    with pytest.raises(ConfigError, match="nothing is trained"):
        plan(Objective(lambda_hard=0.0, edges=()))


def test_equal_contexts_have_no_distance_even_in_a_batch(make_model: Any, make_examples: Any) -> None:
    model = trainable(make_model(dtype=torch.float32), None)
    equal = [Example(e.id, (e.prompts[0],) * 3, e.answer) for e in make_examples(LENGTHS)]
    values, _ = step(model, equal, Objective())
    for name in ("dist01", "dist12", "jsd01", "jsd12"):
        assert float(values[name].abs().max()) == 0.0


def test_positions_are_given_and_equal_on_the_three_axes(model: Any, make_examples: Any) -> None:
    seen: list[Tensor] = []
    hook = model.model.register_forward_pre_hook(lambda _, __, kw: seen.append(kw["position_ids"]), with_kwargs=True)
    batch = collate(make_examples(LENGTHS), [1.0] * 3)
    AlignmentModel(model, Objective()).encode(batch, 2)
    hook.remove()
    (positions,) = seen
    length = batch.input_ids[2].shape[1]
    assert torch.equal(positions, torch.arange(length).expand(3, 3, length))


def test_only_one_graph_lives_at_a_time(model: Any, make_examples: Any) -> None:
    """The sequential step keeps no more for its backward passes than the widest single level does."""
    examples = make_examples([(30, 30, 30, 5)])

    def peak(objective: Objective, kind: StepKind) -> int:
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
            step(model, examples, objective, kind)
        return most

    fine_tuning = peak(Objective(edges=(), lambda_hard=1.0), "sequential")
    assert peak(Objective(), "sequential") < 1.1 * fine_tuning
    assert peak(Objective(), "joint") > 1.8 * fine_tuning


def test_a_model_without_multimodal_positions(make_examples: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=64, n_embd=16, n_layer=2, n_head=2)).double()
    model = trainable(gpt, None)
    examples = make_examples(LENGTHS)
    # dropout of 0.1 is GPT-2's default: with it in place the two would differ
    _, expected = brute_force(model, examples)
    for sharing in (False, True):
        _, found = step(model, examples, Objective(), sharing=sharing)
        assert_same(found, expected)


# teachers that are not the live model


def moved_copy(model: Any) -> Any:
    """The model after some training: the same but for noise."""
    generator = torch.Generator().manual_seed(9)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return other


def test_ema_teachers_stand_for_levels_that_also_run(make_model: Any, make_examples: Any) -> None:
    average = trainable(make_model(), None)
    model = moved_copy(average)
    examples = make_examples(LENGTHS)
    batch = collate(examples, [1 / 3] * 3)
    objective = Objective(teacher_weights="ema")
    # x2 only teaches and does so elsewhere; x1 learns
    assert set(plan(objective)) == {Pass((1,), True), Pass((0,), True)}
    head = head_weight(average).detach().clone()
    fixed = {k: HiddenTeacher(h, head) for k, h in teach(AlignmentModel(average, objective), batch, (1, 2)).items()}
    run(AlignmentModel(model, objective), batch, plan(objective), lambda loss: loss.backward(), fixed=fixed)
    found = gradients(model)
    for example in examples:
        z = {level: answer_logits(model, example, level) for level in (0, 1)}
        t = {level: answer_logits(average, example, level).detach() for level in (1, 2)}
        first = pra_loss(z[0], t[1], t[1], example.answer.long(), gamma=(3.0, 0.0)).total
        second = pra_loss(z[1], t[2], t[2], example.answer.long(), 0.0, gamma=(3.0 * 0.8, 0.0)).total
        ((first + second) / 3).backward()
    assert_same(found, gradients(model))


def test_a_step_without_its_teachers_is_refused(make_model: Any, make_examples: Any) -> None:
    """Left to itself it would learn from nothing, or from the live model."""
    model = AlignmentModel(trainable(make_model(), None), Objective(teacher_weights="ema"))
    batch = collate(make_examples(LENGTHS), [1 / 3] * 3)
    with pytest.raises(ConfigError, match="no teacher was given for level"):
        run(model, batch, plan(model.objective), lambda loss: loss.backward())
    # held-out numbers may be those of the live model
    values = run(model, batch, (Pass((0, 1, 2), False),), None)
    assert {"dist01", "dist12", "ce2"} <= values.keys()


# what x1 and x2 have in common, run once


#: lengths of x0, the common prefix, the summary, the question and the answer
PARTS = [(14, 12, 5, 4, 4), (8, 3, 9, 2, 1), (6, 20, 1, 3, 7)]
Step = tuple[dict[str, Tensor], Gradients]


def assert_both_same(one: Step, other: Step) -> None:
    for a, b in zip(one, other, strict=True):
        assert_same(a, b)


def examples_of(lengths: list[tuple[int, ...]] = PARTS, image: bool = False, seed: int = 0) -> list[Example]:
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


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_shared_is_sequential_is_joint(make_model: Any, checkpointing: bool, image: bool) -> None:
    examples, objective = examples_of(image=image), Objective(chunk=3)
    model = trainable(make_model(), None)
    expected = step(model, examples, objective)
    if checkpointing:
        checkpoint_activations(model)
    assert float(expected[0]["jsd12"].min()) > 1e-4
    assert_both_same(step(model, examples, objective, sharing=True), expected)
    assert_both_same(step(model, examples, objective, "joint"), expected)
    assert_both_same(step(model, examples, objective, "joint", sharing=True), expected)


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
        assert_both_same(step(model, examples_of(), objective, kind, sharing=sharing), expected)  # type: ignore[arg-type]


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
    assert_both_same(step(model, examples_of(), Objective(), sharing=True), expected)


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
    assert_both_same(step(model, moved, Objective(), sharing=True), step(model, moved, Objective()))


def test_only_the_rest_of_x2_is_run(make_model: Any) -> None:
    model = trainable(make_model(), None)
    tokens: list[tuple[int, bool]] = []
    layer = model.model.language_model.layers[1]  # type: ignore[union-attr]
    layer.register_forward_hook(lambda _, args, out: tokens.append((args[0].shape[1], torch.is_grad_enabled())))  # type: ignore[union-attr]
    examples = examples_of(PARTS[:1])
    step(model, examples, Objective(), sharing=True)
    x0, x1 = (len(examples[0].prompts[level]) + 3 for level in (0, 1))
    assert tokens == [(x1, True), (5 + 4 + 3, False), (x0, True)]


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
    assert config._attn_implementation == "eager"


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
