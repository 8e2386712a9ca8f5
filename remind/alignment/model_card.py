"""The model card of an exported folder, and what it is written from."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from remind.alignment.config import TrainConfig, as_dict
from remind.alignment.metrics import read_metrics
from remind.alignment.run_folder import DATA
from remind.core.files import read_json

_VERSIONS = ("torch", "transformers", "remind-toolkit")


def about_run(run: Path, trained: TrainConfig, state: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """Where a checkpoint comes from: data, settings, measurements up to it, and versions.

    Args:
        state: its `state.json`. checkpoint: which one was asked for.
    """
    rows = [row for row in read_metrics(run) if row["step"] <= state["step"]]
    return {
        "step": state["step"],
        "checkpoint": checkpoint,
        "base_fingerprint": state["base_fingerprint"],
        "data": read_json(run / DATA),
        "config": as_dict(trained),
        "train": next((row for row in reversed(rows) if row["kind"] == "train"), None),
        "held_out": next((row for row in reversed(rows) if row["kind"] == "eval"), None),
        "versions": {name: version(name) for name in _VERSIONS},
    }


def card(about: dict[str, Any], adapters: bool = False, quantised: bool = False) -> str:
    """README.md of an exported folder, from `about_run` and the checks.

    Args:
        adapters: the folder holds adapters alone. quantised: it is in 4 bits.
    """
    data, name = about["data"], about["config"]["model"]
    base = Path(name).name if Path(name).is_dir() else name
    front = [f"base_model: {json.dumps(base)}", f"library_name: {'peft' if adapters else 'transformers'}"]
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
        *_notes(adapters, quantised),
        f"Fingerprint of the base model: `{about['base_fingerprint']}`.",
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
        "Cross-entropies and divergences in nats per answer token.",
        "",
        "## Made with",
        "",
        ", ".join(f"{name} {found}" for name, found in about["versions"].items())
        + ". Settings are in `training.json`.",
        "",
        "Checks on export, largest difference of logits on a probe as a share of the largest logit: "
        + ", ".join(f"{what.replace('_', ' ')} {value:.2g}" for what, value in about["checks"].items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def _notes(adapters: bool, quantised: bool) -> list[str]:
    if adapters:
        return ["The folder holds adapters (PEFT), which go on the base model.", ""]
    if quantised:
        return ["The language model's linear layers are in 4 bits (NF4); opening it needs bitsandbytes.", ""]
    return []


def _row(name: str, row: dict[str, Any]) -> str:
    name = f"{name} ({row['split']})" if "split" in row else name
    cells = [f"{row[key]:.4f}" if key in row else "–" for key in ("total", "ce0", "ce1", "ce2", "jsd01", "jsd12")]
    return f"| {name} | {row['step']} | {' | '.join(cells)} |"
