"""A trained checkpoint as a folder that anything can open: a whole model, one in 4 bits, or adapters alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from torch import Tensor

from remind.alignment.metrics import kept, newest, read_metrics
from remind.core.errors import ConfigError, ModelError
from remind.core.files import atomic_folder, read_json, write_json, write_text
from remind.core.progress import without_loading_bars
from remind.core.run_folder import as_dict
from remind.models.backbone import Backbone, load_backbone
from remind.models.chat import prompt_ids
from remind.models.generate import end_tokens
from remind.states.pyramid import MARKER
from remind.train_pra.config import DATA, TRAINING, ExportConfig, TrainConfig, read_config
from remind.train_pra.run import nf4, restored, with_adapters

#: With a marker, so that its rows are compared as well where it is a token.
_PROBE = f"Conversation\n{MARKER}\nAna: I moved the lamp to the garden.\n{MARKER}\n\nQuestion: Where is the lamp?\n"
_VERSIONS = ("torch", "transformers", "remind-toolkit")


def export(cfg: ExportConfig) -> Path:
    """Merge, check, write and open again.

    Logits on a probe are compared before and after merging adapters, and between the model in memory and the folder
    as it opens from disk; the folder only appears if they agree. Adapters that were trained on a base in 4 bits are
    merged with the values those bits stand for. What 4 bits change is measured and written down, not judged.

    Returns:
        The folder: safetensors, config, tokenizer, processor, chat template, generation config, README.md (model card)
        and training.json; or, with `adapter_only`, the adapters with tokenizer, README.md and training.json.

    Raises:
        ConfigError: the folder exists, there is no best checkpoint, or what was trained does not fit in adapters.
        ModelError: a damaged checkpoint, another base model, no bitsandbytes, or logits that do not agree.
    """
    out, run = Path(cfg.out), Path(cfg.run)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    if out.exists() and (not (out / TRAINING).is_file() or run.resolve().is_relative_to(out.resolve())):
        raise ConfigError(f"{out} is not an exported model, and is not overwritten; choose another out")
    trained = read_config(run)
    if cfg.adapter_only and (trained.lora is None or trained.data.train_vision):
        raise ConfigError(f"adapter_only: {cfg.run} trained more than adapters; export it whole")
    if cfg.adapter_only and (cfg.quantise is not None or cfg.dtype is not None):
        raise ConfigError("adapter_only writes the adapters as they were trained; leave out quantise and dtype")
    small = None if cfg.quantise is None else nf4(cfg.dtype or trained.dtype)
    folder = _checkpoint(run, cfg.checkpoint)
    if cfg.base is not None:
        trained.model = cfg.base
    backbone, model = restored(trained, folder)
    probe = torch.tensor([prompt_ids(backbone.tokenizer, _PROBE)])
    before = _logits(model, probe)

    with atomic_folder(out) as temporary:
        if cfg.adapter_only:
            checks = _write_adapters(model, backbone, trained, before, probe, temporary)
        else:
            if trained.quantise is not None:
                # PEFT would round what it merges into 4 bits
                base = model.unload().dequantize()
                model = with_adapters(replace(backbone, model=base), trained, folder)
            if hasattr(model, "merge_and_unload"):
                model = model.merge_and_unload(safe_merge=True)
            checks = _write_whole(model, backbone, cfg, trained, small, before, probe, temporary)
        about = about_run(run, trained, folder, cfg.checkpoint) | {"checks": checks}
        write_json(temporary / TRAINING, about)
        thinks = "enable_thinking" in (backbone.tokenizer.chat_template or "")
        write_text(temporary / "README.md", card(about, cfg.adapter_only, cfg.quantise is not None, thinks))
    print(f"{folder.name} of {run} is exported to {out}")
    return out


def _checkpoint(run: Path, which: str) -> Path:
    folder = newest(run)
    if folder is None:
        raise ModelError(f"{run}: no checkpoints")
    if which == "last":
        return folder
    best = read_json(folder / "trainer_state.json")["best_global_step"]
    if not best:
        raise ConfigError(f"{run}: no best checkpoint; one is chosen only where the states have a dev split")
    folder = run / f"checkpoint-{best}"
    if kept(folder) is None:
        raise ModelError(f"{folder}: not written to its end")
    return folder


@torch.no_grad()
def _logits(model: Any, input_ids: Tensor) -> Tensor:
    logits: Tensor = model.eval()(input_ids=input_ids.to(next(model.parameters()).device), use_cache=False).logits
    return logits.float()


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, as a share of the largest logit."""
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))


def _same(written: Tensor, again: Any, probe: Tensor) -> float:
    """The difference to the logits of what was opened again. Raises ModelError where there is one."""
    if (difference := _difference(written, _logits(again, probe))) > 1e-6:
        raise ModelError("the written folder does not give the logits of the model in memory")
    return difference


