"""Figure 12 and Table 8: operations by length of the history and by stage, and what conditions and systems took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.cost.curve import InferenceCostConfig
from experiments.cost.flops import Shape, load_config
from experiments.cost.run import inference_cost, length_label, plot, table
from experiments.paper.config import PaperConfig
from experiments.paper.items import Result, from_file
from experiments.paper.settings import SMALL_MODEL, Setting, ask, settings
from remind.core.errors import ModelError
from remind.evaluation.compare import Run
from remind.evaluation.tables import markdown_table

CONDITIONS = ("no_context", "rag", "full_context", "x0", "x1", "x2")
#: Stages of Table 8 → what `Inference.parts` calls their parts.
STAGES = {
    "(I) segments and retrieval": ("index", "retrieval"),
    "(II) construction": ("strategy", "grounding", "summary"),
    "(III) inference": ("read", "answer"),
}
#: Histories of the small form, in tokens; the nano model is too small for the paper's 16K to 2M.
_SMALL_LENGTHS = (512, 1024, 4096)


def measured(setting: Setting, runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """What each condition took for a question: tokens, seconds in the model, operations of its mean prompt and reply.

    Seconds are None where answers came from an earlier start. Operations are None where the answering model's
    configuration is not at hand.
    """
    try:
        if setting.evaluate.answers == "server":
            raise ModelError("the model answers on a server")
        shape, why = Shape.of(load_config(setting.evaluate.model)), None
    except ModelError as error:
        shape, why = None, str(error)
    rows = []
    for name, run in runs.items():
        counts, seconds = run.report["counts"], run.report["seconds"]["model"]
        asked = max(1, counts["questions"])
        read, written = (counts[key] / asked for key in ("prompt_tokens", "new_tokens"))
        row = {
            "condition": name,
            "questions": counts["questions"],
            "tokens_read": read,
            "tokens_written": written,
            "seconds": None if run.report["resumed"] else seconds / asked,
            "operations": None,
            "no_operations": why,
        }
        if shape is not None and read:
            row["operations"] = shape.reply(round(read), max(1, round(written)))
        rows.append(row)
    return rows


def by_stage(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Operations of each way and history by the stages of Table 8, from the rows of `inference_cost`."""
    return [
        {
            "way": row["way"],
            "title": row["title"],
            "history": row["history"],
            **{stage: sum(row["parts"].get(part, 0) for part in parts) for stage, parts in STAGES.items()},
        }
        for row in rows
    ]


def fig12_table8(cfg: PaperConfig) -> Result:
    """See the module. Raises as `evaluate` and `inference_cost` do."""
    assert cfg.out is not None
    out = Path(cfg.out)
    if cfg.small:
        cost = InferenceCostConfig(
            out=str(out / "curve"),
            model=SMALL_MODEL,
            auxiliary=SMALL_MODEL,
            lengths=_SMALL_LENGTHS,
            sae_layers=tuple(cfg.built.layers),
            d_sae=cfg.built.sae.d_sae,
        )
    else:
        assert cfg.cost is not None
        cost = replace(from_file(InferenceCostConfig, cfg.cost, out / "curve"), out=str(out / "curve"))
    setting = settings(cfg)[0]
    runs = ask(setting, out / f"seed-{setting.seed}" / "answers", CONDITIONS)
    conditions = measured(setting, runs)
    curve = inference_cost(cost)
    stages = by_stage(curve["rows"])
    longest = max(row["history"] for row in stages)
    parts = ["## What the conditions took for a question", "", *_conditions(conditions)]
    plot(curve, out / f"{cfg.item}.png")
    parts += [f"## Table 8: operations by stage, a history of {length_label(longest)} tokens", ""]
    heads = ["way", *STAGES]
    body = [[row["title"], *(f"{row[s]:.3g}" for s in STAGES)] for row in stages if row["history"] == longest]
    parts.append(markdown_table(heads, body))
    parts += ["## Figure 12", "", table(curve).partition("\n\n")[2]]
    data = {"conditions": conditions, "stages": stages, "curve": curve}
    return Result(data, "\n".join(parts), None)


def _conditions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    heads = ["condition", "questions", "tokens read", "written", "s in the model", "operations"]
    body = [
        [row["condition"], str(row["questions"])]
        + [number(row[key], ",.1f") for key in ("tokens_read", "tokens_written")]
        + [number(row["seconds"], ".3f")]
        + [number(row["operations"], ".3g")]
        for row in rows
    ]
    return [
        markdown_table(heads, body),
        "Operations: half of the square of attention, as a fused kernel computes it.",
        "",
    ]
