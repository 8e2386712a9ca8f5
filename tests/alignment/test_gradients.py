"""Gradients of `PRATrainer` against those on record, against the equations in plain torch, and on two processes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, EMA_DECAY, IMAGE, Case, Sample, batch, deviation, model, read, set_weights, sketches
from forked import Forked
from torch import Tensor
from transformers import TrainerCallback

from remind import PRAConfig, PRATrainer
from remind.alignment.examples import Example, Examples
from remind.alignment.step import Pass
from remind.alignment.targets import Ema
from remind.models.nano import nano_tokenizer

RECORDED = read()
TOKENIZER = nano_tokenizer()
#: Also run on two processes: the last batch is too small to be divided.
ON_TWO = (
    *("paper-shared", "paper-one", "paper-microbatches-2", "cycle-of-three", "flow-two-answers", "two-answers-shared"),
    *("unlike-answers-hard-0-1", "ema-pixels", "base-two-answers", "base-topk-mixed", "pixels-mixed"),
    "pixels-vision-shared",
)
#: Also with prefix sharing, and with checkpointing.
SHARED = ("cycle", "cycle-of-three", "backwards", "only-01", "sft", "flow")
CHECKPOINTED = ("paper", "paper-shared", "two-answers-shared", "ema-shared", "pixels-shared", "pixels-vision-shared")
#: Also computed by the equations.
BY_FORMULA = (
    *("paper-shared", "tau-0.7-alphas", "hard-all", "cycle-of-three", "monitored-12-shared", "flow-two-answers"),
    *("some-gold-shared-2", "no-gold", "two-answers-hard-all", "unlike-answers-hard-0-1", "ema-two-answers"),
    *("base-some-gold", "base-topk-all", "pixels-mixed-vision-5", "pixels-two-answers"),
)


@dataclass(frozen=True)
class Shown(Example):
    """An example whose pixels do not come from files."""

    seen: dict[str, Tensor] = field(default_factory=dict, compare=False)

    def pixels(self) -> dict[str, Tensor]:
        return self.seen


def example_of(sample: Sample) -> Example:
    x0, x1, x2, answer = (torch.tensor(ids, dtype=torch.int32) for ids in (*sample.prompts, sample.answer))
    gold = None if sample.gold is None else torch.tensor(sample.gold, dtype=torch.int32)
    return Shown(sample.id, (x0, x1, x2), answer, sample.labelled, gold, seen=sample.pixels)


class Watch(TrainerCallback):
    """Moves the weights as the case has it, and keeps what the optimiser is about to be given."""

    trainer: PRATrainer

    def __init__(self, case: Case) -> None:
        self.case = case
        self.gradients: dict[str, Tensor] = {}
        self.values: dict[str, dict[str, float]] = {}
        self.total = self.loss = float("nan")

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        # base: targets have been computed; ema: the average has begun
        for moves in range(1, self.case.moves + 1):
            set_weights(self.trainer.model, moves, self.case.vision)
            if isinstance(self.trainer._teachers, Ema):
                self.trainer._teachers.update()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        parameters = self.trainer.model.named_parameters()
        self.gradients = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
        self.total = self.trainer._rows[-1]["total"]
        for examples, values in self.trainer._seen:
            for name, column in values.items():
                own = zip((example.id for example in examples), column.tolist(), strict=True)
                self.values.setdefault(name, {}).update(own)


def trained(case: Case, folder: Path, processes: int = 1, **changes: Any) -> Watch:
    """One optimiser step of a case, with other arguments."""
    samples, made = batch(case.batch, case.answers), model(case.tied)
    pieces = processes * case.microbatches
    settings: dict[str, Any] = {
        "batch_size": -(-len(samples) // pieces) * pieces,
        "gradient_accumulation_steps": case.microbatches,
        "edges": case.edges,
        "tau": case.tau,
        "lambda_hard": case.lambda_hard,
        "hard_levels": case.hard_levels,
        "target_grad": case.target_grad,
        "teacher_model_kind": case.teacher,
        "ema_decay": EMA_DECAY,
        "base_targets": case.targets,
        "topk": case.k,
        "chunk": case.chunk,
        "prefix_sharing": case.sharing,
        "train_vision": case.vision,
    }
    settings |= {
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = PRAConfig(str(folder), **settings | changes)
    watch = Watch(case)
    watch.trainer = trainer = PRATrainer(made, args, processing_class=TOKENIZER, callbacks=[watch])
    trainer.train_dataset = Examples([example_of(sample) for sample in samples])
    if case.step == "joint":
        levels = tuple(sorted(trainer.objective.levels))
        trainer._passes = (
            Pass(levels, True, case.sharing and {1, 2} <= set(levels) and 2 not in trainer.objective.trained),
        )
    watch.loss = trainer.train().training_loss
    return watch


def check(name: str, folder: Path, processes: int = 1, **changes: Any) -> Watch:
    """A case against what is on record."""
    case, expected = CASES[name], RECORDED[name]
    found = trained(case, folder, processes, **changes)
    worst, where = deviation(sketches(found.gradients), expected.gradients)
    assert worst <= 1e-12, f"{name}: {where} {worst}"
    assert found.total == pytest.approx(expected.loss, rel=1e-12)
    # a sum in float32
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    ids = [sample.id for sample in batch(case.batch, case.answers)]
    for term, values in found.values.items():
        recorded = dict(zip(ids, expected.values[term].tolist(), strict=True))
        assert values == pytest.approx({key: recorded[key] for key in values}, rel=1e-11, abs=1e-13), (name, term)
        assert processes > 1 or len(values) == len(ids)
    assert processes > 1 or found.values.keys() == expected.values.keys()
    return found


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """A run collects garbage when it ends, which among all that is imported takes longer than the run."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_gradients_on_record(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"prefix_sharing": True}) for name in SHARED),
        *((name, {"gradient_checkpointing": True}) for name in CHECKPOINTED),
    ],
)
def test_neither_sharing_nor_checkpointing_changes_them(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    found = check(name, tmp_path, **changes)
    layers = found.trainer.model.get_decoder().layers
    assert all(layer.gradient_checkpointing == ("gradient_checkpointing" in changes) for layer in layers)


@pytest.mark.slow
def test_two_processes_have_them_too(tmp_path: Path) -> None:
    process = Forked(Path(__file__), tmp_path, *ON_TWO, processes=2)
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    assert said.count("as on record") == 2 * len(ON_TWO)


# the equations


def answer_logits(made: Any, sample: Sample, level: int, answer: list[int]) -> Tensor:
    """[L, V] by a forward of the whole model over a prompt and its answer."""
    ids = torch.tensor([[*sample.prompts[level], *answer]])
    shown = sample.pixels | {"mm_token_type_ids": (ids == IMAGE).int()} if sample.pixels else {}
    start = len(sample.prompts[level]) - 1
    logits: Tensor = made(input_ids=ids, use_cache=False, **shown).logits[0, start : start + len(answer)]
    return logits


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1).mean()


