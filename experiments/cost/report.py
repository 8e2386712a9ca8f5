"""The figures in Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cost.curve import SHORTEST
from remind.evaluation.tables import markdown_table
from sae.figures import COLOURS, Picture, new_figure

#: Colour, marker and its size by what the prompt is. Okabe and Ito's colours, which the colour-blind can tell apart;
#: markers that coincide stay visible inside each other.
_STYLES = {"full": ("#000000", "o", 5), "x0": ("#0072B2", "s", 8), "x1": ("#E69F00", "^", 4), "x2": ("#009E73", "D", 5)}


def length_label(tokens: int) -> str:
    """16K, 2M; other numbers as they are."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def table(results: Mapping[str, Any]) -> str:
    """Operations, calls, ratios and crossovers, and what they rest on."""
    cfg = results["config"]
    lengths, longest = cfg["lengths"], cfg["lengths"][-1]
    rows = {(row["way"], row["history"]): row for row in results["rows"]}
    titles = {row["way"]: row["title"] for row in results["rows"]}

    def block(head: str, cells: Mapping[str, Sequence[str]]) -> str:
        body = ([titles[name], *row] for name, row in cells.items())
        return markdown_table([head, *map(length_label, lengths)], body)

    def numbers(value: Any, names: Iterable[str] = titles) -> dict[str, list[str]]:
        return {name: [_number(value(rows[name, n])) for n in lengths] for name in names}

    unit, size = ("TFLOPs", 1e12) if min(row["operations"] for row in results["rows"]) >= 1e11 else ("GFLOPs", 1e9)
    operations = {
        name: [cell + ("" if rows[name, n]["fits"] else "*") for cell, n in zip(cells, lengths, strict=True)]
        for name, cells in numbers(lambda row: row["operations"] / size).items()
    }
    lines = ["# Cost of a question at inference", ""]
    lines += ["Attention in a prefill: half of the square, as a fused kernel computes it.", ""]
    lines.append(block(f"{unit} per question", operations))
    if not all(row["fits"] for row in results["rows"]):
        positions = results["shapes"][cfg["model"]]["positions"]
        lines += [f"\\* more than the {positions:,} tokens the model was made for", ""]
    lines.append(block("calls per question", numbers(lambda row: sum(row["calls"].values()))))
    each_anew = [name for name in titles if "/" not in name]
    lines.append(block("keys and values at 16 bits, GB", numbers(lambda row: row["cache_bytes"] / 1e9, each_anew)))
    lines += ["Whole history over each way:", ""]
    ratios = {way: [_number(ratio[str(n)]) for n in lengths] for way, ratio in results["ratios"].items()}
    lines.append(block("times as many operations", ratios))
    crossovers = results["crossover"]
    readings = list(next(iter(crossovers.values())))
    heads = ["no dearer from so many tokens on", *(f"than {titles[reading]}" for reading in readings)]
    body = ([titles[way], *(_start(starts[r], longest) for r in readings)] for way, starts in crossovers.items())
    lines.append(markdown_table(heads, body))
    worst = max(abs(one["counted"] - one["formula"]) / one["counted"] for one in results["checks"])
    auxiliary = cfg["auxiliary"] and f"counted as {cfg['auxiliary']}"
    lines += [
        f"Model: {cfg['model']}; auxiliary LLM: {auxiliary or 'its operations are not counted'}; encoder: MiniLM.",
        f"Retrieval keeps {cfg['top_share']:.0%}, at most {cfg['max_context_tokens']:,} tokens; "
        f"the index holds cues for {cfg['dimensions']} kinds of question.",
        "Tokens: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in cfg["sizes"].items()) + ".",
        f"{len(results['checks'])} forwards counted by torch {results['about']['torch']} on the meta device; "
        f"largest difference from the closed form {worst:.1g} (of the whole).",
    ]
    return "\n".join(lines) + "\n"


def _start(tokens: int | None, longest: int) -> str:
    if tokens is None:
        return f"not by {length_label(longest)}"
    return "always" if tokens <= SHORTEST else f"{tokens:,}"


def _number(value: float) -> str:
    """Without exponent; three digits where the value is 1 or more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def plot(results: Mapping[str, Any], path: str | Path) -> None:
    """Operations and calls over the length of the history, as a PNG; a line where the model's own context ends."""
    from matplotlib.ticker import NullLocator

    cfg, rows = results["config"], results["rows"]
    lengths = cfg["lengths"]
    figure = new_figure(11, 5.4)
    panels = figure.subplots(1, 2)
    others = iter(COLOURS * len(rows))
    for name in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == name]
        kind, _, questions = name.partition("/")
        colour, marker, size = _STYLES[kind] if kind in _STYLES else (next(others), "x", 4)
        line = ("-", "--", ":", "-.")[(1 + cfg["questions"].index(int(questions)) if questions else 0) % 4]
        look = {"marker": marker, "markersize": size, "markerfacecolor": "none", "color": colour, "linestyle": line}
        panels[0].plot(lengths, [row["operations"] for row in own], label=own[0]["title"], **look)
        panels[1].plot(lengths, [sum(row["calls"].values()) for row in own], **look)
    positions = results["shapes"][cfg["model"]]["positions"]
    for axis, title in zip(panels, ("operations per question (FLOPs)", "LLM calls per question"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [length_label(length) for length in lengths])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("tokens of the history")
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if lengths[0] <= positions < lengths[-1]:
            axis.axvline(positions, color="grey", linewidth=1, linestyle=(0, (1, 3)))
            place = {"transform": axis.get_xaxis_transform(), "fontsize": 8, "color": "grey"}
            axis.text(positions, 0.01, " context of the model", **place)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    auxiliary = cfg["auxiliary"] or "not counted"
    figure.suptitle(f"answers: {Path(cfg['model']).name}, auxiliary LLM: {Path(auxiliary).name}", fontsize=10)
    Picture(figure).save(path)
