"""Teachers with other weights than the present ones: running averages, and the base model's targets on disk."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remind.alignment import checkpoint
from remind.alignment.cache import Cache, Ranks
from remind.alignment.config import Edge, LoraConfig, Objective, TeacherConfig
from remind.alignment.metrics import read_metrics
from remind.alignment.model import head_weight, trainable
from remind.alignment.step import AlignmentModel, collate
from remind.alignment.teachers import BaseTargets, Ema
from remind.alignment.tokens import Example
from remind.alignment.trainer import Trainer, train
from remind.models.nano import VOCAB_SIZE

EMA = Objective(teacher_weights="ema")
BASE = Objective(teacher_weights="base", edges=(Edge(0, 1), Edge(0, 2, 1.0)))


def hidden_by_hand(model: Any, example: Example, level: int) -> Tensor:
    """Final hidden states that predict the answer, of one sample without padding."""
    ids = torch.cat([example.prompts[level], example.answer[:-1]]).long()[None]
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    states: Tensor = output.hidden_states[-1][0]
    return states[len(example.prompts[level]) - 1 :]


# running averages


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, alpha=4)])
def test_the_average_teaches_and_the_weights_come_back(
    make_model: Any, make_examples: Any, lora: LoraConfig | None
) -> None:
    model = trainable(make_model(), lora)
    ema = Ema(model, 0.75, (1, 2))
    first = {name: p.detach().clone() for name, p in checkpoint.trained_parameters(model).items()}
    generator = torch.Generator().manual_seed(0)
    for parameter in checkpoint.trained_parameters(model).values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    ema.update()
    present = {name: p.detach().clone() for name, p in checkpoint.trained_parameters(model).items()}
    for name, average in ema.shadow.items():
        torch.testing.assert_close(average, 0.75 * first[name] + 0.25 * present[name])

    other = copy.deepcopy(model)
    for name, parameter in checkpoint.trained_parameters(other).items():
        parameter.data.copy_(0.75 * first[name] + 0.25 * present[name])
    module = AlignmentModel(model, EMA)
    one, two = make_examples([(5, 7, 9, 4), (8, 6, 12, 1)])
    chosen = [[one, two], [two]]
    found = ema.of(module, chosen, [collate(some, [0.5] * len(some)) for some in chosen])
    for some, teachers in zip(chosen, found, strict=True):
        assert teachers.keys() == {1, 2}
        for level, teacher in teachers.items():
            expected = torch.cat([hidden_by_hand(other, example, level) for example in some])
            torch.testing.assert_close(teacher.hidden, expected)  # type: ignore[union-attr]
            assert not teacher.hidden.requires_grad  # type: ignore[union-attr]
            head = teacher.weight  # type: ignore[union-attr]
            assert (head is None) == (lora is not None)
            if head is not None:
                torch.testing.assert_close(head, head_weight(other).detach())
    for name, parameter in checkpoint.trained_parameters(model).items():
        assert torch.equal(parameter, present[name])
        assert parameter.grad is None


def test_an_average_of_bfloat16_weights_is_float32(make_model: Any) -> None:
    model = trainable(make_model(dtype=torch.bfloat16), None)
    ema = Ema(model, 0.999, (1,))
    assert {value.dtype for value in ema.shadow.values()} == {torch.float32}
    name, parameter = next(iter(checkpoint.trained_parameters(model).items()))
    before = ema.shadow[name].clone()
    with torch.no_grad():
        parameter.add_(1)
    ema.update()
    # a step of a thousandth is lost in bfloat16
    torch.testing.assert_close(ema.shadow[name] - before, torch.full_like(before, 1e-3), rtol=1e-1, atol=1e-5)
    kept = parameter.detach().clone()
    with ema.swapped():
        assert torch.equal(parameter, ema.shadow[name].bfloat16())
    assert torch.equal(parameter, kept)


@pytest.fixture(scope="module")
def averaged(runs: Any, states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps with an average as teacher, a checkpoint after each."""
    out = tmp_path_factory.mktemp("runs") / "ema"
    teacher = TeacherConfig(ema_decay=0.9)
    return train(runs.config(states, out, objective=EMA, teacher=teacher, save_every=1, keep_last=6))


def test_the_average_of_a_run_is_that_of_its_checkpoints(
    runs: Any, states: Path, tmp_path: Path, averaged: Path
) -> None:
    trainer = Trainer(runs.config(states, tmp_path / "r"))
    names = checkpoint.trained_parameters(trainer.model)
    average = {name: parameter.detach().double() for name, parameter in names.items()}
    for step in range(1, 7):
        weights = runs.weights(averaged, step)
        average = {name: 0.9 * value + 0.1 * weights[name].double() for name, value in average.items()}
        saved = runs.weights(averaged, step, "ema")
        for name, value in average.items():
            torch.testing.assert_close(saved[name].double(), value, rtol=1e-5, atol=1e-7)


