"""Targets that the model gives: the positions at which x1 and x2 teach, and the hard loss that gold answers keep."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remind.alignment import checkpoint
from remind.alignment.config import DataConfig, Edge, LoraConfig, Objective, TrainConfig
from remind.alignment.metrics import read_metrics
from remind.alignment.setup import set_up
from remind.alignment.tokens import Example
from remind.alignment.trainer import Trainer, train
from remind.core.errors import ConfigError, DataError
from remind.models.chat import end_token_id
from remind.models.load import load_backbone

#: Some answers of nano are cut off here, others are not.
MOST = 10
ON_POLICY = DataConfig(targets="on_policy", max_decoded=MOST, refresh_steps=2, decode_batch=3)
SAMPLED = replace(ON_POLICY, temperature=1.0)
END = end_token_id(load_backbone("nano").tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_record: Any, make_states: Any) -> Path:
    """Four labelled questions and one without an answer; the x2 of one is another's, as null controls have it."""
    records = [make_record(n) for n in range(4)] + [make_record(4, target=None), make_record(10, "dev")]
    records[1] = replace(records[1], x2=records[3].x2)
    states: Path = make_states(tmp_path_factory.mktemp("states") / "s", records)
    return states


def greedy(model: Any, prompt: list[int], most: int) -> list[int]:
    """An answer with its end token, by whole forwards without padding or cache, one token after the other."""
    new: list[int] = []
    while len(new) < most and END not in new:
        with torch.no_grad():
            new.append(int(model(input_ids=torch.tensor([prompt + new]), use_cache=False).logits[0, -1].argmax()))
    return new if END in new else [*new, END]


