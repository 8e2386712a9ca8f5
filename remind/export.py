"""A trained checkpoint as a plain Hugging Face folder that anything can open."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from remind.alignment import checkpoint as checkpoints
from remind.alignment.config import TrainConfig, as_dict, read_config
from remind.alignment.metrics import read_metrics
from remind.alignment.model import fingerprint, load, trainable
from remind.alignment.trainer import BEST, DATA
from remind.backbone import Backbone, load_backbone
from remind.chat import prompt_ids
from remind.errors import ConfigError, ModelError
from remind.io import atomic_folder, read_json, write_json, write_text
from remind.progress import without_loading_bars

_PROBE = "Conversation\nAna: I moved the lamp to the garden.\n\nQuestion: Where is the lamp?\n"


@dataclass
class ExportConfig:
    """Write a trained checkpoint as a plain Hugging Face folder."""

    run: str
    """Run folder of train_pra.py."""
    out: str
    """Folder to write. Must not exist unless overwrite is set."""
    checkpoint: Literal["last", "best"] = "last"
    """last: the newest whole one. best: the one with the lowest held-out loss under x0 on the dev split."""
    base: str | None = None
    """The base model, if it is no longer where the run found it. It must be the same one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the written weights; None: that of training."""
    overwrite: bool = False
    """Replace an existing folder."""


def export(cfg: ExportConfig) -> Path:
    """Merge, check, write and open again.

    Logits on a probe are compared before and after merging adapters, and between the model in memory and the folder
    as it opens from disk; the folder only appears if they agree.

    Returns:
        The folder: safetensors, config, tokenizer, processor, chat template, generation config, README.md (model card)
        and training.json.

    Raises:
        ConfigError: the folder exists, or there is no best checkpoint.
        ModelError: a damaged checkpoint, another base model, or logits that do not agree.
    """
    out, run = Path(cfg.out), Path(cfg.run)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    trained = read_config(run)
    folder = _checkpoint(run, cfg.checkpoint)
    state = checkpoints.read_state(folder)
    if cfg.base is not None:
        trained.model = cfg.base
    backbone = load(trained)
    if fingerprint(backbone.model) != state["base_fingerprint"]:
        raise ModelError(f"{trained.model} is not the model that {run} was trained from; give it as base")

    model = trainable(backbone.model, trained.lora)
    checkpoints.restore_model(folder, model)
    probe = torch.tensor([prompt_ids(backbone.tokenizer, _PROBE)])
    before = _logits(model, probe)
    plain = _merged(model)
    merged = _logits(plain, probe)
    merging = _difference(before, merged)
    if merging > (0.05 if trained.dtype == "bfloat16" else 1e-4):
        raise ModelError(f"merging the adapters changes the logits by {merging:.2g} of their range")
    if cfg.dtype is not None:
        # parameters alone: rotary frequencies are not stored, and stay float32 in whatever opens the folder
        for parameter in plain.parameters():
            parameter.data = parameter.data.to(getattr(torch, cfg.dtype))
    written = _logits(plain, probe)

    with atomic_folder(out) as temporary:
        _write(plain, backbone, temporary)
        about = _about(cfg, trained, run, state)
        about["checks"] = {"merging": merging, "precision": _difference(merged, written)}
        again = load_backbone(temporary, dtype="auto")
        about["checks"]["opening_again"] = _difference(written, _logits(again.model, probe))
        if about["checks"]["opening_again"] > 1e-6:
            raise ModelError("the written folder does not give the logits of the model in memory")
        if prompt_ids(again.tokenizer, _PROBE) != probe[0].tolist():
            raise ModelError("the written tokenizer does not give the tokens that were trained on")
        write_json(temporary / "training.json", about)
        write_text(temporary / "README.md", _card(about, trained))
    print(f"{folder.name} of {run} is exported to {out}")
    return out


def _checkpoint(run: Path, which: str) -> Path:
    if which == "last":
        newest = checkpoints.newest(run)
        if newest is None:
            raise ModelError(f"{run}: no checkpoints")
        return newest
    if not (run / BEST).is_file():
        raise ConfigError(f"{run}: no best checkpoint; one is chosen only where the states have a dev split")
    folder = checkpoints.folder_of(run, int(read_json(run / BEST)["step"]))
    checkpoints.verify(folder)
    return folder


@torch.no_grad()
def _logits(model: Any, input_ids: Tensor) -> Tensor:
    logits: Tensor = model.eval()(input_ids=input_ids.to(next(model.parameters()).device), use_cache=False).logits
    return logits.float()


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, as a share of the largest logit."""
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))