def _write_whole(
    plain: Any,
    backbone: Backbone,
    cfg: ExportConfig,
    trained: TrainConfig,
    small: Any,
    before: Tensor,
    probe: Tensor,
    folder: Path,
) -> dict[str, float]:
    merged = _logits(plain, probe)
    checks = {"merging": _difference(before, merged)}
    if checks["merging"] > (0.05 if trained.dtype == "bfloat16" else 1e-4):
        raise ModelError(f"merging the adapters changes the logits by {checks['merging']:.2g} of their range")
    if cfg.dtype is not None:
        # parameters alone: rotary frequencies are not stored, and stay float32 in whatever opens the folder
        for parameter in plain.parameters():
            parameter.data = parameter.data.to(getattr(torch, cfg.dtype))
    written = _logits(plain, probe)
    checks["precision"] = _difference(merged, written)
    whole = folder if small is None else folder / ".whole"
    _write(plain, backbone, whole)
    if small is not None:
        plain = load_backbone(whole, cfg.dtype or trained.dtype, quantization=small).model
        full, written = written, _logits(plain, probe)
        checks["quantising"] = _difference(full, written)
        _write(plain, backbone, folder)
        shutil.rmtree(whole)
    again = load_backbone(folder, dtype="auto")
    checks["opening_again"] = _same(written, again.model, probe)
    if prompt_ids(again.tokenizer, _PROBE) != probe[0].tolist():
        raise ModelError("the written tokenizer does not give the tokens that were trained on")
    return checks


def _write(model: Any, backbone: Backbone, folder: Path) -> None:
    # as answers were ended in training
    model.generation_config.eos_token_id = end_tokens(backbone.tokenizer, model.generation_config)
    model.config.use_cache = True
    with without_loading_bars():
        model.save_pretrained(folder)
    (backbone.processor or backbone.tokenizer).save_pretrained(folder)


def _write_adapters(
    model: Any, backbone: Backbone, trained: TrainConfig, before: Tensor, probe: Tensor, folder: Path
) -> dict[str, float]:
    from peft import PeftModel

    quantization = None if trained.quantise is None else nf4(trained.dtype)
    fresh = load_backbone(trained.model, trained.dtype, quantization=quantization)
    rows = [m.get_input_embeddings().weight.shape[0] for m in (fresh.model, model.get_base_model())]
    if rows[0] != rows[1]:
        raise ConfigError("adapter_only: the marker's token made the embedding grow beyond the base's; export it whole")
    base = Path(trained.model).expanduser()
    # it is opened from anywhere
    model.peft_config["default"].base_model_name_or_path = str(base.resolve()) if base.is_dir() else trained.model
    # what is trained of embeddings is in the adapters; the base has the rest
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    backbone.tokenizer.save_pretrained(folder)
    again = PeftModel.from_pretrained(fresh.model, folder)
    return {"opening_again": _same(before, again, probe)}


# the model card


def about_run(run: Path, trained: TrainConfig, folder: Path, checkpoint: str) -> dict[str, Any]:
    """Where a checkpoint comes from: data, settings, measurements up to it, and versions.

    Args:
        checkpoint: which one was asked for.
    """
    step = int(folder.name.rpartition("-")[2])
    rows = [row for row in read_metrics(run) if row["step"] <= step]
    return {
        "step": step,
        "checkpoint": checkpoint,
        "base_fingerprint": (kept(folder) or {})["base_fingerprint"],
        "data": read_json(run / DATA),
        "config": as_dict(trained),
        "train": next((row for row in reversed(rows) if row["kind"] == "train"), None),
        "held_out": next((row for row in reversed(rows) if row["kind"] == "eval"), None),
        "versions": {name: version(name) for name in _VERSIONS},
    }


def card(about: dict[str, Any], adapters: bool = False, quantised: bool = False, thinks: bool = False) -> str:
    """README.md of an exported folder, from `about_run` and the checks.

    Args:
        adapters: the folder holds adapters alone. quantised: it is in 4 bits. thinks: its chat template can ask for
            thoughts, which training did without.
    """
    name = about["config"]["model"]
    base = Path(name).name if Path(name).is_dir() else name
    keys = ("step", "total", "ce0", "ce1", "ce2", "jsd01", "jsd12")
    rows = [(what, row) for what, row in (("training batch", about["train"]), ("held out", about["held_out"])) if row]
    source = (files(__package__) / "card.md.j2").read_text(encoding="utf-8")
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(source)
    told = {"adapters": adapters, "quantised": quantised, "thinks": thinks}
    return template.render(**about, base=base, keys=keys, rows=rows, **told)
