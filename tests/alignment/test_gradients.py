"""Steps of `PRATrainer` against the equations in plain torch on whole logits."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, EMA_DECAY, IMAGE, Case, Shown, batch, model, set_weights
from torch import Tensor
from transformers import TrainerCallback

from remind import PRAConfig, PRATrainer
from remind.alignment.examples import Examples
from remind.alignment.targets import Ema
from remind.models.nano import nano_tokenizer

TOKENIZER = nano_tokenizer()
CHECKPOINTED = ("paper-shared", "two-answers-shared", "ema-shared", "pixels-vision-shared")
Terms = dict[str, dict[str, float]]


class Watch(TrainerCallback):
    """Moves the weights as the case has it, and keeps what the optimiser is about to be given."""

    trainer: PRATrainer

    def __init__(self, case: Case) -> None:
        self.case = case
        self.gradients: dict[str, Tensor] = {}
        self.terms: Terms = defaultdict(dict)
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
                self.terms[name] |= zip((example.id for example in examples), column.tolist(), strict=True)


def trained(case: Case, folder: Path, **changes: Any) -> Watch:
    """One optimiser step of a case, with other arguments."""
    examples, pieces = batch(case.batch, case.answers), case.microbatches
    settings = asdict(case)
    for name in ("batch", "answers", "tied"):
        del settings[name]
    args = PRAConfig(
        str(folder), batch_size=-(-len(examples) // pieces) * pieces, max_steps=1, max_grad_norm=0.0,
        save_strategy="no", logging_steps=1, disable_tqdm=True, use_cpu=True, ema_decay=EMA_DECAY,
        gradient_accumulation_steps=settings.pop("microbatches"), prefix_sharing=settings.pop("sharing"),
        teacher_model_kind=settings.pop("teacher"), base_targets=settings.pop("targets"),
        train_vision=settings.pop("vision"), **settings, **changes,
    )  # fmt: skip
    watch = Watch(case)
    watch.trainer = trainer = PRATrainer(model(case.tied), args, processing_class=TOKENIZER, callbacks=[watch])
    trainer.train_dataset = Examples(list(examples))
    watch.loss = trainer.train().training_loss
    return watch


# the equations


def answer_logits(made: Any, example: Shown, level: int, answer: Tensor) -> Tensor:
    """[L, V] by a forward of the whole model over a prompt and its answer."""
    ids = torch.cat([example.prompts[level], answer]).long()[None]
    shown = example.seen | {"mm_token_type_ids": (ids == IMAGE).int()} if example.seen else {}
    logits: Tensor = made(input_ids=ids, use_cache=False, **shown).logits[0, len(example.prompts[level]) - 1 : -1]
    return logits


def kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p > 0, p * (p.log() - q.log()), 0).sum(-1).mean()


def bucketed(p: Tensor, places: Tensor) -> Tensor:
    """Of some tokens, and last of all others together."""
    rest = p.scatter(-1, places, 0).sum(-1, keepdim=True)
    return torch.cat([p.gather(-1, places), rest], -1)


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


def terms_of(case: Case, made: Any, teacher: Any, example: Shown) -> dict[str, Tensor]:
    """Of one example: the terms of Eq. 6-7, and what is monitored beside them."""
    found: dict[str, Tensor] = {}
    # a pass over the gold answer alone is not run for nothing
    gold = example.answer if example.labelled else example.gold if case.lambda_hard else None
    for level in case.hard_levels if gold is not None else ():
        log_p = answer_logits(made, example, level, gold).log_softmax(-1)
        found[f"hard{level}"] = -log_p[torch.arange(len(gold)), gold.long()].mean()
    logits = {}
    for level in range(3):
        for front, who in (("", made), ("teacher_", teacher)):
            logits[front, level] = answer_logits(who, example, level, example.answer)
            log_p = logits[front, level].detach().log_softmax(-1)
            places = torch.arange(len(log_p)), example.answer.long()
            found[f"{front}ce{level}"] = -log_p[places].mean()
            found[f"{front}entropy{level}"] = -(log_p * log_p.exp()).sum(-1).mean()
    for student, level, _, alpha in case.edges:
        p, q = ((logits[key] / case.tau).softmax(-1) for key in (("", student), ("teacher_", level)))
        q = q if case.target_grad == "flow" else q.detach()
        if case.targets == "topk":
            places = q.topk(case.topk).indices
            p, q = bucketed(p, places), bucketed(q, places)
        found[f"dist{student}{level}"] = alpha * kl(q, p) + (1 - alpha) * kl(p, q)
        middle = (p + q).detach() / 2
        found[f"jsd{student}{level}"] = (kl(p.detach(), middle) + kl(q.detach(), middle)) / 2
    return found


def by_formula(case: Case) -> tuple[float, Terms, dict[str, Tensor]]:
    """The mean over examples, the terms of each, and the gradients."""
    made, examples = model(case.tied), batch(case.batch, case.answers)
    teacher = teacher_of(case, made)
    set_weights(made, case.moves, case.vision)
    terms: Terms = defaultdict(dict)
    total = torch.zeros((), dtype=torch.float64)
    for example in examples:
        found = terms_of(case, made, teacher, example)
        hard = sum(value for name, value in found.items() if name.startswith("hard"))
        soft = sum(gamma * found[f"dist{student}{level}"] for student, level, gamma, _ in case.edges)
        total = total + case.lambda_hard * hard + (1 - case.lambda_hard) * case.tau**2 * soft
        for name, value in found.items():
            terms[name][example.id] = float(value.detach())
    (total / len(examples)).backward()
    trains = {name: p for name, p in made.named_parameters() if case.vision or ".visual." not in name}
    return float(total.detach()) / len(examples), terms, {n: p.grad for n, p in trains.items() if p.grad is not None}


def check(name: str, folder: Path, **changes: Any) -> Watch:
    """A case against the equations."""
    case = CASES[name]
    loss, terms, gradients = by_formula(case)
    found = trained(case, folder, **changes)
    # the vision tower computes in float32, as does what adds up losses
    tolerance = 1e-4 if case.batch in ("pixels", "mixed") else 1e-10
    assert found.total == pytest.approx(loss, rel=tolerance)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    for term, values in found.terms.items():
        expected = {key: terms[term].get(key, 0.0) for key in values}
        assert values == pytest.approx(expected, rel=tolerance, abs=tolerance), term
        assert len(values) == len(batch(case.batch))
    names = {f"{kind}{one}{two}" for one, two, *_ in case.edges for kind in ("dist", "jsd")}
    names |= {f"hard{level}" for level in case.hard_levels if case.lambda_hard}
    assert names <= found.terms.keys()
    assert found.gradients.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        size = float(gradient.abs().max())
        assert float((found.gradients[parameter] - gradient).abs().max()) <= tolerance * size, parameter
    return found


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """A run collects garbage when it ends, which among all that is imported takes longer than the run."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_gradients_of_the_equations(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointing_does_not_change_them(name: str, tmp_path: Path) -> None:
    found = check(name, tmp_path, gradient_checkpointing=True)
    assert all(layer.gradient_checkpointing for layer in found.trainer.model.get_decoder().layers)
