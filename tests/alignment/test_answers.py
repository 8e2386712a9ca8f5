"""Answers of the model itself: decoded once before training, or the student's own as it learns."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from torch import Tensor

from remind import PRAConfig, PRATrainer
from remind.alignment import targets
from remind.alignment.config import LoraConfig
from remind.alignment.examples import Example
from remind.alignment.metrics import read_metrics
from remind.alignment.targets import StudentAnswers, answer
from remind.models.backbone import load_backbone
from remind.models.chat import end_token_id
from remind.models.generate import generate
from remind.states.records import StateRecord

#: Some answers of nano are cut off here, others are not.
MOST = 10
END = end_token_id(load_backbone("nano").tokenizer)


@pytest.fixture(scope="module")
def rows(make_record: Any) -> list[StateRecord]:
    """Four labelled questions and one without an answer; their lengths differ."""
    return [make_record(n) for n in range(4)] + [make_record(4, target=None)]


def trainer_of(out: Path, rows: Sequence[Any], model: Any = "nano", peft_config: Any = None, **settings: Any) -> Any:
    told: dict[str, Any] = {"max_decoded": MOST, "decode_batch": 3, "batch_size": 2, "warmup_steps": 0}
    told |= {"learning_rate": 2e-2, "max_steps": 4, "disable_tqdm": True, "refresh_steps": 2}
    return PRATrainer(model, PRAConfig(str(out), **{**told, **settings}), rows, peft_config=peft_config)


def greedy(model: Any, prompt: list[int], most: int = MOST) -> list[int]:
    """An answer with its end token, by whole forwards without padding or cache, one token after the other."""
    new: list[int] = []
    while len(new) < most and END not in new:
        with torch.no_grad():
            new.append(int(model(input_ids=torch.tensor([prompt + new]), use_cache=False).logits[0, -1].argmax()))
    return new if END in new else [*new, END]


# decoded once


@pytest.mark.parametrize("level", ["x2", "x1"])
def test_decoded_answers_are_the_models_greedy_ones(level: str, rows: list[StateRecord], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, rows, targets="decoded", unlabelled=level)
    nano = load_backbone("nano")
    texts = generate(nano, [record.level(level).text for record in rows], MOST, batch_size=1)
    items = trainer.train_dataset.items
    assert len(items) == 5
    for item, record, text in zip(items, rows, texts, strict=True):
        assert text is not None
        assert item.answer.tolist() == greedy(nano.model, item.prompts[int(level[1])].tolist())
        assert nano.tokenizer.decode(item.answer, skip_special_tokens=True) == text.text
        assert len(item.answer) == text.new_tokens + 1
        assert not item.labelled
        assert (item.gold is None) == (record.target is None)
    # the gold one keeps its hard loss
    assert nano.tokenizer.decode(items[0].with_gold.answer[:-1]) == rows[0].target
    assert len({tuple(item.answer.tolist()) for item in items}) > 2


def test_they_are_decoded_once(rows: list[StateRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second trainer reads them; one killed between two files decodes only what is missing."""
    asked: list[int] = []

    def counted(backbone: Any, examples: Sequence[Example], *more: Any) -> list[list[int]]:
        asked.append(len(examples))
        return answer(backbone, examples, *more)

    monkeypatch.setattr(targets, "answer", counted)

    def answers(**changes: Any) -> list[list[int]]:
        asked.clear()
        told = {"targets": "decoded", "cache": str(tmp_path / "cache"), "decode_batch": 2, **changes}
        return [item.answer.tolist() for item in trainer_of(tmp_path / "r", rows, **told).train_dataset.items]

    once = answers()
    assert asked == [2, 2, 1]
    assert answers() == once
    assert not asked
    files = sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert len(files) == 3
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-20])
    assert answers() == once
    assert 0 < sum(asked) < 5
    # all they follow from: weights, level, length
    for changes in ({"model": "nano-untrained"}, {"unlabelled": "x1"}, {"max_decoded": 9}):
        answers(**changes)
        assert sum(asked) == 5, changes


# the student's own


