"""Scored rows as figures (Eq. 8-14), and figures as Markdown tables and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remind.data.dialogue import DIMENSIONS, FORMATS
from remind.evaluation.compare import Rows
from remind.evaluation.scores import macro, summarise
from remind.evaluation.tables import HEADS, markdown_table, percent
from sae.figures import COLOURS, Picture, new_figure

#: The paper's abbreviations of dimensions.
SHORT = {
    "temporal_dynamics": "TD",
    "pattern_induction": "PI",
    "belief_modeling": "BM",
    "experience_grounded_planning": "EGP",
    "implicit_boundary_modeling": "IBM",
    "cross_modal_latent_inference": "CMLI",
    "personalized_visual_baselines": "PVB",
    "topic_scoped_visual_prototypes": "TSVP",
}
#: Formats in the order of the paper's tables.
TITLES = {"multi": "Multi-choice", "single": "Single-choice", "direct": "Direct answer"}
Figures = Mapping[str, Any]


def product(rows: Rows, resamples: int) -> dict[str, dict[str, dict[str, Any]]]:
    """`summarise` by format (and "all"), then by dimension (and "all"); combinations without questions are left out.

    Where there are dimensions, "macro" has the means over them.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for format in (*FORMATS, "all"):
        for dimension in (*DIMENSIONS, "all"):
            here = [r for r in rows.values() if format in ("all", r["format"]) and dimension in ("all", r["dimension"])]
            if here:
                found.setdefault(format, {})[dimension] = summarise(here, resamples)
        if dimensions := {name: row for name, row in found.get(format, {}).items() if name != "all"}:
            found[format]["macro"] = macro(dimensions)
    return found


def cell(figures: Figures | None, measure: str, interval: bool = False) -> str:
    """The figure in percent; an en dash where nothing took part."""
    return "–" if figures is None else percent(figures[measure], interval)


def side_by_side(products: Mapping[str, Figures], first: str = "System", mean: str = "all") -> str:
    """Systems as rows, formats as columns (Table 1): Acc, MemR of the question's own kind; B1 and F1 of direct ones.

    Args:
        mean: "all": over questions (Eq. 8); "macro": over dimensions.
    """
    shown = [format for format in TITLES if any(format in one for one in products.values())]
    columns = [(f, m) for f in shown for m in ("accuracy", "memory_recall", *(("bleu1", "f1") * (f == "direct")))]
    heads = [first, "n", "failed", HEADS["parse_rate"], *(f"{TITLES[f]} {HEADS[m]}" for f, m in columns), "Acc of all"]
    lines = []
    for name, one in products.items():
        whole = one["all"]["all"]
        cells = [cell(one.get(f, {}).get(mean), m) for f, m in columns]
        counts = [str(whole["n"]), str(whole["failed"]), cell(whole, "parse_rate")]
        lines.append([name, *counts, *cells, cell(whole, "accuracy", interval=True)])
    return markdown_table(heads, lines)


def recalls(products: Mapping[str, Figures]) -> str:
    """Systems as rows: MemR of text (Eq. 10) and of images (Eq. 11) over all formats, with the samples of each."""
    measures = ("memory_recall_text", "memory_recall_visual")
    lines = []
    for name, one in products.items():
        whole = one["all"]["all"]
        samples = [str(whole[m]["n"] if whole[m] else 0) for m in measures]
        figures = [cell(whole, m, interval=True) for m in measures]
        lines.append([name, figures[0], samples[0], figures[1], samples[1]])
    heads = ["System", HEADS[measures[0]], "samples", HEADS[measures[1]], "samples"]
    return markdown_table(heads, lines)


def by_dimension(products: Mapping[str, Figures], format: str, measures: Sequence[str]) -> str:
    """Systems as rows, dimensions and measures as columns, for one format (Tables 4 to 7); first what parses of it."""
    shown = [d for d in DIMENSIONS if any(d in one.get(format, {}) for one in products.values())]
    if not shown:
        return "Its questions have no dimension.\n"
    columns = [("all", "parse_rate"), *((d, m) for d in shown for m in measures)]
    heads = ["System", *(f"{SHORT.get(d, '')} {HEADS[m]}".strip() for d, m in columns)]
    lines = [[name, *(cell(one.get(format, {}).get(d), m) for d, m in columns)] for name, one in products.items()]
    return markdown_table(heads, lines)


def bars(groups: Mapping[str, Mapping[str, Any]], title: str) -> Picture:
    """Bars with 95 % intervals.

    Args:
        groups: panel → bar → `Estimate` (a share) or None.
    """
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    figure = new_figure(max(5.0, 0.9 + 2.6 * len(groups)), 1.6 + 0.32 * len(names))
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (head, estimates) in zip(panels, groups.items(), strict=True):
        for place, name in enumerate(names):
            estimate = estimates.get(name)
            if estimate is None:
                continue
            value, low, high = (100 * estimate[key] for key in ("value", "low", "high"))
            spread = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axes.barh(place, value, 0.7, xerr=spread, color=COLOURS[1], ecolor="dimgrey", capsize=2)
        axes.set_title(TITLES.get(head, head), fontsize=9)
        axes.set_xlim(0, 105)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    return Picture(figure)
