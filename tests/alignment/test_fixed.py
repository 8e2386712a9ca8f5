"""Teachers that are not the live model, against the formula written out on whole logits in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remind.alignment.config import Edge, Objective
from remind.alignment.model import head_weight, trainable
from remind.alignment.objective import (
    FixedTeacher,
    HiddenTeacher,
    Target,
    TopKTeacher,
    chunked_terms,
    position_terms,
    pra_loss,
)
from remind.alignment.step import AlignmentModel, Pass, collate, plan, run
from remind.alignment.teachers import teach, topk_targets
from remind.alignment.tokens import Example
from remind.core.errors import ConfigError, DataError

N, D, V, TAU = 7, 6, 23, 2.0
LENGTHS = [(5, 7, 9, 4), (8, 6, 12, 1), (3, 4, 5, 7)]


def objective_of(alpha: float, chunk: int = 3, **more: Any) -> Objective:
    return Objective(
        edges=(Edge(0, 1, 3.0, alpha), Edge(0, 2, 1.5, alpha)), teacher_weights="base", chunk=chunk, **more
    )


def numbers(seed: int = 0) -> tuple[Tensor, Tensor, dict[int, Tensor], Tensor, Tensor, Tensor]:
    """Student hidden states, its head, teachers' hidden states and head, targets, weights of positions."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    student, weight = normal(N, D).requires_grad_(), normal(V, D).requires_grad_()
    teachers = {1: normal(N, D), 2: normal(N, D)}
    targets = torch.randint(0, V, (N,), generator=g)
    return student, weight, teachers, normal(V, D), targets, torch.rand(N, generator=g, dtype=torch.float64)


def softmax(z: Tensor, tau: float = TAU) -> Tensor:
    e = torch.exp((z - z.max(-1, keepdim=True).values.detach()) / tau)
    return e / e.sum(-1, keepdim=True)


def bucket(p: Tensor, indices: Tensor) -> Tensor:
    """Probabilities of `indices` and of all other tokens, by summing those."""
    others = torch.ones_like(p).scatter(-1, indices, 0.0)
    return torch.cat([p.gather(-1, indices), (p * others).sum(-1, keepdim=True)], -1)


