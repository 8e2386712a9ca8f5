"""Answers of the model itself: decoded once before training, or the student's own as it learns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from remind.alignment import targets
from remind.alignment.config import LoraConfig
from remind.alignment.examples import Example
from remind.alignment.targets import StudentAnswers, answer
from remind.core.errors import DataError
from remind.models import backbone
from remind.models.backbone import load_backbone
from remind.models.chat import end_token_id, prompt_ids
from remind.states.records import StateRecord

#: Some answers of nano are cut off here, others are not.
MOST = 10
END = end_token_id(load_backbone("nano").tokenizer)
SETTINGS: dict[str, Any] = {"model": "nano", "max_decoded": MOST, "decode_batch": 2, "batch_size": 2}


@pytest.fixture(scope="module")
def rows(make_record: Any) -> list[StateRecord]:
    """Four labelled questions and one without an answer; their lengths differ."""
    return [make_record(n) for n in range(4)] + [make_record(4, target=None)]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """An answer with its end token, by whole forwards without padding or cache, one token after the other."""
    new: list[int] = []
    while len(new) < MOST and END not in new:
        with torch.no_grad():
            new.append(int(model(input_ids=torch.tensor([prompt + new]), use_cache=False).logits[0, -1].argmax()))
    return new if END in new else [*new, END]


def test_decoded_answers_are_greedy_and_decoded_once(runs: Any, rows: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A second trainer reads them; one killed between two files decodes only what is missing."""
    asked: list[int] = []

    def counted(backbone: Any, examples: Sequence[Example], *more: Any) -> list[list[int]]:
        asked.append(len(examples))
        return answer(backbone, examples, *more)

    monkeypatch.setattr(targets, "answer", counted)

    def items(**changes: Any) -> list[Example]:
        asked.clear()
        told = SETTINGS | {"targets": "decoded", "cache": str(tmp_path / "cache")} | changes
        return list(runs.trainer(tmp_path / "r", rows, **told).train_dataset.items)

    nano = load_backbone("nano")
    for level in ("x1", "x2"):
        found = items(unlabelled=level)
        assert asked == [2, 2, 1]
        for item, record in zip(found, rows, strict=True):
            assert item.answer.tolist() == greedy(nano.model, item.prompts[int(level[1])].tolist())
            assert not item.labelled
            assert (item.gold is None) == (record.target is None)
    # the gold one keeps its hard loss
    assert nano.tokenizer.decode(found[0].with_gold.answer[:-1]) == rows[0].target  # type: ignore[union-attr]
    once = [item.answer.tolist() for item in found]
    assert [item.answer.tolist() for item in items()] == once
    assert not asked
    files = sorted(filter(Path.is_file, (tmp_path / "cache").rglob("*")), key=lambda path: path.stat().st_mtime)
    files[-1].unlink()
    files[-2].write_bytes(files[-2].read_bytes()[:-20])
    assert [item.answer.tolist() for item in items()] == once
    assert 0 < sum(asked) < 5
    # other weights answer otherwise
    items(model="nano-untrained")
    assert sum(asked) == 5


def test_questions_that_cannot_be_answered_are_left_out(runs: Any, rows: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Rather than distilled at their gold answers: without the state to answer from, or without room."""
    told = SETTINGS | {"targets": "decoded", "lambda_hard": 0.0, "edges": [(0, 1)]}
    lacking = [{name: value for name, value in runs.row(record).items() if name != "x2"} for record in rows]
    with pytest.raises(DataError, match="nothing to train on; questions left out: 5 without an answer"):
        runs.trainer(tmp_path / "a", lacking, **told)
    nano = load_backbone("nano")
    brief = [{**runs.row(record), "target": "tea"} for record in rows]
    lengths = [len(prompt_ids(nano.tokenizer, row["x2"])) for row in brief]
    monkeypatch.setattr(backbone, "max_length", lambda *_: max(lengths) + MOST - 1)
    found = runs.trainer(tmp_path / "b", brief, **told).train_dataset
    assert found.left_out == {"without an answer": lengths.count(max(lengths))}
    assert not any(item.labelled for item in found.items)


def test_a_run_on_its_own_answers_can_be_made_longer(runs: Any, rows: Any, tmp_path: Path) -> None:
    told = SETTINGS | {"targets": "on_policy", "refresh_steps": 4, "lr_scheduler_type": "constant"}
    told["learning_rate"] = 2e-2
    for out, steps in (("whole", 4), ("longer", 2), ("longer", 4)):
        trainer = runs.trainer(tmp_path / out, rows, max_steps=steps, **told)
        trainer.train(resume_from_checkpoint=True)
    runs.assert_same_runs(tmp_path / "longer", tmp_path / "whole", 4)


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, alpha=4)], ids=["full", "lora"])
def test_own_answers_are_of_the_last_refresh(lora: Any, runs: Any, rows: Any, tmp_path: Path, monkeypatch: Any) -> None:
    given: list[tuple[Any, dict[str, list[int]]]] = []
    at = StudentAnswers.at

    def noted(own: StudentAnswers, step: int) -> Any:
        state = torch.get_rng_state()
        answers = at(own, step)
        assert torch.equal(torch.get_rng_state(), state)
        assert own.backbone.model.training
        given.append((copy.deepcopy(own.backbone.model).eval(), dict(answers)))
        return answers

    monkeypatch.setattr(StudentAnswers, "at", noted)
    told = SETTINGS | {"targets": "on_policy", "gradient_checkpointing": True, "refresh_steps": 2}
    trainer = runs.trainer(tmp_path, rows, peft_config=lora, max_steps=5, learning_rate=2e-2, **told)
    prompts = {item.id: item.prompts[0].tolist() for item in trainer.train_dataset.items}
    trainer.train()
    answers: dict[str, set[tuple[int, ...]]] = {}
    for step, (_, own) in enumerate(given):
        assert own.keys() >= {trainer.train_dataset.items[place].id for place in trainer._order.batch(step)}
        for name, ids in own.items():
            # the second step of two takes the answers of the weights before the first
            assert ids == greedy(given[step - step % 2][0], prompts[name])
            answers.setdefault(name, set()).add(tuple(ids))
    assert any(len(own) > 1 for own in answers.values())  # other weights answer otherwise
