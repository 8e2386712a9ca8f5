"""Export: a folder that opens by itself and gives the logits of the trained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from remind.alignment.config import LoraConfig
from remind.alignment.model import add_marker, marker_id, opened
from remind.core.errors import ConfigError, ModelError
from remind.models.backbone import load_backbone
from remind.models.chat import prompt_ids
from remind.models.nano import nano_config, nano_model, nano_tokenizer, save_nano
from remind.states.pyramid import MARKER
from remind.train_pra.config import DataConfig, ExportConfig
from remind.train_pra.export import export
from remind.train_pra.run import nf4, read_config, train, trained_backbone

TEXT = f"Conversation\n{MARKER}\nBen: the lamp is blue.\n{MARKER}\nQuestion: colour?\n"
LORA = LoraConfig(r=4, alpha=8)
MARKED = DataConfig(unlabelled="skip", marker_token=True)


@pytest.fixture(scope="module")
def make_run(runs: Any, states: Path) -> Callable[..., Path]:
    """Four steps, of which the second and the last are saved."""

    def make(folder: Path, lora: LoraConfig | None, states: Path = states, **more: Any) -> Path:
        told = {"learning_rate": 1e-2, "max_steps": 4, "batch_size": 2, **more}
        return train(runs.config(states, folder / "run", lora=lora, **told))

    return make


@pytest.fixture(scope="module", params=["full", "lora"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_run: Any) -> Path:
    out: Path = make_run(tmp_path_factory.mktemp(request.param), LORA if request.param == "lora" else None)
    return out


@torch.no_grad()
def logits(model: Any, tokenizer: Any) -> Tensor:
    output: Tensor = model.eval()(input_ids=torch.tensor([prompt_ids(tokenizer, TEXT)])).logits
    return output


def trained_logits(run: Path, step: int = 4, quantization: Any = None) -> Tensor:
    """By transformers and PEFT alone: of the checkpoint's model, or of the base with its adapters, not merged."""
    from peft import PeftModel

    cfg, folder = read_config(run), run / f"checkpoint-{step}"
    if cfg.lora is None:
        model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, cfg.dtype))
        return logits(model, AutoTokenizer.from_pretrained(folder))
    backbone = opened(cfg.model, quantization=quantization)
    if cfg.data.marker_token:
        add_marker(backbone)
    return logits(PeftModel.from_pretrained(backbone.model, folder), backbone.tokenizer)