def test_the_average_survives_a_resume(runs: Any, states: Path, tmp_path: Path, averaged: Path) -> None:
    from remind.alignment.run_folder import read_config

    cfg = replace(read_config(averaged), out=str(tmp_path / "r"))
    first = replace(cfg.trainer, save_every=3, keep_last=6)
    trainer = Trainer(replace(cfg, trainer=first))
    while trainer.step < 4:
        trainer.train_step()
        trainer.step += 1
        if trainer.step == 3:
            trainer.save()
    train(replace(cfg, resume=True))
    for name in ("model", "optimizer", "ema"):
        runs.assert_identical(runs.weights(tmp_path / "r", name=name), runs.weights(averaged, name=name))
    damaged = checkpoint.folder_of(tmp_path / "r", 6) / "ema.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    assert checkpoint.newest(tmp_path / "r", report=False) == checkpoint.folder_of(tmp_path / "r", 5)


# targets of the base model


def targets(model: Any, examples: list[Example], folder: Path, **changes: Any) -> BaseTargets:
    values: dict[str, Any] = {"levels": (1, 2), "config": TeacherConfig(), "base": "base", "frozen_head": False}
    objective = changes.pop("objective", BASE)
    values |= changes
    module = AlignmentModel(model, objective)
    return BaseTargets(module, examples, cache=Cache(folder), ranks=Ranks(), **values)


def test_hidden_targets_are_the_models(make_model: Any, make_examples: Any, tmp_path: Path) -> None:
    model = make_model()
    examples = make_examples([(5, 7, 9, 4), (8, 6, 12, 1), (3, 9, 4, 2)])
    found = targets(model, examples, tmp_path)
    chosen = [examples[2], examples[0]]
    (teachers,) = found.of(model, [chosen], [collate(chosen, [0.5, 0.5])])
    for level in (1, 2):
        expected = torch.cat([hidden_by_hand(model, example, level) for example in chosen])
        torch.testing.assert_close(teachers[level].hidden, expected)  # type: ignore[union-attr]
        assert torch.equal(teachers[level].weight, head_weight(model))  # type: ignore[union-attr]
        # the copy stays when the head is trained
        assert teachers[level].weight.data_ptr() != head_weight(model).data_ptr()  # type: ignore[union-attr]


def test_targets_are_kept_by_all_they_follow_from(make_model: Any, make_examples: Any, tmp_path: Path) -> None:
    model, examples = make_model(), make_examples([(5, 7, 9, 4)])

    def files(**changes: Any) -> int:
        targets(model, changes.pop("examples", examples), tmp_path, **changes)
        return len(list(tmp_path.rglob("*.safetensors")))

    topk = TeacherConfig(targets="topk", k=4)
    assert files() == files() == files(objective=replace(BASE, tau=1.0)) == 1
    assert files(base="another") == 2
    assert files(levels=(1,)) == 3
    assert files(examples=make_examples([(5, 7, 9, 4)], seed=1)) == 4
    assert files(config=topk) == files(config=topk) == 5
    assert files(config=topk, objective=replace(BASE, tau=1.0)) == 6
    assert files(config=replace(topk, k=5)) == 7


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, alpha=4)])
def test_a_run_on_base_targets(runs: Any, states: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    cfg = runs.config(states, tmp_path / "base", objective=BASE, lora=lora, max_steps=3, lr=1e-2)
    based = train(cfg)
    live = train(replace(cfg, out=str(tmp_path / "live"), objective=replace(BASE, teacher_weights="live")))
    whole = TeacherConfig(targets="topk", k=VOCAB_SIZE)
    topk = train(replace(cfg, out=str(tmp_path / "topk"), teacher=whole))
    rows = [[row for row in runs.timeless(run) if row["kind"] == "train"] for run in (based, live, topk)]
    for name in ("total", "dist01", "dist02", "jsd01"):
        assert rows[0][0][name] == pytest.approx(rows[1][0][name], rel=1e-4, abs=1e-7)
        assert rows[2][-1][name] == pytest.approx(rows[0][-1][name], rel=1e-3, abs=1e-6)
    assert abs(rows[0][-1]["total"] / rows[1][-1]["total"] - 1) > 1e-4
    # x1 and x2 are not run: the tokens of x0 alone
    assert rows[0][0]["tokens"] < 0.4 * rows[1][0]["tokens"]
    assert "ce1" not in rows[0][0]
    assert {"ce0", "ce1", "ce2"} <= read_metrics(based)[0].keys()
    # a resume in the middle reads targets of the base model, not of the weights it goes on with
    again = replace(cfg, out=str(tmp_path / "again"))
    trainer = Trainer(again)
    trainer.train_step()
    trainer.step = 1
    trainer.save()
    (tmp_path / "again" / "cache").rename(tmp_path / "gone")
    train(replace(again, resume=True))
    runs.assert_identical(runs.weights(tmp_path / "again", 3), runs.weights(based, 3))
