"""The command `compare-models`: `remind.viewing.diff` over a states folder, as JSON, tables, a picture and a page."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from textwrap import shorten
from typing import Any

from remind.core.errors import ConfigError
from remind.core.files import write_json, write_text
from remind.evaluation.statistics import bootstrap, ratio
from remind.evaluation.tables import markdown_table
from remind.grounding.ground import check_saes, load_saes
from remind.models.backbone import Backbone, load_backbone
from remind.models.generate import check_generates
from remind.viewing.config import CompareModelsConfig
from remind.viewing.diff import SHARED, Diff, Kind, measure, questions_of
from sae import TopKSAE
from sae.dashboard import logit_effects
from sae.figures import COLOURS, Picture, new_figure
from sae.pages import page

Figures = dict[str, Any]


def compare_models(cfg: CompareModelsConfig) -> Figures:
    """Compare two models, write `diff.json`, `diff.md`, `diff.png` and `diff.html`, print the tables.

    Returns what is written as JSON: `moved` and `moved_means` (shares of the way; controls `random` and `shuffled`),
    `salience` (AUC before, after, difference), `features`, `fit`.

    Raises:
        ConfigError: files exist already.
        DataError, FormatError: states that cannot be read, or without gold answers.
        ModelError: models or SAEs that cannot be read or do not fit each other.
    """
    out = Path(cfg.out)
    if (out / "diff.json").exists() and not cfg.overwrite:
        raise ConfigError(f"{out / 'diff.json'} exists; choose another out or set overwrite")
    saes, _ = load_saes(cfg.sae, cfg.device)
    before = load_backbone(cfg.before, dtype=cfg.dtype, device=cfg.device)
    check_generates(before)
    check_saes(before, saes, folder=cfg.sae)
    after = load_backbone(cfg.after, dtype=cfg.dtype, device=cfg.device)
    questions = questions_of(before, cfg.states, cfg.split, cfg.limit, cfg.per_dialogue)
    diff = measure(before, after, saes, questions, towards=int(cfg.towards[1]), attention=cfg.attention)
    result = {"config": asdict(cfg), "questions": len(questions), **figures_of(diff, cfg.features, cfg.resamples)}
    name_features(result, before, saes)
    text, picture = markdown(result), plot(result)
    picture.save(out / "diff.png")
    write_text(out / "diff.md", text)
    drawn = f"data:image/png;base64,{b64encode(picture._repr_png_()).decode()}"
    values: Figures = {"title": _title(result), "drawn": drawn, "tables": tables(result)}
    write_text(out / "diff.html", page("remind.viewing", "diff.html.j2", pictures=True, **values))
    write_json(out / "diff.json", result)
    print(text)
    return result


def figures_of(diff: Diff, features: int = 20, resamples: int = 2000) -> Figures:
    """All figures of a comparison, intervals by dialogue."""
    dialogues = [question.record.dialogue_id for question in diff.questions]

    def share(space: str, layer: int, kind: Kind) -> Figures:
        return ratio([one[space][layer][kind] for one in diff.moved], dialogues, resamples)

    moved = {
        space: {str(layer): {kind: share(space, layer, kind) for kind in SHARED} for layer in diff.layers}
        for space in ("residual", "codes", "random")
    }
    means: Figures = {}
    others = _of_another_dialogue(dialogues)
    for layer in diff.layers:
        for kind in SHARED:
            sides = [one[layer][kind] for one in diff.means]
            own = [(float(m @ delta), float(delta @ delta)) for m, delta in sides]
            figures: Figures = {"own": ratio(own, dialogues, resamples)}
            if others is not None:
                both = [(m, sides[number][1]) for (m, _), number in zip(sides, others, strict=True)]
                shuffled = [(float(m @ delta), float(delta @ delta)) for m, delta in both]
                figures["shuffled"] = ratio(shuffled, dialogues, resamples)
            means.setdefault(str(layer), {})[kind] = figures
    attention: Figures = {}
    read = [(one, name) for one, name in zip(diff.attention, dialogues, strict=False) if one is not None]
    for layer in range(read[0][0].shape[1] if read else 0):
        rows = [(float(one[0, layer]), float(one[1, layer]), name) for one, name in read]
        # some layers of hybrid models have no attention
        if not isnan(rows[0][0]):
            attention[str(layer + 1)] = _paired(rows, resamples)
    if read:
        rows = [(float(one[0].nanmean()), float(one[1].nanmean()), name) for one, name in read]
        attention["mean"] = _paired(rows, resamples)
    fit = {}
    for layer, (first, second) in diff.fit.items():
        born, dead = (second.fired > 0) & (first.fired == 0), (second.fired == 0) & (first.fired > 0)
        names = ("tokens", "fvu", "cosine", "l0", "dead")
        kept = [{name: value for name, value in one.summary().items() if name in names} for one in (first, second)]
        fit[str(layer)] = {"before": kept[0], "after": kept[1], "born": int(born.sum()), "gone": int(dead.sum())}
    listed = {
        str(layer): {kind: changes.top(features) for kind, changes in kinds.items()}
        for layer, kinds in diff.changes.items()
    }
    return {"moved": moved, "moved_means": means, "salience": {"attention": attention}, "fit": fit, "features": listed}


def name_features(result: Figures, backbone: Backbone, saes: dict[int, TopKSAE]) -> None:
    """Give each listed feature the tokens that it promotes."""
    for layer, kinds in result["features"].items():
        rows = [row for listed in kinds.values() for row in listed]
        numbers = [row["feature"] for row in rows]
        effects = logit_effects(backbone.model, backbone.tokenizer, saes[int(layer)], numbers, 5) if rows else None
        for row, one in zip(rows, effects or [], strict=False):
            row["promotes"] = [token for token, _ in one.promoted]


def _of_another_dialogue(dialogues: Sequence[str]) -> list[int] | None:
    """For each question one of another dialogue, half of all further in an order by dialogue; None for one dialogue."""
    if len(set(dialogues)) < 2:
        return None
    order = sorted(range(len(dialogues)), key=lambda number: dialogues[number])
    half = len(order) // 2
    chosen = dict[int, int]()
    for place, number in enumerate(order):
        later = (order[(place + half + step) % len(order)] for step in range(len(order)))
        chosen[number] = next(other for other in later if dialogues[other] != dialogues[number])
    return [chosen[number] for number in range(len(order))]


def _paired(rows: Sequence[tuple[float, float, str]], resamples: int) -> Figures:
    before, after, names = zip(*rows, strict=True)
    return {
        "before": bootstrap(before, resamples, clusters=names),
        "after": bootstrap(after, resamples, clusters=names),
        "difference": bootstrap([b - a for a, b in zip(before, after, strict=True)], resamples, clusters=names),
    }


def tables(result: Figures) -> list[tuple[str, list[str], list[list[str]]]]:
    """The figures as tables: title, heads and rows."""
    towards = result["config"]["towards"] if "config" in result else "x2"
    moved = []
    for layer, kinds in result["moved"]["residual"].items():
        for kind in kinds:
            means = result["moved_means"][layer][kind]
            cells = [result["moved"][space][layer][kind] for space in ("residual", "codes", "random")]
            moved.append([layer, kind, *map(_cell, [*cells, means["own"], means.get("shuffled")])])
    salience = [
        [layer, *(_cell(figures[part]) for part in ("before", "after", "difference"))]
        for layer, figures in result["salience"]["attention"].items()
    ]
    fit = []
    for layer, one in result["fit"].items():
        cells = [f"{one[when][name]:.3f}" for name in ("fvu", "l0") for when in ("before", "after")]
        fit.append([layer, *cells, str(one["born"]), str(one["gone"])])
    found = [
        (
            f"Share of the way from x0 to {towards} of the model before which the model after has gone under x0",
            ["layer", "tokens", "residual", "codes", "codes, random change", "means, residual", "another question's"],
            moved,
        ),
        (
            "Attention where answers are predicted: AUC of turns with gold evidence among those of x0",
            ["layer", "before", "after", "after - before"],
            salience,
        ),
        ("The SAEs on both streams", ["layer", "FVU before", "after", "L0 before", "after", "born", "gone"], fit),
    ]
    for layer, kinds in result["features"].items():
        for kind, listed in kinds.items():
            rows = []
            for row in listed:
                promoted = " ".join(shorten(repr(token), 24, placeholder="…'") for token in row.get("promotes", []))
                numbers = [f"{row['before']:.3f}", f"{row['after']:.3f}", f"{row['standard_errors']:+.1f}"]
                rows.append([str(row["feature"]), *numbers, promoted])
            heads = ["feature", "before", "after", "standard errors", "promotes"]
            found.append((f"Layer {layer}, {kind} tokens", heads, rows))
    return found


def markdown(result: Figures) -> str:
    """The tables as Markdown."""
    parts = [f"# {_title(result)}\n"]
    for title, heads, rows in tables(result):
        parts.append(
            f"{title}:\n\n" + markdown_table(heads, [[cell.replace("|", "\\|") for cell in row] for row in rows])
        )
    return "\n".join(parts)


def _title(result: Figures) -> str:
    return f"What training changed, {result['questions']} questions"


def _cell(figures: Figures | None) -> str:
    if figures is None or figures["value"] is None:
        return "–"
    return f"{figures['value']:.3f} [{figures['low']:.3f}, {figures['high']:.3f}]"


def plot(result: Figures) -> Picture:
    """Shares moved by layer with their control, and salience before and after."""
    figure = new_figure(11, 3.6)
    left, right = figure.subplots(1, 2)
    layers = list(result["moved_means"])
    rows = [("residual, answer", COLOURS[0], [result["moved"]["residual"][n]["answer"] for n in layers])]
    rows += [("codes, answer", COLOURS[2], [result["moved"]["codes"][n]["answer"] for n in layers])]
    rows += [("codes, random change", "#bbbbbb", [result["moved"]["random"][n]["answer"] for n in layers])]
    shuffled = [result["moved_means"][n]["answer"].get("shuffled") for n in layers]
    if all(shuffled):
        rows += [("another question's", "#999999", shuffled)]
    for name, colour, figures in rows:
        known = [(n, one) for n, one in zip(layers, figures, strict=True) if one["value"] is not None]
        values = [one["value"] for _, one in known]
        errors = [[one["value"] - one["low"] for _, one in known], [one["high"] - one["value"] for _, one in known]]
        left.errorbar([n for n, _ in known], values, yerr=errors, color=colour, label=name, marker="o", capsize=3)
    left.axhline(0, color="#cccccc", linewidth=0.8)
    left.set_xlabel("layer")
    left.set_ylabel("share of the way")
    left.legend(frameon=False, fontsize=8)
    known = [(n, one) for n, one in result["salience"]["attention"].items() if n != "mean"]
    for name, colour in (("before", "#999999"), ("after", COLOURS[0])):
        right.plot(
            [n for n, _ in known], [one[name]["value"] for _, one in known], color=colour, label=name, marker="o"
        )
    right.axhline(0.5, color="#cccccc", linewidth=0.8)
    right.set_xlabel("layer")
    right.set_ylabel("AUC of gold turns, attention")
    right.legend(frameon=False, fontsize=8)
    return Picture(figure)