def test_it_opens_with_transformers_alone_and_says_what_it_was_made_from(run: Path, tmp_path: Path) -> None:
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x")))
    model = Qwen3VLForConditionalGeneration.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    expected = trained_logits(run)
    torch.testing.assert_close(logits(model, tokenizer), expected, rtol=1e-4, atol=1e-5)
    base = load_backbone("nano-untrained")
    assert float((logits(base.model, base.tokenizer) - expected).abs().max()) > 0.01
    assert tokenizer.chat_template == base.tokenizer.chat_template
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert not any(path.suffix in {".bin", ".pt", ".pkl"} for path in out.iterdir())
    generated = model.generate(torch.tensor([prompt_ids(tokenizer, TEXT)]), max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > len(prompt_ids(tokenizer, TEXT))
    card, about = (out / "README.md").read_text(), json.loads((out / "training.json").read_text())
    for value in ("0" * 64, about["data"]["manifest_sha256"], f"{about['held_out']['ce0']:.5g}"):
        assert value in card
    assert about["held_out"]["split"] == "dev"
    assert about["checks"]["merging"] < 1e-4
    assert about["checks"]["opening_again"] == 0.0
    again = trained_backbone(run)
    torch.testing.assert_close(logits(again.model, again.tokenizer), expected, rtol=1e-5, atol=1e-6)


def test_best_and_precision(run: Path, tmp_path: Path) -> None:
    best = json.loads((run / "checkpoint-4" / "trainer_state.json").read_text())["best_global_step"]
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x"), checkpoint="best", dtype="bfloat16"))
    assert json.loads((out / "training.json").read_text())["step"] == best
    model = load_backbone(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    expected = trained_logits(run, best)
    torch.testing.assert_close(logits(model.model, model.tokenizer).float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_checkpoint_that_was_broken_off_is_passed_over_and_a_damaged_one_named(
    lora: LoraConfig | None, tmp_path: Path, make_run: Any, make_states: Any, make_record: Any
) -> None:
    run = make_run(tmp_path, lora, states=make_states(tmp_path / "s", [make_record(n) for n in range(4)]))
    cfg = ExportConfig(run=str(run), out=str(tmp_path / "x"), overwrite=True)
    (run / "checkpoint-4" / "trainer_state.json").unlink()
    assert json.loads((export(cfg) / "training.json").read_text())["step"] == 2
    with pytest.raises(ConfigError, match="no best checkpoint"):
        export(replace(cfg, out=str(tmp_path / "y"), checkpoint="best"))
    assert not (tmp_path / "y").exists()
    (run / "checkpoint-2" / ("model.safetensors" if lora is None else "adapter_model.safetensors")).write_bytes(b"no")
    with pytest.raises(ModelError, match=r"^[^\n]*checkpoint-2[^\n]*$"):
        export(cfg)
    assert json.loads((tmp_path / "x" / "training.json").read_text())["step"] == 2


def test_what_cannot_be_exported(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(error: type[Exception], message: str, **settings: Any) -> None:
        with pytest.raises(error, match=message):
            export(ExportConfig(**{"run": str(run), "out": str(tmp_path / "x"), **settings}))

    (tmp_path / "taken").mkdir()
    refused(ConfigError, "exists", out=str(tmp_path / "taken"))
    refused(ConfigError, "not a run folder", run=str(tmp_path))
    save_nano(tmp_path / "other")
    nano_model(seed=1).save_pretrained(tmp_path / "other")
    if read_config(run).lora is None:
        refused(ConfigError, "more than adapters", adapter_only=True)
    else:
        refused(ModelError, "not the model", base=str(tmp_path / "other"))
        refused(ConfigError, "leave out", adapter_only=True, dtype="bfloat16")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "bitsandbytes", None)
        refused(ModelError, r"pip install 'remind-toolkit\[gpu\]'", quantise="nf4")

    def other(*args: Any, **kwargs: Any) -> Any:
        backbone = load_backbone(*args, **kwargs)
        with torch.no_grad():
            backbone.model.lm_head.weight[5] += 0.1
        return backbone

    monkeypatch.setattr("remind.train_pra.export.load_backbone", other)
    refused(ModelError, "does not give the logits")
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "other"}


def nano_folder(folder: Path, tie: bool, full: bool = False) -> Path:
    """Nano's files with a small model: its head tied or not, its embedding with a row to spare or without."""
    save_nano(folder, hidden_size=64, layers=2, vision_size=16)
    shape = nano_config(hidden_size=64, layers=2, vision_size=16)
    shape.tie_word_embeddings = tie
    shape.text_config.vocab_size = len(nano_tokenizer()) if full else shape.text_config.vocab_size
    torch.manual_seed(1)
    Qwen3VLForConditionalGeneration(shape).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("full", [False, True], ids=["spare row", "grown"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_the_markers_rows_are_exported(
    tie: bool, lora: LoraConfig | None, full: bool, tmp_path: Path, make_run: Any
) -> None:
    base = nano_folder(tmp_path / "base", tie, full)
    run = make_run(tmp_path, lora, model=str(base), data=MARKED)
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x")))
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    token = marker_id(tokenizer)
    assert token is not None
    assert prompt_ids(tokenizer, TEXT).count(token) == 2
    expected = trained_logits(run)
    torch.testing.assert_close(logits(model, tokenizer), expected, rtol=1e-4, atol=1e-5)
    rows = model.get_input_embeddings().weight
    assert (model.lm_head.weight is rows) == tie
    start_of = opened(str(base))
    add_marker(start_of)
    first = start_of.model
    for trained, start in ((rows, first.get_input_embeddings().weight), (model.lm_head.weight, first.lm_head.weight)):
        if tie or lora is None or trained is rows:
            assert float((trained[token] - start[token]).detach().abs().max()) > 1e-4
    # going on from it, the marker stays the token it is
    again = opened(str(out))
    assert add_marker(again) == token
    assert torch.equal(again.model.get_input_embeddings().weight, rows)


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marker"])
def test_adapters_alone_go_on_the_base_model(marked: bool, tmp_path: Path, make_run: Any) -> None:
    from peft import PeftModel

    base, data = nano_folder(tmp_path / "base", tie=True), DataConfig(unlabelled="skip", marker_token=marked)
    run = make_run(tmp_path, LORA, model=str(base), data=data)
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x"), adapter_only=True))
    weights = load_file(out / "adapter_model.safetensors")
    assert sum(value.numel() for value in weights.values()) < 50_000
    assert not any(path.suffix in {".bin", ".pt", ".pkl"} for path in out.iterdir())
    adapters = json.loads((out / "adapter_config.json").read_text())
    assert adapters["base_model_name_or_path"] == str(base)
    plain = Qwen3VLForConditionalGeneration.from_pretrained(base)
    model = PeftModel.from_pretrained(plain, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (marker_id(tokenizer) is not None) == marked
    expected = trained_logits(run)
    torch.testing.assert_close(logits(model, tokenizer), expected, rtol=1e-5, atol=1e-6)
    opened = load_backbone(out)
    torch.testing.assert_close(logits(opened.model, opened.tokenizer), expected, rtol=1e-5, atol=1e-6)
    assert json.loads((out / "training.json").read_text())["data"]["manifest_sha256"] in (out / "README.md").read_text()
    assert "library_name: peft" in (out / "README.md").read_text()


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_four_bits(tie: bool, tmp_path: Path, make_run: Any) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing in 4 bits is tested")
    run = make_run(tmp_path, None, model=str(nano_folder(tmp_path / "base", tie)))
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x"), quantise="nf4"))
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(out)
    layer = model.model.language_model.layers[0].mlp.up_proj
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.quant_state.quant_type == "nf4"
    assert model.lm_head.weight.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in model.model.visual.parameters())
    assert {path.suffix for path in out.iterdir()} <= {".safetensors", ".json", ".md", ".jinja"}
    expected = trained_logits(run)
    exported = logits(model, AutoTokenizer.from_pretrained(out))
    assert 0 < float((exported - expected).abs().max() / expected.abs().max()) < 0.3
    assert 0 < json.loads((out / "training.json").read_text())["checks"]["quantising"] < 0.3


def test_adapters_trained_on_four_bits(tmp_path: Path, make_run: Any) -> None:
    """They are merged with the values that the bits stand for, not with those of the base before them."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing in 4 bits is tested")
    base = str(nano_folder(tmp_path / "base", tie=True))
    run = make_run(tmp_path, LORA, model=base, quantise="nf4", data=MARKED)
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "x")))
    expected = trained_logits(run, quantization=nf4("float32"))
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(out)
    found = logits(model, AutoTokenizer.from_pretrained(out))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert float((trained_logits(run) - expected).abs().max()) > 10 * float((found - expected).abs().max())
    alone = export(ExportConfig(run=str(run), out=str(tmp_path / "y"), adapter_only=True))
    assert json.loads((alone / "training.json").read_text())["checks"]["opening_again"] == 0.0


# how a model was shown images
