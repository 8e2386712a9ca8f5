"""Export: a folder that opens by itself and gives the logits of the trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from remind.alignment import checkpoint
from remind.alignment.config import read_config
from remind.alignment.model import load, trainable
from remind.alignment.trainer import LoraConfig, TrainConfig, TrainerConfig, train
from remind.backbone import load_backbone, prompt_ids
from remind.errors import ConfigError, ModelError
from remind.export import ExportConfig, export
from remind.pyramid import Rendered
from remind.states import StateRecord, write_manifest, write_part

TEXT = "Conversation\nBen: the lamp is blue.\nQuestion: colour?\n"


def record(number: int, split: str) -> StateRecord:
    level = Rendered(f"Conversation\nAna: lamp {number}\nQuestion: which?\n", (0, 12), (), (), ())
    return StateRecord(
        question_id=f"q{number}", dialogue_id=f"d{number}", split=split, format="direct", question="which?", options=(),
        answers=("a",), dimension=None, category=None, visual=False, evidence=(f"t{number}",), evidence_lines=(),
        evidence_found=(), images=(), images_found=(), target=f"<answer>{number}</answer>", x0=level, x1=level,
        x2=level,
    )  # fmt: skip


def run_of(folder: Path, lora: LoraConfig | None, dev: bool = True) -> Path:
    states = folder / "states"
    for number, split in enumerate(["train"] * 4 + (["dev"] if dev else [])):
        write_part(states, number, [record(number, split)])
    write_manifest(states, {"inputs": {"talk.json": "ab" * 32}})
    loop = TrainerConfig(lr=1e-2, max_steps=4, batch_size=2, save_every=2, eval_every=2)
    return train(TrainConfig(states=str(states), out=str(folder / "run"), lora=lora, trainer=loop))


@pytest.fixture(scope="module", params=["full", "lora"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp(request.param), LoraConfig(r=4, alpha=8) if request.param == "lora" else None)


@torch.no_grad()
def logits(model: Any, tokenizer: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=torch.tensor([prompt_ids(tokenizer, TEXT)])).logits
    return found


def trained_logits(run: Path, folder: Path) -> Tensor:
    """Of the base model with the checkpoint's parameters, adapters not merged."""
    cfg = read_config(run)
    backbone = load(cfg)
    model = trainable(backbone.model, cfg.lora)
    checkpoint.restore_model(folder, model)
    return logits(model, backbone.tokenizer)


def test_it_opens_with_transformers_alone(run: Path, tmp_path: Path) -> None:
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x")))
    model = Qwen3VLForConditionalGeneration.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    expected = trained_logits(run, checkpoint.folder_of(run, 4))
    torch.testing.assert_close(logits(model, tokenizer), expected, rtol=1e-4, atol=1e-5)
    base = load_backbone("nano")
    assert float((logits(base.model, base.tokenizer) - expected).abs().max()) > 0.01
    assert tokenizer.chat_template == base.tokenizer.chat_template
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert not any(path.suffix in {".bin", ".pt", ".pkl"} for path in out.iterdir())
    generated = model.generate(torch.tensor([prompt_ids(tokenizer, TEXT)]), max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > len(prompt_ids(tokenizer, TEXT))


def test_the_card_says_what_it_was_made_from(run: Path, tmp_path: Path) -> None:
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x")))
    card = (out / "README.md").read_text()
    about = json.loads((out / "training.json").read_text())
    assert "ab" * 32 in card
    assert about["data"]["manifest_sha256"] in card
    assert f"{about['held_out']['ce0']:.4f}" in card
    assert about["held_out"]["split"] == "dev"
    assert about["checks"]["merging"] < 1e-4
    assert about["checks"]["opening_again"] == 0.0


def test_best_and_precision(run: Path, tmp_path: Path) -> None:
    best = json.loads((run / "best.json").read_text())["step"]
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x"), checkpoint="best", dtype="bfloat16"))
    assert json.loads((out / "training.json").read_text())["step"] == best
    model = load_backbone(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    expected = trained_logits(run, checkpoint.folder_of(run, best))
    torch.testing.assert_close(logits(model.model, model.tokenizer).float(), expected, rtol=0.1, atol=0.1)


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = run_of(tmp_path, None, dev=False)
    (checkpoint.folder_of(run, 4) / "model.safetensors").write_bytes(b"")
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x")))
    assert json.loads((out / "training.json").read_text())["step"] == 2
    with pytest.raises(ConfigError, match="no best checkpoint"):
        export(ExportConfig(run=str(run), out=str(tmp_path / "y"), checkpoint="best"))
    assert not (tmp_path / "y").exists()


def test_what_cannot_be_exported(run: Path, tmp_path: Path) -> None:
    from remind.testbed.nano import nano_model, save_nano

    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        export(ExportConfig(run=str(run), out=str(tmp_path / "taken")))
    with pytest.raises(ConfigError, match="not a run folder"):
        export(ExportConfig(run=str(tmp_path), out=str(tmp_path / "x")))
    save_nano(tmp_path / "other")
    nano_model(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="not the model"):
        export(ExportConfig(run=str(run), out=str(tmp_path / "x"), base=str(tmp_path / "other")))
    assert not (tmp_path / "x").exists()