class Asked:
    """What `StudentAnswers` gave, and the weights at that time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[int, Any, dict[str, list[int]]]] = []
        at = StudentAnswers.at

        def noted(own: StudentAnswers, step: int, total: int) -> Any:
            state = torch.get_rng_state()
            answers = at(own, step, total)
            assert torch.equal(torch.get_rng_state(), state)
            assert own.backbone.model.training
            self.given.append((step, copy.deepcopy(own.backbone.model).eval(), dict(answers)))
            return answers

        monkeypatch.setattr(StudentAnswers, "at", noted)


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, alpha=4)], ids=["full", "lora"])
def test_answers_are_the_students_from_x0_at_the_weights_of_the_refresh(
    lora: LoraConfig | None, rows: list[StateRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    settings = {"targets": "on_policy", "gradient_checkpointing": True, "max_steps": 5}
    trainer = trainer_of(tmp_path, rows, peft_config=lora, **settings)
    prompts = {item.id: item.prompts[0].tolist() for item in trainer.train_dataset.items}
    trainer.train()
    assert [step for step, _, _ in asked.given] == [0, 1, 2, 3, 4]
    models = {step: model for step, model, _ in asked.given}
    answers: dict[str, set[tuple[int, ...]]] = {}
    for step, _, given in asked.given:
        places = trainer._order.batch(step)
        assert given.keys() >= {trainer.train_dataset.items[place].id for place in places}
        for name, ids in given.items():
            # the second step of two takes the answers of the weights before the first
            assert ids == greedy(models[step - step % 2], prompts[name])
            answers.setdefault(name, set()).add(tuple(ids))
    assert any(len(given) > 1 for given in answers.values())  # other weights answer otherwise
    assert not (tmp_path / "cache").exists()  # nothing is decoded beforehand


def test_samples_are_those_of_the_seed_and_of_the_distribution(
    make_record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of lengths that differ, so that batches are the same in whatever order the questions come
    asked, rows = Asked(monkeypatch), [make_record(n, words=10 + 8 * n) for n in range(5)]

    def first(number: int, **settings: Any) -> list[list[int]]:
        told = {"targets": "on_policy", "batch_size": 5, "max_steps": 1, **settings}
        trainer_of(tmp_path / f"r{number}", rows, **told).train()
        found = asked.given.pop()[2]
        return [found[name] for name in sorted(found)]

    sampled = first(0, temperature=1.0)
    assert sampled == first(1, temperature=1.0)
    assert sampled != first(2, temperature=1.0, seed=1)
    greedily = first(3)
    assert sampled != greedily
    # the less the temperature, the nearer to the greedy answer
    assert first(4, temperature=1e-4) == greedily


SCRIPT = """
import json, sys
from pathlib import Path
from remind import PRAConfig, PRATrainer
from remind.alignment import targets
from remind.alignment.targets import StudentAnswers

written, answer = [], targets.answer
def counted(backbone, examples, *more):
    written.append(len(examples))
    return answer(backbone, examples, *more)
targets.answer = counted
folder, count = Path(sys.argv[1]), sys.argv[2]
rows = json.loads((folder / "rows.json").read_text())
given, at = [], StudentAnswers.at
def noted(*arguments):
    given.append(dict(at(*arguments)))
    return given[-1]
StudentAnswers.at = noted
told = dict(max_decoded=10, decode_batch=2, batch_size=4, warmup_steps=0, learning_rate=1e-3, max_steps=2)
told |= dict(disable_tqdm=True, refresh_steps=2, report_to="none")
decoded = PRATrainer("nano", PRAConfig(str(folder / f"decoded-{count}"), targets="decoded", **told), rows)
found = [item.answer.tolist() for item in decoded.train_dataset.items]
trainer = PRATrainer("nano", PRAConfig(str(folder / f"on-policy-{count}"), targets="on_policy", **told), rows)
trainer.train()
(folder / f"{count}-{trainer.args.process_index}.json").write_text(json.dumps([sum(written), found, given]))
"""


@pytest.mark.slow
def test_two_processes_answer_as_one(rows: list[StateRecord], tmp_path: Path, runs: Any) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([runs.row(record) for record in rows]))
    (tmp_path / "script.py").write_text(SCRIPT)
    for processes in (1, 2):
        started = Forked(tmp_path / "script.py", tmp_path, processes, processes=processes)
        _, errors = started.communicate(timeout=240)
        assert started.returncode == 0, errors[-3000:]
    (count, *one), *both = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    # answers of the first two steps are of the same weights
    assert [found for _, *found in both] == [one, one]
    # each has written a share of them: of three batches each time
    assert (count, [own for own, *_ in both]) == (10, [6, 4])


def one_logit(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


def test_hard_losses_are_at_gold_answers_and_edges_at_the_students(rows: list[StateRecord], tmp_path: Path) -> None:
    """The metrics of a step against cross-entropies by hand."""
    trainer = trainer_of(tmp_path, rows, targets="on_policy", batch_size=5, max_steps=1)
    model, items = copy.deepcopy(trainer.model).eval(), trainer.train_dataset.items
    trainer.train()

    def cross_entropy(item: Example, answer: list[int]) -> float:
        prompt = item.prompts[0].tolist()
        with torch.no_grad():
            terms = [-one_logit(model, prompt + answer[:n]).log_softmax(-1)[t] for n, t in enumerate(answer)]
        return float(torch.stack(terms).mean())

    (row,) = read_metrics(tmp_path)
    hard = [cross_entropy(item, item.answer.tolist()) for item in items if len(item.answer)]
    own = [cross_entropy(item, greedy(model, item.prompts[0].tolist())) for item in items]
    assert row["hard"] == pytest.approx(sum(hard) / 5, rel=1e-4)
    assert row["ce0"] == pytest.approx(sum(own) / 5, rel=1e-4)
    assert row["answer_tokens"] == sum(len(greedy(model, item.prompts[0].tolist())) for item in items)
