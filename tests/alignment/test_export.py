"""Export: a folder that opens by itself and gives the logits of the trained model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, Qwen3VLForConditionalGeneration

from remind.alignment.config import LoraConfig
from remind.alignment.model import add_marker, marker_id, opened
from remind.core.errors import ConfigError, ModelError
from remind.core.files import read_json
from remind.models.backbone import load_backbone
from remind.models.chat import end_token_id, prompt_ids
from remind.models.nano import nano_config, save_nano
from remind.states.pyramid import MARKER
from remind.train_pra.config import DataConfig, ExportConfig, read_config
from remind.train_pra.export import _write, export
from remind.train_pra.run import nf4, train

TEXT = f"Conversation\n{MARKER}\nBen: the lamp is blue.\n{MARKER}\nQuestion: colour?\n"
LORA = LoraConfig(r=4, alpha=8)
MARKED = DataConfig(unlabelled="skip", marker_token=True)


@pytest.fixture(scope="module")
def make_run(runs: Any, states: Path) -> Callable[..., Path]:
    """Four steps, of which the second and the last are saved."""

    def make(folder: Path, lora: LoraConfig | None, **more: Any) -> Path:
        told = {"learning_rate": 1e-2, "max_steps": 4, "batch_size": 2, **more}
        return train(runs.config(states, folder / "run", lora=lora, **told))

    return make


@pytest.fixture(scope="module", params=[None, LORA], ids=["full", "lora"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_run: Any) -> Path:
    out: Path = make_run(tmp_path_factory.mktemp("run"), request.param)
    return out


@torch.no_grad()
def logits(model: Any, tokenizer: Any) -> Tensor:
    output: Tensor = model.eval()(input_ids=torch.tensor([prompt_ids(tokenizer, TEXT)])).logits
    return output


def of_folder(folder: Path) -> Tensor:
    """By transformers alone."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype="auto")
    return logits(model, AutoTokenizer.from_pretrained(folder)).float()


def trained_logits(run: Path, step: int = 4, quantization: Any = None) -> Tensor:
    """By transformers and PEFT alone: of the checkpoint's model, or of the base with its adapters, not merged."""
    cfg, folder = read_config(run), run / f"checkpoint-{step}"
    if cfg.lora is None:
        return of_folder(folder)
    backbone = opened(cfg.model, quantization=quantization)
    if cfg.data.marker_token:
        add_marker(backbone)
    return logits(PeftModel.from_pretrained(backbone.model, folder), backbone.tokenizer)


def test_it_opens_with_transformers_alone_and_says_what_it_was_made_from(run: Path, tmp_path: Path) -> None:
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x")))
    expected, base = trained_logits(run), load_backbone("nano-untrained")
    torch.testing.assert_close(of_folder(out), expected, rtol=1e-4, atol=1e-5)
    assert float((logits(base.model, base.tokenizer) - expected).abs().max()) > 0.01
    card, about = (out / "README.md").read_text(), read_json(out / "training.json")
    assert all(value in card for value in ("0" * 64, f"{about['held_out']['ce0']:.5g}"))
    assert (about["checks"]["merging"] < 1e-4, about["checks"]["opening_again"]) == (True, 0.0)


def test_plain_generation_ends_as_training_does(runs: Any, make_record: Any, tmp_path: Path) -> None:
    """Whatever token the base's own settings name."""
    backbone = load_backbone("nano-untrained")
    backbone.model.generation_config.eos_token_id = 3
    _write(backbone.model, backbone, tmp_path / "exported")
    backbone.model.generation_config.eos_token_id = 3
    rows, tokenizer = [make_record(0)], backbone.tokenizer
    runs.trainer(tmp_path / "r", rows, None, backbone.model, processing_class=tokenizer).save_model(tmp_path / "saved")
    for folder in ("exported", "saved"):
        assert {3, end_token_id(tokenizer)} <= {*GenerationConfig.from_pretrained(tmp_path / folder).eos_token_id}


def test_best_and_precision_and_checkpoints_that_are_not_whole(run: Path, tmp_path: Path) -> None:
    best = read_json(run / "checkpoint-4" / "trainer_state.json")["best_global_step"]
    cfg = ExportConfig(run=str(run), out=str(tmp_path / "x"), checkpoint="best", dtype="bfloat16", overwrite=True)
    out = export(cfg)
    assert read_json(out / "training.json")["step"] == best
    torch.testing.assert_close(of_folder(out), trained_logits(run, best), rtol=0.1, atol=0.1)
    # one that was broken off is passed over, and a damaged one named
    again = Path(shutil.copytree(run, tmp_path / "run"))
    cfg = replace(cfg, run=str(again), checkpoint="last")
    (again / "checkpoint-4" / "trainer_state.json").unlink()
    assert read_json(export(cfg) / "training.json")["step"] == 2
    next((again / "checkpoint-2").glob("*model.safetensors")).write_bytes(b"no")
    with pytest.raises(ModelError, match=r"^[^\n]*checkpoint-2[^\n]*$"):
        export(cfg)


