"""Rows that share a prompt against the same traces row by row, as TRL computes them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from two_roles import END, PAD

pytest.importorskip("trl", reason="needs the extra rl")

from test_trainer import make

from remind.memory_training.episodes import Scores, Trace
from remind.memory_training.packing import can_pack, pack


def group(seed: int) -> list[list[Trace]]:
    """Four rollouts of two roles; prompts of 1 and 9 tokens, or of 5 and 12, completions of 0 to 5."""
    draw = random.Random(seed)
    sizes = {"first": 1, "second": 9} if seed % 2 else {"first": 12, "second": 5}
    prompts = {role: [draw.randint(2, 7) for _ in range(size)] for role, size in sizes.items()}

    def completion() -> list[int]:
        return [*(draw.randint(1, 7) for _ in range(draw.randint(0, 4))), END][: draw.randint(0, 5)]

    return [[Trace(role, prompt, completion()) for role, prompt in prompts.items()] for _ in range(4)]


@pytest.mark.parametrize("seed", range(2))
def test_log_probabilities_and_gradients_are_those_of_single_rows(
    seed: int, policy: Path, tokenizer: Any, tmp_path: Path
) -> None:
    trainer = make(policy, tokenizer, tmp_path)
    scores = Scores({"first": [0.0, 1.0, 0.5, 0.2], "second": [1.0, 0.0, 0.3, 0.3]}, {"first": [4.0, 1.0, 1.0, 4.0]})
    packed = trainer._chunk([scores], group(seed), 8, 1)
    assert packed.packed is not None
    assert packed.packed.ids.shape[0] == 2
    found = []
    for chunk in (packed, replace(packed, packed=None)):
        chunk = trainer._with_references(chunk, check=True)
        trainer.model.zero_grad()
        logp = trainer._logp(trainer.model, chunk)
        loss = trainer.compute_loss(trainer.model, {"chunk": [chunk]})
        loss.backward()
        gradients = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
        found.append([logp.detach(), chunk.ref, loss.detach(), *gradients])
    assert len(found[0]) == len(found[1]) > 10
    assert found[0][0].abs().max() > 1
    assert any(gradient.abs().max() > 1e-3 for gradient in found[0][3:])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=2e-6)


def test_a_completion_sees_its_prompt_and_itself() -> None:
    packed = pack([[2, 3], [2, 3], [4]], [[5, 6], [7], [END]], PAD)
    assert packed is not None
    assert packed.ids.tolist() == [[2, 3, 5, 3], [4, PAD, PAD, PAD]]
    assert packed.positions[0].tolist() == [0, 1, 2, 1]
    assert packed.labels.tolist() == [[-100, 5, 6, 7], [END, -100, -100, -100]]
    assert packed.visible[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert packed.places.tolist() == [[1, 2], [3, 0], [4, 0]]
    # a row that sees nothing would be no number
    assert packed.visible.any(-1).all()


def test_what_would_be_no_less_work_is_not_packed() -> None:
    assert pack([[2], [2]], [[6] * 9, [7] * 9], PAD) is None
    assert pack([[2], []], [[6], [7]], PAD) is None


def test_other_models_take_rows_as_they_are(policy: Path, tokenizer: Any, tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "qwen3", "sliding_window": None, "_attn_implementation": "sdpa"}
    assert can_pack(SimpleNamespace(**config))
    for change in ({"model_type": "mamba"}, {"sliding_window": 8}, {"_attn_implementation": "flash_attention_2"}):
        assert not can_pack(SimpleNamespace(**config | change))
    trainer = make(policy, tokenizer, tmp_path)
    trainer.model.config._attn_implementation = "eager"
    assert trainer._chunk([Scores({"first": [0.0] * 4, "second": [0.0] * 4})], group(0), 8, 1).packed is None
