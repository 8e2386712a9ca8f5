"""From a configuration to results.json, a table and a plot, with every prefill counted by torch besides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.cost.curve import SHORTEST, Inference, InferenceCostConfig, Way, crossover, ways
from experiments.cost.flops import TOLERANCE, Counted, Encoder, Shape, load_config
from remind.core.errors import ModelError
from remind.core.files import write_json, write_text
from remind.core.progress import ProgressBar
from remind.evaluation.tables import markdown_table
from sae.figures import COLOURS, Picture, new_figure

#: Colour, marker and its size by what the prompt is. Okabe and Ito's colours, which the colour-blind can tell apart;
#: markers that coincide stay visible inside each other.
_STYLES = {"full": ("#000000", "o", 5), "x0": ("#0072B2", "s", 8), "x1": ("#E69F00", "^", 4), "x2": ("#009E73", "D", 5)}


def inference_cost(cfg: InferenceCostConfig) -> dict[str, Any]:
    """Count, write and print; what results.json holds is also returned.

    Returns:
        about, config, shapes; `checks`: forwards counted by torch beside the closed form; `rows`: operations by part
        and calls, for every way and length, with the memory of the keys and values; `ratios[way]`: operations of
        reading the whole history over those of the way, by length; `crossover[way][reading]`: the history from which on
        the way costs no more than that way of reading all of it (64 where it always does, None where it never does up
        to the longest length).

    Raises:
        ModelError: no such model, or one whose operations the closed form does not give.
        ConfigError: an SAE for a layer the model has not.
    """
    names = {"answering": cfg.model, "auxiliary": cfg.auxiliary}
    configs = {name: load_config(name) for name in dict.fromkeys(filter(None, names.values()))}
    shapes = {name: Shape.of(config) for name, config in configs.items()}
    auxiliary = None if cfg.auxiliary is None else shapes[cfg.auxiliary]
    encoder = Encoder()
    inference = Inference(cfg, shapes[cfg.model], auxiliary, encoder)
    prompts = {inference.prompt(kind, length) for length in cfg.lengths for kind in ("full", "x0", "x1", "x2")}  # type: ignore[arg-type]
    wanted = {name: sorted(prompts) if name == cfg.model else [cfg.sizes.cue_request] for name in configs}
    checks: list[dict[str, Any]] = []
    with ProgressBar("forwards counted", sum(map(len, wanted.values()))) as bar:
        for name, lengths in wanted.items():
            model = Counted(configs[name])
            for length in lengths:
                checks += check(name, shapes[name], model, length)
                bar.step()
    compared, whole = ways(cfg.questions), Way("full")
    results: dict[str, Any] = {
        "about": {name: version(name) for name in ("torch", "transformers")},
        "config": asdict(cfg),
        "shapes": {name: asdict(shape) for name, shape in shapes.items()},
        "checks": checks,
        "rows": [_row(inference, way, length) for length in cfg.lengths for way in compared],
        "ratios": {
            way.name: {str(n): inference.total(whole, n) / inference.total(way, n) for n in cfg.lengths}
            for way in compared
            if way != whole
        },
        "crossover": {
            way.name: {
                reading.name: crossover(
                    partial(inference.total, reading), partial(inference.total, way), cfg.lengths[-1]
                )
                for reading in compared
                if reading.kind == "full"
            }
            for way in compared
            if way.kind != "full"
        },
    }
    out = Path(cfg.out)
    text = table(results)
    plot(results, out / "inference_cost.png")
    write_text(out / "table.md", text)
    write_json(out / "results.json", results)
    print(text)
    print(f"results are in {out / 'results.json'}, {out / 'table.md'} and {out / 'inference_cost.png'}")
    return results


def check(name: str, shape: Shape, model: Counted, tokens: int) -> list[dict[str, Any]]:
    """Count a prefill and a step after it, and compare.

    Raises:
        ModelError: the closed form is off, as for models that attend to a window or mix experts.
    """
    counted = model.forwards(tokens, 1)
    formulas = (shape.prefill(tokens, dense=True), shape.prefill(1, tokens, dense=True))
    checks: list[dict[str, Any]] = [
        {"model": name, "forward": forward, "tokens": tokens, "counted": count, "formula": formula}
        for forward, count, formula in zip(("prefill", "step"), counted, formulas, strict=True)
    ]
    for one in checks:
        if abs(one["counted"] - one["formula"]) > TOLERANCE * one["counted"]:
            raise ModelError(
                f"{name}: a {one['forward']} at {tokens} tokens takes {one['counted']:.6g} operations by torch's "
                f"counter but {one['formula']:.6g} by the closed form, which holds for dense decoders with full "
                "attention"
            )
    return checks


def _row(inference: Inference, way: Way, length: int) -> dict[str, Any]:
    parts = {name: round(value) for name, value in inference.parts(way, length).items()}
    prompt = inference.prompt(way.kind, length)
    return {
        "history": length,
        "way": way.name,
        "title": way.title,
        "prompt": prompt,
        "fits": prompt + inference.cfg.sizes.answer <= inference.answering.positions,
        "cache_bytes": inference.answering.cache_bytes(prompt + inference.cfg.sizes.answer),
        "operations": sum(parts.values()),
        "parts": parts,
        "calls": inference.calls(way, length),
    }


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
        f"Retrieval keeps {cfg['top_share']:.0%}, {cap(cfg)}; "
        f"the index holds cues for {cfg['dimensions']} kinds of question.",
        "Tokens: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in cfg["sizes"].items()) + ".",
        f"{len(results['checks'])} forwards counted by torch {results['about']['torch']} on the meta device; "
        f"largest difference from the closed form {worst:.1g} (of the whole).",
    ]
    return "\n".join(lines) + "\n"


def cap(cfg: Mapping[str, Any]) -> str:
    """What bounds x0, in words."""
    return "without a cap" if (most := cfg["max_context_tokens"]) is None else f"at most {most:,} tokens"


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
    models = f"answers: {Path(cfg['model']).name}, auxiliary LLM: {Path(auxiliary).name}"
    figure.suptitle(f"{models}; x0: {cfg['top_share']:.0%} of the history, {cap(cfg)}", fontsize=10)
    Picture(figure).save(path)
