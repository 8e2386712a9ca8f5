"""Teachers with other weights than the present ones: running averages, and the base model's targets on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from remind import PRAConfig, PRATrainer
from remind.alignment.config import Edge, LoraConfig, Objective
from remind.alignment.examples import Example
from remind.alignment.metrics import read_metrics
from remind.alignment.model import trainable
from remind.alignment.step import AlignmentModel, collate
from remind.alignment.targets import BaseTargets, Ema, trained_parameters
from remind.core.files import Cache
from remind.models.nano import VOCAB_SIZE

EMA = Objective(teacher_model_kind="ema")
BASE = Objective(teacher_model_kind="base", edges=(Edge(0, 1), Edge(0, 2, 1.0)))
LORA = LoraConfig(r=2, alpha=4)


class One:
    """The only process, as accelerate has it."""

    process_index, num_processes = 0, 1

    def wait_for_everyone(self) -> None:
        pass


class Weights(TrainerCallback):
    """The trained parameters as they are before the first step and after each."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen.append({name: p.detach().clone() for name, p in trained_parameters(model).items()})

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.on_train_begin(args, state, control, model)


def trainer_of(out: Path, make_record: Any, lora: LoraConfig | None = None, **settings: Any) -> PRATrainer:
    told: dict[str, Any] = {"batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 0, "max_steps": 3}
    args = PRAConfig(str(out), **{**told, "disable_tqdm": True, **settings})
    return PRATrainer("nano-untrained", args, [make_record(n) for n in range(4)], peft_config=lora)


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["kind"] == "train"]


# running averages


def test_an_average_of_bfloat16_weights_is_float32(make_model: Any, make_examples: Any) -> None:
    model = trainable(make_model(dtype=torch.bfloat16), None)
    ema = Ema(model, 0.999, (1,))
    name, parameter = next(iter(trained_parameters(model).items()))
    before = ema.shadow[name].clone()
    with torch.no_grad():
        parameter.add_(1)
    ema.update()
    # a step of a thousandth is lost in bfloat16
    torch.testing.assert_close(ema.shadow[name] - before, torch.full_like(before, 1e-3), rtol=1e-1, atol=1e-5)
    kept = parameter.detach().clone()
    batch = collate([(example, 1.0) for example in make_examples([(5, 7, 9, 4)])])
    ema.of(AlignmentModel(model, EMA), batch)
    assert torch.equal(parameter, kept)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_average_of_a_run_is_that_of_its_weights(lora: LoraConfig | None, make_record: Any, tmp_path: Path) -> None:
    """In float64. That of a resumed run: test_checkpoint.py."""
    told = {"teacher_model_kind": "ema", "ema_decay": 0.9, "max_steps": 4, "save_steps": 2}
    trainer, weights = trainer_of(tmp_path / "whole", make_record, lora, **told), Weights()
    trainer.add_callback(weights)
    trainer.train()
    average = {name: value.double() for name, value in weights.seen[0].items()}
    for step in range(1, 5):
        average = {name: 0.9 * average[name] + 0.1 * weights.seen[step][name].double() for name in average}
        if step % 2 == 0:
            saved = load_file(tmp_path / "whole" / f"checkpoint-{step}" / "ema.safetensors")
            assert saved.keys() == average.keys()
            for name, value in average.items():
                torch.testing.assert_close(saved[name].double(), value, rtol=1e-5, atol=1e-7)


# targets of the base model


def test_targets_are_kept_by_all_they_follow_from(make_model: Any, make_examples: Any, tmp_path: Path) -> None:
    model, examples = make_model(), make_examples([(5, 7, 9, 4)])

    def files(base: str = "base", examples: list[Example] = examples, **changes: Any) -> int:
        BaseTargets(AlignmentModel(model, replace(BASE, **changes)), examples, base, Cache(tmp_path), One())
        return len(list(tmp_path.rglob("*.safetensors")))

    topk = {"base_targets": "topk", "topk": 4}
    assert files() == files() == files(tau=1.0) == files(lambda_hard=0.5) == 1
    assert files(base="another") == 2
    assert files(edges=((0, 1),)) == 3
    one, other = examples[0], make_examples([(5, 7, 9, 4)], seed=1)[0]
    assert files(examples=[replace(one, prompts=(*one.prompts[:2], other.prompts[2]))]) == 4
    assert files(examples=[replace(one, answer=other.answer)]) == 5
    assert files(**topk) == files(**topk) == 6
    assert files(**topk, tau=1.0) == 7
    assert files(**{**topk, "topk": 5}) == 8


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_run_on_base_targets(
    lora: LoraConfig | None, make_record: Any, tmp_path: Path, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = {"edges": [(0, 1), (0, 2, 1.0)]}
    based = {**edges, "teacher_model_kind": "base", "cache": str(tmp_path / "cache")}
    trainer_of(tmp_path / "base", make_record, lora, **based).train()
    trainer_of(tmp_path / "live", make_record, lora, **edges).train()
    whole = {"base_targets": "topk", "topk": VOCAB_SIZE}
    trainer_of(tmp_path / "topk", make_record, lora, **based, **whole).train()
    base, live, topk = (steps_of(tmp_path / name) for name in ("base", "live", "topk"))
    for name in ("total", "dist01", "dist02", "jsd01"):
        assert base[0][name] == pytest.approx(live[0][name], rel=1e-4, abs=1e-7)
        assert topk[-1][name] == pytest.approx(base[-1][name], rel=1e-3, abs=1e-6)
    assert abs(base[-1]["total"] / live[-1]["total"] - 1) > 1e-4
    # x1 and x2 are not run: the tokens of x0 alone
    assert base[0]["tokens"] < 0.4 * live[0]["tokens"]
    assert "ce1" not in base[0]

    # nothing that is on disk is computed again, and a run that is resumed has the targets of the first weights
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = control.should_training_stop = True

    monkeypatch.setattr(BaseTargets, "_compute", lambda *_: pytest.fail("computed again"))
    first = trainer_of(tmp_path / "r", make_record, lora, **based)
    first.add_callback(Stop())
    first.train()
    monkeypatch.undo()
    second = trainer_of(tmp_path / "r", make_record, lora, **{**based, "cache": str(tmp_path / "other")})
    second.train(resume_from_checkpoint=True)
    runs.assert_identical(runs.weights(tmp_path / "r", 3), runs.weights(tmp_path / "base", 3))


def test_base_teachers_of_answers_that_are_not_known_yet(make_record: Any, tmp_path: Path) -> None:
    """On-policy: the first weights, kept beside the present ones, give them."""
    told = {"edges": [(0, 1)], "teacher_model_kind": "base", "targets": "on_policy", "max_decoded": 4}
    trainer = trainer_of(tmp_path, make_record, **told)
    first = {name: p.detach().clone() for name, p in trained_parameters(trainer.model).items()}
    trainer.train()
    assert isinstance(trainer._teachers, Ema)
    assert all(torch.equal(trainer._teachers.shadow[name], value) for name, value in first.items())
    assert any(not torch.equal(parameter, first[name]) for name, parameter in trained_parameters(trainer.model).items())
    assert not (tmp_path / "cache").exists()
