"""What is used of TRL beyond its documented interface: an upgrade that changes it fails here, not in a run."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

trl = pytest.importorskip("trl", reason="needs the extra rl")

#: Methods of GRPOTrainer by name, with the leading parameters that are relied on.
METHODS = {
    "_prepare_inputs": ["self", "generation_batch"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_generate_single_turn": ["self", "prompt_ids", "images", "multimodal_fields", "num_generations"],
    "_get_per_token_logps_and_entropies": ["self", "model", "input_ids", "attention_mask", "logits_to_keep"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "_compute_loss": ["self", "model", "inputs"],
    "_send_telemetry": ["self"],
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_the_trainer(name: str) -> None:
    parameters = list(inspect.signature(getattr(trl.GRPOTrainer, name)).parameters)
    assert parameters[: len(METHODS[name])] == METHODS[name]


def test_the_loss_is_not_scaled_again() -> None:
    assert trl.GRPOTrainer.loss_is_scaled_for_ga is True


def test_options_are_there_with_the_defaults_that_are_changed() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    expected = {"loss_type": "dapo", "beta": 0.0, "use_bias_correction_kl": True, "shuffle_dataset": True}
    assert {name: defaults[name] for name in expected} == expected
    needed = {"steps_per_generation", "num_iterations", "num_generations", "max_completion_length", "temperature"}
    needed |= {"use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_gpu_memory_utilization"}
    assert needed | {"top_p", "disable_dropout", "bf16", "gradient_checkpointing", "epsilon"} <= defaults.keys()


def test_lists_of_any_objects_survive_shuffling_and_splitting() -> None:
    from trl.trainer.grpo_trainer import shuffle_sequence_dict, split_tensor_dict

    marks = [object() for _ in range(4)]
    shuffled = shuffle_sequence_dict({"index": torch.arange(4), "chunk": marks})
    parts = split_tensor_dict(shuffled, 4)
    assert [part["chunk"] for part in parts] == [[marks[int(part["index"])]] for part in parts]
    # what is done instead of this: rows beyond a multiple are lost
    assert sum(len(part["x"]) for part in split_tensor_dict({"x": torch.arange(7)}, 2)) == 6