def plain(
    student: Tensor, weight: Tensor, teachers: dict[int, Tensor], head: Tensor, targets: Tensor, w: Tensor,
    objective: Objective, k: int | None,
) -> Tensor:  # fmt: skip
    """Eq. 6-7 with edges into 0, and every tensor whole."""
    z = student @ weight.T
    total = -objective.lambda_hard * softmax(z, 1.0)[torch.arange(N), targets].log()
    for edge in objective.edges:
        z_teacher = teachers[edge.teacher] @ head.T
        p, q = softmax(z_teacher), softmax(z)
        if k is not None:
            indices = z_teacher.topk(k).indices
            p, q = bucket(p, indices), bucket(q, indices)
        forward, reverse = (p * (p.log() - q.log())).sum(-1), (q * (q.log() - p.log())).sum(-1)
        total = total + (1 - objective.lambda_hard) * TAU**2 * edge.gamma * (
            edge.alpha * forward + (1 - edge.alpha) * reverse
        )
    return (total * w).sum()


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("k", [None, 1, 5])
def test_values_and_gradients_are_those_of_the_formula(alpha: float, chunk: int, k: int | None) -> None:
    student, weight, hidden, head, targets, w = numbers()
    objective = objective_of(alpha, chunk)
    fixed: dict[int, FixedTeacher] = {level: HiddenTeacher(h, head) for level, h in hidden.items()}
    if k is not None:
        fixed = {level: TopKTeacher(*topk_targets(h, head, TAU, k, chunk)) for level, h in hidden.items()}
    found, values = chunked_terms({0: student}, weight, targets, w, objective, (0,), fixed)
    expected = plain(student, weight, hidden, head, targets, w, objective, k)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert set(values) >= {"hard0", "ce0", "entropy0", "dist01", "dist02", "jsd01", "jsd02"}
    grads = [torch.autograd.grad(loss * 0.7, (student, weight)) for loss in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_top_k_of_all_tokens_is_exact() -> None:
    student, weight, hidden, head, targets, w = numbers(1)
    whole = {level: TopKTeacher(*topk_targets(h, head, TAU, V)) for level, h in hidden.items()}
    exact = {level: HiddenTeacher(h, head) for level, h in hidden.items()}
    for alpha in (0.0, 0.5, 1.0):
        objective = objective_of(alpha)
        losses = [chunked_terms({0: student}, weight, targets, w, objective, (0,), t)[0] for t in (whole, exact)]
        torch.testing.assert_close(*losses)
        for one, other in zip(*(torch.autograd.grad(loss, (student, weight)) for loss in losses), strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_bucket_hides_less_the_more_tokens_are_kept(alpha: float) -> None:
    student, weight, hidden, _, targets, w = numbers(2)

    def distance(teacher: FixedTeacher) -> float:
        _, values = chunked_terms({0: student}, weight, targets, w, objective_of(alpha), (0,), {1: teacher})
        return float(values["dist01"].sum())

    # one head, as where the student has just begun to leave its teacher
    head = weight.detach()
    exact = distance(HiddenTeacher(hidden[1], head))
    by_size = [distance(TopKTeacher(*topk_targets(hidden[1], head, TAU, k))) for k in (1, 3, 8, V)]
    assert by_size == sorted(by_size)
    assert by_size[0] < exact
    assert by_size[-1] == pytest.approx(exact, rel=1e-12)


def test_top_k_targets_are_probabilities_in_order_and_keep_a_small_rest() -> None:
    _, _, hidden, head, _, _ = numbers(3)
    indices, log_probs = topk_targets(hidden[1], head, TAU, 4, chunk=2)
    assert (indices.dtype, indices.shape, log_probs.shape) == (torch.int32, (N, 4), (N, 5))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(N, dtype=torch.float64))
    assert (log_probs[:, :4].diff() <= 0).all()
    assert torch.equal(indices[:, 0].long(), (hidden[1] @ head.T).argmax(-1))
    # a rest of 1e-13, which 1 - sum in float32 would make 0 or 1e-7
    low = topk_targets(torch.eye(3)[:1], torch.tensor([[60.0, 0, 0], [0, 0, 0], [-1, 0, 0]]), 2.0, 1)[1]
    expected = math.log(math.exp(-30) + math.exp(-30.5))
    assert float(low[0, 1]) == pytest.approx(expected, rel=1e-5)


def test_fixed_teachers_get_no_gradient_and_are_watched() -> None:
    student, weight, hidden, head, targets, w = numbers(4)
    teacher = HiddenTeacher(hidden[1].requires_grad_(), head.requires_grad_())
    loss, values = chunked_terms({0: student}, weight, targets, w, objective_of(0.5), (0,), {1: teacher})
    loss.backward()
    assert hidden[1].grad is None
    assert head.grad is None
    logits = (hidden[1] @ head.T).detach()
    p = softmax(logits, 1.0)
    torch.testing.assert_close(values["teacher_ce1"], -p[torch.arange(N), targets].log())
    torch.testing.assert_close(values["teacher_entropy1"], -(p * p.log()).sum(-1))
    target = Target(torch.log_softmax(hidden[1] @ head.T / TAU, -1))
    position_terms({0: student @ weight.T}, targets, objective_of(0.5), (0,), fixed={1: target})[0].sum().backward()
    assert hidden[1].grad is None


def test_teachers_that_do_not_fit_are_refused() -> None:
    student, weight, hidden, head, targets, w = numbers(5)

    def terms(teacher: FixedTeacher) -> None:
        chunked_terms({0: student}, weight, targets, w, objective_of(0.5), (0,), {1: teacher})

    with pytest.raises(DataError, match="3 positions, the batch 7"):
        terms(HiddenTeacher(hidden[1][:3], head))
    with pytest.raises(ConfigError, match="head is trained"):
        terms(HiddenTeacher(hidden[1]))
    weight.requires_grad_(False)
    terms(HiddenTeacher(hidden[1]))
    with pytest.raises(DataError, match="top-2"):
        TopKTeacher(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2))
    with pytest.raises(ConfigError, match="23 tokens"):
        topk_targets(hidden[1], head, TAU, 24)


# in the step


def moved_copy(model: Any) -> Any:
    """The model after some training: the same but for noise."""
    generator = torch.Generator().manual_seed(9)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return other


def answer_logits(model: Any, example: Example, level: int) -> Tensor:
    ids = torch.cat([example.prompts[level], example.answer]).long()[None]
    start = len(example.prompts[level]) - 1
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits[start : start + len(example.answer)]


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        scale = float(other[name].abs().max())
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-9 * scale, msg=name)


