"""What `PRATrainer` overrides or calls of transformers' private side: a later version that changes it fails here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Trainer, TrainerCallback, TrainingArguments

from remind.alignment.runs import RunTrainer
from remind.alignment.trainer import PRATrainer

#: Method of Trainer to its parameters after self.
METHODS = {
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_get_grad_norm": ["model", "grad_norm"],
    "_save_checkpoint": ["model", "trial"],
    "_save": ["output_dir", "state_dict"],
    "_save_rng_state": ["output_dir"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_get_learning_rate": [],
}


@pytest.mark.parametrize("name", METHODS)
def test_private_methods_take_what_we_give(name: str) -> None:
    assert list(inspect.signature(getattr(Trainer, name)).parameters)[1:] == METHODS[name]


def overridden() -> list[str]:
    both = {**vars(RunTrainer), **vars(PRATrainer)}
    own = (name for name, value in both.items() if inspect.isfunction(value) and name != "__init__")
    return sorted(name for name in own if hasattr(Trainer, name))


@pytest.mark.parametrize("name", overridden())
def test_what_is_overridden_still_takes_what_transformers_gives(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (PRATrainer, Trainer))
    named = [word for word, parameter in ours.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    assert named == list(theirs)[: len(named)]
    assert len(named) < len(ours) or len(named) == len(theirs)


def body(method: Callable[..., object]) -> str:
    return inspect.getsource(method)


def test_the_loop_is_made_of_what_is_overridden() -> None:
    loop, epoch = body(Trainer._inner_training_loop), body(Trainer._run_epoch)
    assert "self._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)" in loop
    assert "args.eval_on_start" in loop
    assert "self._get_grad_norm(" in epoch
    assert "set_epoch(epoch)" in epoch
    # what we save goes between its own files; trainer_state.json, with our state, is the last before older ones go
    assert "self._save_checkpoint(model, trial)" in body(Trainer._maybe_log_save_evaluate)
    order = (
        "self.save_model(",
        "self._save_rng_state(",
        "cb.state()",
        "self.state.save_to_json(",
        "rotate_checkpoints(",
    )
    places = [body(Trainer._save_checkpoint).index(part) for part in order]
    assert places == sorted(places)


def test_names_beside_the_trainer(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    arguments._n_gpu = 3
    assert arguments.n_gpu == 3
    for event in ("on_optimizer_step", "on_step_end", "on_evaluate", "on_train_begin", "on_step_begin"):
        assert hasattr(TrainerCallback, event)