def test_what_cannot_be_exported(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(error: type[Exception], message: str, **settings: Any) -> None:
        with pytest.raises(error, match=message):
            export(ExportConfig(**{"run": str(run), "out": str(tmp_path / "x"), **settings}))

    (tmp_path / "taken").mkdir()
    refused(ConfigError, "exists", out=str(tmp_path / "taken"))
    # neither a folder of something else nor the run itself
    refused(ConfigError, "is not an exported model", out=str(tmp_path / "taken"), overwrite=True)
    refused(ConfigError, "is not an exported model", out=str(run), overwrite=True)
    refused(ConfigError, "not a run folder", run=str(tmp_path))
    if read_config(run).lora is None:
        refused(ConfigError, "more than adapters", adapter_only=True)
    else:
        refused(ModelError, "not the model", base="nano")

    def other(*args: Any, **kwargs: Any) -> Any:
        backbone = load_backbone(*args, **kwargs)
        with torch.no_grad():
            backbone.model.lm_head.weight[5] += 0.1
        return backbone

    monkeypatch.setattr("remind.train_pra.export.load_backbone", other)
    refused(ModelError, "does not give the logits")
    assert {path.name for path in tmp_path.iterdir()} == {"taken"}


def nano_folder(folder: Path, tie: bool, width: int = 64) -> str:
    """Nano's files with a small model: its head tied or not."""
    save_nano(folder, hidden_size=width, layers=2, vision_size=16)
    shape = nano_config(hidden_size=width, layers=2, vision_size=16)
    shape.tie_word_embeddings = tie
    torch.manual_seed(1)
    Qwen3VLForConditionalGeneration(shape).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("tie", "lora"), [(True, None), (True, LORA), (False, LORA)])
def test_the_markers_rows_are_exported(tie: bool, lora: LoraConfig | None, tmp_path: Path, make_run: Any) -> None:
    base = nano_folder(tmp_path / "base", tie)
    run = make_run(tmp_path, lora, model=base, data=MARKED)
    out, expected = export(ExportConfig(run=str(run), out=str(tmp_path / "x"))), trained_logits(run)
    torch.testing.assert_close(of_folder(out), expected, rtol=1e-4, atol=1e-5)
    first, last = opened(base), opened(str(out))
    # going on from it, the marker stays the token it is
    token = add_marker(first)
    assert add_marker(last) == marker_id(last.tokenizer) == token
    rows = [own.model.get_input_embeddings().weight for own in (first, last)]
    assert (last.model.lm_head.weight is rows[1]) == tie
    assert float((rows[1][token] - rows[0][token]).detach().abs().max()) > 1e-4
    if lora is None or not tie:
        return
    # adapters alone go on the base model
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "a"), adapter_only=True))
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert marker_id(tokenizer) == token
    model = PeftModel.from_pretrained(Qwen3VLForConditionalGeneration.from_pretrained(base), out)
    for one in (model, load_backbone(out).model):
        torch.testing.assert_close(logits(one, tokenizer), expected, rtol=1e-5, atol=1e-6)


def test_four_bits(tmp_path: Path, make_run: Any) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing in 4 bits is tested")
    run = make_run(tmp_path, None, model=nano_folder(tmp_path / "base", tie=False))
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x"), quantise="nf4"))
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(out)
    found = {name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    linear = {name for name, module in model.get_decoder().named_modules() if isinstance(module, nn.Linear)}
    assert found == {f"model.language_model.{name}" for name in linear}
    expected = trained_logits(run)
    assert 0 < float((of_folder(out) - expected).abs().max() / expected.abs().max()) < 0.3
    assert 0 < read_json(out / "training.json")["checks"]["quantising"] < 0.3


def test_adapters_trained_on_four_bits(tmp_path: Path, make_run: Any) -> None:
    """They are merged with the values that the bits stand for, not with those of the base before them."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing in 4 bits is tested")
    run = make_run(tmp_path, LORA, model=nano_folder(tmp_path / "base", tie=True), quantise="nf4", data=MARKED)
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x")))
    expected, found = trained_logits(run, quantization=nf4("float32")), of_folder(out)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert float((trained_logits(run) - expected).abs().max()) > 10 * float((found - expected).abs().max())