def steps(trainer: Trainer, stop: int) -> None:
    while trainer.step < stop:
        trainer.train_step()
        trainer.step += 1


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, alpha=4)])
def test_answers_are_the_students_from_x0_at_the_weights_of_the_refresh(
    runs: Any, folder: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    cfg = runs.config(
        folder,
        model="nano",
        out=tmp_path / "r",
        data=ON_POLICY,
        lora=lora,
        batch_size=2,
        lr=2e-2,
        gradient_checkpointing=True,
    )
    trainer = Trainer(cfg)
    answers: dict[str, set[tuple[int, ...]]] = {}
    # answers tell states and questions apart
    prompts = [prompt.tolist() for item in trainer.data.train.items for prompt in item.prompts]
    assert len({tuple(greedy(trainer.model, prompt, MOST)) for prompt in prompts}) > 4
    for start in (0, 2):
        steps(trainer, start)
        model = copy.deepcopy(trainer.model).eval()
        for step in (start, start + 1):
            steps(trainer, step)  # the second step takes the answers of the weights before the first
            assert trainer.student_answers is not None
            for index, found in zip(
                trainer.order.batch(step), trainer.student_answers.at(step, trainer.model), strict=True
            ):
                given = trainer.data.train.items[index]
                assert found.answer.tolist() == greedy(model, given.prompts[0].tolist(), MOST)
                assert not found.labelled
                if len(given.answer):
                    assert torch.equal(found.gold, given.answer)
                else:
                    assert found.gold is None
                answers.setdefault(found.id, set()).add(tuple(found.answer.tolist()))
    assert any(len(given) > 1 for given in answers.values())  # other weights answer otherwise
    assert trainer.model.training


def logits_of(model: Any, example: Example, level: int, answer: Tensor) -> Tensor:
    """[L, V] by one forward over prompt and answer."""
    ids = torch.cat([example.prompts[level], answer]).long()[None]
    start = len(example.prompts[level]) - 1
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits[start : start + len(answer)]


def reference(student: Any, teacher: Any, samples: list[Example], objective: Objective) -> Tensor:
    """Eq. 7 in float64, from its definition: distances at the model's answer, cross-entropy of the gold one."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        logits = {level: logits_of(student, sample, level, sample.answer) for level in range(3)}
        with torch.no_grad():
            taught = {level: logits_of(teacher, sample, level, sample.answer) for level in range(3)}
        for edge in objective.edges:
            q, p = (F.log_softmax(z / 2.0, -1) for z in (logits[edge.student], taught[edge.teacher]))
            distance = 0.5 * (p.exp() * (p - q)).sum(-1) + 0.5 * (q.exp() * (q - p)).sum(-1)
            total = total + 0.8 * 4 * edge.gamma * distance.mean() / len(samples)
        if sample.gold is not None:
            for level in objective.hard_levels:
                gold = logits_of(student, sample, level, sample.gold)
                total = total + 0.2 * F.cross_entropy(gold, sample.gold.long()) / len(samples)
    return total


@pytest.mark.parametrize(
    ("targets", "objective"),
    [
        ("decoded", Objective(hard_levels=(1, 0))),
        ("on_policy", Objective()),
        ("on_policy", Objective(teacher_weights="base", edges=(Edge(0, 1), Edge(0, 2, 1.0)))),
    ],
    ids=["decoded", "on_policy", "on_policy-base"],
)
def test_loss_and_gradient_of_a_step_are_the_references(
    runs: Any, folder: Path, tmp_path: Path, targets: Any, objective: Objective
) -> None:
    cfg = runs.config(
        folder, tmp_path / "r", model="nano", data=replace(ON_POLICY, targets=targets), objective=objective,
        batch_size=5, clip=0.0, gradient_accumulation=2,
    )  # fmt: skip
    trainer = Trainer(cfg)
    trainer.model.double()
    base = copy.deepcopy(trainer.model).eval()
    items = trainer.data.train.items
    assert len(items) == 5
    if targets == "decoded":
        for item in items:  # of the model before training, from x2; as text, which is tokenised again
            tokens = greedy(base, item.prompts[2].tolist(), MOST)[:-1]
            tokenizer = load_backbone("nano").tokenizer
            text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(item.answer[:-1]) == text
    steps(trainer, 1)
    student = copy.deepcopy(trainer.model).eval()
    samples = [items[index] for index in trainer.order.batch(1)]
    if trainer.student_answers is not None:
        samples = trainer.student_answers.at(1, student)
    assert sorted(sample.gold is not None for sample in samples) == [False, True, True, True, True]
    teacher = base if objective.teacher_weights == "base" else copy.deepcopy(student)
    expected = reference(student, teacher, samples, objective)
    expected.backward()
    moments = trainer.parts.inner_optimizer.state
    names = checkpoint.trained_parameters(trainer.model)
    before = {name: moments[p]["exp_avg"].double().clone() for name, p in names.items()}
    found = trainer.train_step()
    assert found["total"] == pytest.approx(float(expected.detach()), rel=1e-9)
    gradients = dict(student.named_parameters())
    for name, parameter in names.items():
        gradient, wanted = (moments[parameter]["exp_avg"].double() - 0.9 * before[name]) / 0.1, gradients[name].grad
        assert float((gradient - wanted).norm()) < 1e-8 * float(wanted.norm().clamp_min(1e-12)), name


def test_a_run_stopped_between_refreshes_goes_on_to_the_same_bits(runs: Any, folder: Path, tmp_path: Path) -> None:
    cfg = runs.config(
        folder, model="nano", out=tmp_path / "whole", data=replace(SAMPLED, refresh_steps=4), batch_size=1, max_steps=6
    )
    whole = train(replace(cfg, trainer=replace(cfg.trainer, save_every=100)))
    other = replace(cfg, out=str(tmp_path / "r"), trainer=replace(cfg.trainer, save_every=3))
    trainer = Trainer(other)
    steps(trainer, 3)
    folder_of_3 = trainer.save()
    # the answers of the fourth step, of weights that are gone by now
    assert checkpoint.read_state(folder_of_3)["answers"].keys() == {"3"}
    train(replace(other, resume=True))
    for name in ("model", "optimizer"):
        runs.assert_identical(runs.weights(tmp_path / "r", name=name), runs.weights(whole, name=name))
    train_rows = [[row for row in runs.timeless(run) if row["kind"] == "train"][-3:] for run in (whole, tmp_path / "r")]
    assert train_rows[0] == train_rows[1]


def test_samples_are_those_of_the_seed_and_of_the_distribution(runs: Any, folder: Path, tmp_path: Path) -> None:
    def first(number: int, **changes: Any) -> list[list[int]]:
        cfg: TrainConfig = runs.config(folder, model="nano", out=tmp_path / f"r{number}", batch_size=5, **changes)
        trainer = Trainer(cfg)
        state = torch.get_rng_state()
        assert trainer.student_answers is not None
        found = {sample.id: sample.answer.tolist() for sample in trainer.student_answers.at(0, trainer.model)}
        assert torch.equal(torch.get_rng_state(), state)
        return [found[name] for name in sorted(found)]

    sampled = first(0, data=SAMPLED)
    assert sampled == first(1, data=SAMPLED)
    assert sampled != first(2, data=SAMPLED, seed=1)
    assert sampled != first(3, data=ON_POLICY)
    # the less the temperature, the nearer to the greedy answer
    assert first(4, data=replace(SAMPLED, temperature=1e-4)) == first(5, data=ON_POLICY)


def test_a_run_without_any_label_and_one_with_skipped_questions(
    runs: Any, folder: Path, tmp_path: Path, make_record: Any, make_states: Any
) -> None:
    bare = make_states(tmp_path / "s", [make_record(n, target=None) for n in range(3)])
    out = train(runs.config(bare, model="nano", out=tmp_path / "bare", data=ON_POLICY, max_steps=2))
    rows = read_metrics(out)
    assert all(row["hard"] == 0 and row["total"] > 0 for row in rows)
    assert not (out / "cache" / "decoded").exists()  # nothing is decoded beforehand
    trainer = Trainer(
        runs.config(folder, model="nano", out=tmp_path / "skip", data=replace(ON_POLICY, unlabelled="skip"))
    )
    assert len(trainer.data.train) == 4


def test_what_cannot_answer_is_refused(
    runs: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"prompt and data\.max_decoded of \d+ tokens, at most 120"):
        set_up(
            runs.config(
                folder, model="nano", out=tmp_path / "r", data=replace(ON_POLICY, max_decoded=100, max_length=120)
            )
        )
    monkeypatch.setattr("remind.alignment.setup.sharded", lambda _: True)
    with pytest.raises(ConfigError, match="on_policy: a sharded model cannot answer"):
        set_up(runs.config(folder, model="nano", out=tmp_path / "r", data=ON_POLICY))
