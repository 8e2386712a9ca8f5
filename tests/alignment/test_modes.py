"""Every shipped training config takes a step as it is, only on nano, the bundled sample and the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from remind.alignment import checkpoint
from remind.alignment.config import TrainConfig
from remind.alignment.metrics import read_metrics
from remind.alignment.model import load, marker_id
from remind.alignment.setup import set_up
from remind.alignment.trainer import train
from remind.core.cli import parse
from remind.data.readers import read
from remind.data.sample import sample_path
from remind.pipeline import record_of
from remind.states.parquet import write_manifest, write_part
from remind.states.pyramid import MARKER, AttentionalState, FactualState, ReflectiveState, Segment, Strategy

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = [path.stem for path in sorted(CONFIGS.glob("pra_*.yaml"))]


@pytest.fixture(scope="module")
def sample_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four training questions and two of dev from the bundled sample, each with the first turns of its dialogue."""
    folder = tmp_path_factory.mktemp("sample") / "states"
    number = 0
    for split, most in (("train", 4), ("dev", 2)):
        corpus = read(sample_path() / f"{split}.jsonl")
        dialogues = {dialogue.id: dialogue for dialogue in corpus.dialogues}
        for question in corpus.questions[:most]:
            strategy = Strategy(("Look for what was said.",), speakers=("both",))
            factual = FactualState(dialogues[question.dialogue_id], question, (Segment(0, 3),), strategy)
            state = ReflectiveState(AttentionalState(factual, ((1, 2),)), "They talked.")
            write_part(folder, number, [record_of(state, split)])
            number += 1
    write_manifest(folder, {"inputs": {"sample": "0" * 64}})
    return folder


def told(name: str, states: Path, out: Path, *more: str) -> TrainConfig:
    paths = ["--model", "nano", "--states", str(states), "--out", str(out), "--trainer.max_steps", "1"]
    cfg = parse(TrainConfig, "", ["--config", str(CONFIGS / f"{name}.yaml"), *paths, *more])
    assert isinstance(cfg, TrainConfig)
    return cfg


@pytest.mark.parametrize("name", NAMES)
def test_a_config_takes_a_step(name: str, sample_states: Path, tmp_path: Path) -> None:
    cfg = told(name, sample_states, tmp_path / "run", *([] if name == "pra_nano" else ["--trainer.eval_limit", "1"]))
    if cfg.quantise is not None and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed: 4 bits are not tested")
    run = train(cfg)
    row = next(row for row in read_metrics(run) if row["kind"] == "train")
    assert row["step"] == 1
    assert row["grad_norm"] > 0
    weights = load_file(checkpoint.folder_of(run, 1) / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())
    assert any("lora" in key for key in weights) == (cfg.lora is not None)
    expected = torch.bfloat16 if cfg.dtype == "bfloat16" and cfg.lora is None else torch.float32
    assert {value.dtype for value in weights.values()} == {expected}
    moments = load_file(checkpoint.folder_of(run, 1) / "optimizer.safetensors")
    codes = [key for key, value in moments.items() if value.dtype == torch.int8]
    assert bool(codes) == (cfg.trainer.optimizer == "adamw8bit")


def test_a_killed_and_resumed_run_in_bfloat16_is_the_same_to_the_bit(sample_states: Path, tmp_path: Path) -> None:
    loop = {"save_every": "1", "keep_last": "9", "eval_every": "0"}
    more = [word for key, value in loop.items() for word in (f"--trainer.{key}", value)] + ["--marker_token", "true"]
    runs = []
    for name in ("whole", "broken"):
        cfg = told("pra_qwen3_vl_8b_full", sample_states, tmp_path / name, *more, "--trainer.max_steps", "4")
        runs.append(train(cfg))
    for step in (3, 4):
        # as if the process had died while step 3 was computed
        folder = checkpoint.folder_of(runs[1], step)
        (folder / "model.safetensors").write_bytes(b"")
    cfg.resume = True
    train(cfg)
    for file in ("model", "optimizer"):
        one, two = (load_file(checkpoint.folder_of(run, 4) / f"{file}.safetensors") for run in runs)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
    first, last = (load_file(checkpoint.folder_of(runs[0], step) / "model.safetensors") for step in (1, 4))
    assert any(not torch.equal(first[key], last[key]) for key in first)


def test_the_marker_is_in_what_is_trained_on(sample_states: Path, tmp_path: Path) -> None:
    cfg = told("pra_nano", sample_states, tmp_path / "run", "--marker_token", "true")
    parts = set_up(cfg)
    token = marker_id(load(cfg).tokenizer)
    assert token is not None, MARKER
    for example in parts.data.train.items:
        # two in the dialogue, one in the reminder; none under x0
        assert [int((prompt == token).sum()) for prompt in example.prompts] == [0, 3, 3]
    parts.folder.close()
