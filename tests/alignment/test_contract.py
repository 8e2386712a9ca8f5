"""What `PRATrainer` overrides or calls of transformers' private side: a later version that changes it fails here."""

from __future__ import annotations

import inspect
from pathlib import Path

from transformers import Trainer, TrainingArguments

from remind.alignment.trainer import PRATrainer, RunTrainer

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


def test_private_names_are_what_we_take_them_for(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    arguments._n_gpu = 3
    assert arguments.n_gpu == 3
    for name, expected in METHODS.items():
        assert list(inspect.signature(getattr(Trainer, name)).parameters)[1:] == expected


def test_what_is_overridden_still_takes_what_transformers_gives() -> None:
    both = vars(RunTrainer) | vars(PRATrainer)
    own = (name for name, value in both.items() if inspect.isfunction(value) and name != "__init__")
    for name in filter(lambda name: hasattr(Trainer, name), own):
        ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (PRATrainer, Trainer))
        named = [word for word, parameter in ours.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
        assert named == list(theirs)[: len(named)], name
        assert len(named) < len(ours) or len(named) == len(theirs), name


def test_the_loop_is_made_of_what_is_overridden() -> None:
    loop, epoch, save = map(
        inspect.getsource, (Trainer._inner_training_loop, Trainer._run_epoch, Trainer._save_checkpoint)
    )
    assert "self._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)" in loop
    assert "args.eval_on_start" in loop
    assert "self._get_grad_norm(" in epoch
    assert "set_epoch(epoch)" in epoch
    assert "self._save_checkpoint(model, trial)" in inspect.getsource(Trainer._maybe_log_save_evaluate)
    # what we save goes between its own files; trainer_state.json, with our state, is the last before older ones go
    order = (
        "self.save_model(",
        "self._save_rng_state(",
        "cb.state()",
        "self.state.save_to_json(",
        "rotate_checkpoints(",
    )
    places = [save.index(part) for part in order]
    assert places == sorted(places)