def test_a_step_with_base_targets_runs_x0_alone(
    make_model: Callable[..., Any], make_examples: Callable[..., list[Example]]
) -> None:
    base = trainable(make_model(), None)
    model = moved_copy(base)
    examples = make_examples(LENGTHS)
    batch = collate(examples, [1 / 3] * 3)
    objective = Objective(edges=(Edge(0, 1), Edge(0, 2)), teacher_weights="base", chunk=3)
    assert plan(objective) == (Pass((0,), True),)
    head = head_weight(base).detach().clone()
    fixed = {k: HiddenTeacher(h, head) for k, h in teach(AlignmentModel(base, objective), batch, (1, 2)).items()}
    values = run(AlignmentModel(model, objective), batch, plan(objective), lambda loss: loss.backward(), fixed=fixed)
    found = gradients(model)
    total: Any = 0
    for number, example in enumerate(examples):
        z = answer_logits(model, example, 0)
        for level in (1, 2):
            teacher = answer_logits(base, example, level).detach()
            # the contract's loss with one edge at a time; the hard loss once
            share = (0.2, 0.8) if level == 1 else (0.0, 1.0)
            loss = pra_loss(z, teacher, teacher, example.answer.long(), share[0], gamma=(3.0 * 0.8 / share[1], 0.0))
            total = total + loss.total / 3
            assert float(values[f"dist0{level}"][number]) == pytest.approx(float(loss.dist01.detach()), rel=1e-9)
            expected = torch.nn.functional.cross_entropy(teacher, example.answer.long())
            assert float(values[f"teacher_ce{level}"][number]) == pytest.approx(float(expected), rel=1e-9)
    total.backward()
    assert_same(found, gradients(model))


def test_ema_teachers_stand_for_levels_that_also_run(
    make_model: Callable[..., Any], make_examples: Callable[..., list[Example]]
) -> None:
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


def test_base_is_live_at_the_first_step(
    make_model: Callable[..., Any], make_examples: Callable[..., list[Example]]
) -> None:
    model = trainable(make_model(), None)
    batch = collate(make_examples(LENGTHS), [1 / 3] * 3)
    edges = (Edge(0, 1), Edge(0, 2))
    live, base = Objective(edges=edges), Objective(edges=edges, teacher_weights="base")
    head = head_weight(model).detach().clone()
    fixed = {k: HiddenTeacher(h, head) for k, h in teach(AlignmentModel(model, base), batch, (1, 2)).items()}
    run(AlignmentModel(model, base), batch, plan(base), lambda loss: loss.backward(), fixed=fixed)
    found = gradients(model)
    run(AlignmentModel(model, live), batch, plan(live), lambda loss: loss.backward())
    assert_same(found, gradients(model))


def test_a_step_without_its_teachers_is_refused(
    make_model: Callable[..., Any], make_examples: Callable[..., list[Example]]
) -> None:
    """Left to itself it would learn from nothing, or from the live model."""
    model = AlignmentModel(trainable(make_model(), None), Objective(teacher_weights="ema"))
    batch = collate(make_examples(LENGTHS), [1 / 3] * 3)
    with pytest.raises(ConfigError, match="no teacher was given for level"):
        run(model, batch, plan(model.objective), lambda loss: loss.backward())
    # held-out numbers may be those of the live model
    values = run(model, batch, (Pass((0, 1, 2), False),), None)
    assert {"dist01", "dist12", "ce2"} <= values.keys()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Objective(teacher_weights="base"), "level 0 only, not 12"),
        (lambda: Objective(teacher_weights="old"), "live, base or ema"),  # type: ignore[arg-type]
        (lambda: Objective(teacher_weights="ema", target_grad="flow"), "needs teacher_weights live"),
        (lambda: Objective(clip_kl=0.0), "above 0"),
        (lambda: Objective(clip_kl=math.inf), "above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make: Callable[[], Objective], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_cap_holds_value_and_gradient(alpha: float) -> None:
    student, weight, hidden, head, targets, w = numbers(6)
    fixed = {1: HiddenTeacher(hidden[1], head)}
    edges = (Edge(0, 1, 3.0, alpha),)
    free = Objective(0.0, edges=edges, chunk=2)
    _, values = chunked_terms({0: student}, weight, targets, w, free, (0,), fixed)
    cap = float(values["dist01"].median())
    capped = Objective(0.0, edges=edges, chunk=2, clip_kl=cap)
    loss, found = chunked_terms({0: student}, weight, targets, w, capped, (0,), fixed)
    torch.testing.assert_close(found["dist01"], values["dist01"].clamp(max=cap))
    assert found["clipped01"].tolist() == (values["dist01"] > cap).double().tolist()
    assert 0 < float(found["clipped01"].sum()) < N
    assert float(loss.detach()) == pytest.approx(float((found["dist01"] * w).sum()) * 3 * TAU**2, rel=1e-12)
    (grad,) = torch.autograd.grad(loss, student)
    (expected,) = torch.autograd.grad(chunked_terms({0: student}, weight, targets, w, free, (0,), fixed)[0], student)
    above = values["dist01"] > cap
    assert float(grad[above].abs().max()) == 0.0
    torch.testing.assert_close(grad[~above], expected[~above])
