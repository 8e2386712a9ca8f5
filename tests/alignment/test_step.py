"""The step against one-sample forwards of the whole model, without padding, and the contract's `pra_loss`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from remind.alignment.config import Edge, Objective, StepKind
from remind.alignment.model import head_weight, trainable
from remind.alignment.objective import HiddenTeacher, pra_loss
from remind.alignment.step import AlignmentModel, Pass, collate, plan, run
from remind.alignment.teachers import teach
from remind.alignment.tokens import Example
from remind.core.errors import ConfigError

LENGTHS = [(5, 7, 9, 4), (8, 6, 12, 1), (3, 4, 5, 7)]
Gradients = dict[str, Tensor]


def gradients(model: Any) -> Gradients:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def step(
    model: Any,
    examples: list[Example],
    objective: Objective,
    kind: StepKind = "sequential",
    size: int | None = None,
    sharing: bool = False,
) -> tuple[dict[str, Tensor], Gradients]:
    """Values and gradients of one step over the examples in microbatches of `size`."""
    wrapped = AlignmentModel(model, objective)
    size = size or len(examples)
    parts = []
    for start in range(0, len(examples), size):
        chosen = examples[start : start + size]
        batch = collate(chosen, [1 / len(examples)] * len(chosen))
        parts.append(run(wrapped, batch, plan(objective, kind, sharing), lambda loss: loss.backward()))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, gradients(model)


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
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=rtol * float(b[name].abs().max()), msg=name)


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


def test_microbatches_add_up(model: Any, make_examples: Any) -> None:
    examples = make_examples([*LENGTHS, (6, 6, 6, 2)])
    whole, expected = step(model, examples, Objective())
    parts, found = step(model, examples, Objective(), size=1)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name])
    assert_same(found, expected)


def test_a_sample_does_not_feel_its_neighbours(model: Any, make_examples: Any) -> None:
    """Padding on the right, whatever its length, changes nothing."""
    short, long = make_examples([(4, 5, 6, 3), (40, 50, 60, 20)])
    alone, _ = step(model, [short], Objective())
    padded, _ = step(model, [short, long], Objective())
    for name in alone:
        torch.testing.assert_close(padded[name][:1], alone[name], rtol=1e-12, atol=1e-13)


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


def test_gradient_checkpointing_changes_nothing(make_model: Any, make_examples: Any) -> None:
    from remind.alignment.model import checkpoint_activations

    examples = make_examples(LENGTHS)
    plain, checkpointed = trainable(make_model(), None), trainable(make_model(), None)
    checkpoint_activations(checkpointed)
    calls: list[int] = []
    norm: Any = checkpointed.model.language_model.layers[0].input_layernorm  # type: ignore[union-attr]
    norm.register_forward_hook(lambda *_: calls.append(1))
    values, found = step(checkpointed, examples, Objective())
    same, expected = step(plain, examples, Objective())
    assert len(calls) == 5, "three forwards, and two again in the backward passes"
    for name in values:
        torch.testing.assert_close(values[name], same[name])
    assert_same(found, expected)


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
