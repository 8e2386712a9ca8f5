"""What `PRATrainer` overrides or calls of transformers' private side: a later version that changes it fails here."""

from __future__ import annotations

import inspect
from pathlib import Path

from transformers import Trainer, TrainingArguments

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
