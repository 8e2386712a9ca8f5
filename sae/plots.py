"""Plots of coders: reconstruction during and after training, and firing density of features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sae import files
from sae.errors import FormatError
from sae.figures import COLOURS, Picture, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"all": COLOURS[6], "text": COLOURS[0], "visual": COLOURS[4]}
Summary = Mapping[str, Any]


def held_out(folder: str | Path) -> dict[int, Summary]:
    """The figures on held-out tokens in the training records of a folder of coders, by layer.

    Raises FormatError for no coders, or coders that were not evaluated.
    """
    summaries = {}
    for path in sorted(Path(folder).glob("layer_*/training.json")):
        record = files.read_json(path)
        if record.get("held_out"):
            summaries[int(path.parent.name.removeprefix("layer_"))] = record["held_out"]
    if not summaries:
        raise FormatError("has no layer_*/training.json with figures on held-out tokens", folder)
    return summaries


def plot_training(folder: str | Path) -> Picture:
    """FVU on the training batches over the steps, and on held-out tokens, text and visual tokens apart.

    Raises FormatError for a folder without metrics.jsonl and layer_*/training.json (what `remind train-sae` writes).
    """
    path = Path(folder) / "metrics.jsonl"
    with files.reading(path):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    figure = new_figure(9, 3)
    left, right = figure.subplots(1, 2)
    for layer, colour in zip(sorted({row["layer"] for row in rows}), cycle(COLOURS), strict=False):
        points = [(row["step"], row["fvu"]) for row in rows if row["layer"] == layer]
        left.plot(*zip(*points, strict=True), color=colour, label=f"layer {layer}")
    left.set_ylim(bottom=0)
    left.set_xlabel("optimiser step")
    left.set_ylabel("FVU of the batch")
    left.set_title("training", loc="left", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    _bars(right, held_out(folder))
    return Picture(figure)


def plot_density(summaries: Mapping[int, Summary]) -> Picture:
    """Histograms of features by firing density, text and visual tokens apart, of summaries as `held_out` gives them."""
    figure = new_figure(4.5 * max(1, len(summaries)), 3)
    panels = figure.subplots(1, max(1, len(summaries)), squeeze=False, sharey=True)[0]
    for axes, (layer, summary) in zip(panels, summaries.items(), strict=False):
        silent, lowest = [], 1.0
        for kind, part in _parts(summary):
            histogram = part["density_histogram"]
            axes.stairs(histogram["counts"], histogram["edges"], color=_COLOURS[kind], label=kind, linewidth=1.5)
            silent.append(f"{kind} {histogram['never']}")
            fired = [edge for edge, count in zip(histogram["edges"], histogram["counts"], strict=False) if count]
            lowest = min([lowest, *fired])
        axes.set_xscale("log")
        axes.set_xlim(lowest / 2, 1.2)
        axes.set_xlabel("share of tokens a feature fires on")
        axes.set_title(f"layer {layer}; features that never fire: {', '.join(silent)}", loc="left", fontsize=8)
    panels[0].set_ylabel("features")
    panels[0].legend(frameon=False, fontsize=8)
    return Picture(figure)


def _bars(axes: Axes, summaries: Mapping[int, Summary]) -> None:
    layers = list(summaries)
    shown: set[str] = set()
    for place, layer in enumerate(layers):
        parts = _parts(summaries[layer])
        for number, (kind, part) in enumerate(parts):
            value = part["fvu"] if part["fvu"] is not None else float("nan")
            at = place + (number - (len(parts) - 1) / 2) * 0.26
            axes.bar(at, value, 0.24, color=_COLOURS[kind], label=None if kind in shown else kind)
            axes.text(at, value, f"{value:.2f}", ha="center", va="bottom", fontsize=8)
            shown.add(kind)
    axes.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers])
    axes.set_ylabel("FVU")
    axes.margins(y=0.15)
    axes.set_title("held-out tokens", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=len(shown) or 1, loc="upper left", bbox_to_anchor=(0.3, 1.13))


def _parts(summary: Summary) -> list[tuple[str, Summary]]:
    """The pooled figures, and those of each kind of token where there were both kinds."""
    kinds = [(kind, summary[kind]) for kind in ("text", "visual") if summary.get(kind)]
    return [("all", summary), *(kinds if len(kinds) == 2 else [])]