def _merged(model: Any) -> Any:
    return model.merge_and_unload(safe_merge=True) if hasattr(model, "merge_and_unload") else model


def _write(model: Any, backbone: Backbone, folder: Path) -> None:
    end = backbone.tokenizer.convert_tokens_to_ids("<|im_end|>")
    if model.generation_config.eos_token_id is None and isinstance(end, int):
        model.generation_config.eos_token_id = end
    model.config.use_cache = True
    with without_loading_bars():
        model.save_pretrained(folder)
    (backbone.processor or backbone.tokenizer).save_pretrained(folder)
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)  # safetensors makes its files private


def _about(cfg: ExportConfig, trained: TrainConfig, run: Path, state: dict[str, Any]) -> dict[str, Any]:
    rows = [row for row in read_metrics(run) if row["step"] <= state["step"]]
    return {
        "step": state["step"],
        "checkpoint": cfg.checkpoint,
        "data": read_json(run / DATA),
        "config": as_dict(trained),
        "train": next((row for row in reversed(rows) if row["kind"] == "train"), None),
        "held_out": next((row for row in reversed(rows) if row["kind"] == "eval"), None),
        "versions": {name: version(name) for name in ("torch", "transformers", "remind-toolkit")},
    }


def _card(about: dict[str, Any], trained: TrainConfig) -> str:
    data = about["data"]
    base = Path(trained.model).name if Path(trained.model).is_dir() else trained.model
    front = [f"base_model: {json.dumps(base)}", "library_name: transformers"]
    front += ["tags:", "- remind", "- reflective-memory"]
    rows = (("training batch", about["train"]), ("held out", about["held_out"]))
    inputs = "\n".join(f"| {name} | `{sha}` |" for name, sha in data["inputs"].items())
    lines = [
        "---",
        *front,
        "---",
        "",
        "# A model aligned with Progressive Reflective Alignment",
        "",
        f"{base}, trained for {about['step']} steps to answer questions about a long dialogue from retrieved "
        "evidence alone (the factual state). Give it the rendered state as the one user message of a chat; it answers "
        "`<answer>…</answer><explanation>…</explanation>`.",
        "",
        "## Data",
        "",
        f"{data['train']['examples']} questions. States manifest `{data['manifest_sha256']}`, "
        f"training tokens `{data['tokens_sha256']}`.",
        "",
        "| input | SHA-256 |",
        "|---|---|",
        inputs,
        "",
        "## Metrics",
        "",
        "| | step | total | CE x0 | CE x1 | CE x2 | JSD x0-x1 | JSD x1-x2 |",
        "|---|---|---|---|---|---|---|---|",
        *[_row(what, row) for what, row in rows if row],
        "",
        "Cross-entropies and divergences in nats per answer token. Settings, versions and the checks made on export "
        "are in `training.json`.",
        "",
    ]
    return "\n".join(lines)


def _row(name: str, row: dict[str, Any]) -> str:
    name = f"{name} ({row['split']})" if "split" in row else name
    cells = [f"{row[key]:.4f}" if key in row else "–" for key in ("total", "ce0", "ce1", "ce2", "jsd01", "jsd12")]
    return f"| {name} | {row['step']} | {' | '.join(cells)} |"