def teacher_of(case: Case, made: Any) -> Any:
    """Another model with the teachers' weights; the model itself where teachers are live."""
    if case.teacher == "live":
        return made
    teacher, other = model(case.tied), model(case.tied)
    for moves in (1, 2) if case.teacher == "ema" else ():
        set_weights(other, moves, case.vision)
        for average, now in zip(teacher.parameters(), other.parameters(), strict=True):
            average.data = EMA_DECAY * average.data + (1 - EMA_DECAY) * now.data
    return teacher


def by_formula(case: Case) -> tuple[float, dict[str, Tensor]]:
    """Eq. 6-7 of each sample on whole logits, their mean, and its gradients."""
    made, samples = model(case.tied), batch(case.batch, case.answers)
    teacher = teacher_of(case, made)
    set_weights(made, case.moves, case.vision)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        gold = sample.gold or (sample.answer if sample.labelled else None)
        for level in case.hard_levels if gold else ():
            log_p = answer_logits(made, sample, level, gold).log_softmax(-1)
            total = total - case.lambda_hard * log_p[torch.arange(len(gold)), gold].mean()
        for student, level, gamma, alpha in case.edges:
            p = (answer_logits(made, sample, student, sample.answer) / case.tau).softmax(-1)
            q = (answer_logits(teacher, sample, level, sample.answer) / case.tau).softmax(-1)
            q = q if case.target_grad == "flow" else q.detach()
            distance = alpha * kl(q, p) + (1 - alpha) * kl(p, q)
            total = total + (1 - case.lambda_hard) * case.tau**2 * gamma * distance
    loss = total / len(samples)
    loss.backward()
    trains = {name: p for name, p in made.named_parameters() if case.vision or ".visual." not in name}
    return float(loss.detach()), {name: p.grad for name, p in trains.items() if p.grad is not None}


@pytest.mark.parametrize("name", BY_FORMULA)
def test_a_step_has_the_gradients_of_the_equations(name: str, tmp_path: Path) -> None:
    loss, expected = by_formula(CASES[name])
    found = trained(CASES[name], tmp_path)
    assert found.total == pytest.approx(loss, rel=1e-10)
    assert found.gradients.keys() == expected.keys()
    for parameter, gradient in expected.items():
        size = float(gradient.abs().max())
        assert float((found.gradients[parameter] - gradient).abs().max()) <= 1e-10 * size, parameter


if __name__ == "__main__":
    # one of several processes
    gc.freeze()
    for case_name in sys.argv[2:]:
        check(case_name, Path(sys.argv[1], case_name), processes=2)
        print(case_name, "as on record")
