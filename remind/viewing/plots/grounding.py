"""Plots of grounding: salience over the dialogue, the features behind a turn, and the effect of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remind.core.errors import DataError
from remind.states.pyramid import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from remind.grounding.ground import GroundingTrace
    from sae.figures import Picture

_MARKED, _PLAIN, _GOLD, _FEATURE = "#E69F00", "#b8c4cc", "#009E73", "#0072B2"
#: Turns whose ids are still readable below the bars.
_LABELLED = 40


def plot_salience(trace: GroundingTrace) -> Picture:
    """s_turn of every retrieved turn (Eq. 5) in the order of the dialogue; marked blocks and gold evidence stand out.

    Turns without a token that counts have no bar. Dotted lines separate runs: between two of them turns are left out.
    """
    from remind.viewing.pages import gold_turns, marked_turns
    from sae.figures import Picture, new_figure

    factual = trace.state.factual
    turns, marked = factual.turns, marked_turns(trace.state.blocks)
    gold = gold_turns(factual.question, turns)
    heights = [value if value != float("-inf") else 0.0 for value in trace.state.salience]
    low, high = min([0.0, *heights]), max([0.0, *heights])
    figure = new_figure(max(6.0, min(14.0, 0.2 * len(turns) + 2)), 3)
    axes = figure.subplots()
    axes.bar(range(len(turns)), heights, color=[_MARKED if n in marked else _PLAIN for n in range(len(turns))])
    axes.plot(gold, [high + 0.08 * (high - low or 1)] * len(gold), "v", color=_GOLD, markersize=6)
    for index, (before, after) in enumerate(zip(factual.runs, factual.runs[1:], strict=False)):
        if before != after:
            axes.axvline(index + 0.5, color="#999999", linewidth=0.6, linestyle=":")
    if len(turns) <= _LABELLED:
        axes.set_xticks(range(len(turns)), [turn.id for turn in turns], rotation=90, fontsize=7)
    else:
        axes.set_xlabel("retrieved turn")
    axes.set_xlim(-0.7, len(turns) - 0.3)
    axes.set_ylabel("salience")
    axes.set_title(_title(factual.question.text), loc="left", fontsize=10)
    _legend(axes, [(_MARKED, "s", "in a marked block"), (_PLAIN, "s", "not marked"), (_GOLD, "v", "gold evidence")])
    return Picture(figure)


def plot_carried(
    trace: GroundingTrace, layer: int, turn: int | None = None, n: int = 10, names: Mapping[int, str] | None = None
) -> Picture:
    """The features that a turn's alignment with the strategy is made of, as shares of Σ over its tokens of v[j] h̃_t[j].

    Args:
        layer: one that has an SAE.
        turn: index into the retrieved turns; None: the most salient one.
        names: labels shown beside feature numbers.

    Raises:
        ModelError: a layer without an SAE.
        DataError: no such turn.
    """
    from sae.figures import Picture, new_figure

    turns = trace.state.factual.turns
    if turn is None:
        turn = max(range(len(turns)), key=lambda index: trace.state.salience[index])
    if not 0 <= turn < len(turns):
        raise DataError(f"there is no turn {turn}; {len(turns)} were retrieved", record=trace.state.factual.question.id)
    everything = trace.top_features(layer, turn, n=None)
    total, features = sum(value for _, value in everything), everything[:n]
    figure = new_figure(7, 1.1 + 0.26 * max(1, len(features)))
    axes = figure.subplots()
    labels = [f"{feature}  {names[feature]}" if names and feature in names else str(feature) for feature, _ in features]
    axes.barh(range(len(features)), [value / total for _, value in features], color=_FEATURE)
    axes.set_yticks(range(len(features)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"share of the turn's alignment, layer {layer}")
    axes.spines[["top", "right"]].set_visible(False)
    text = f"{turns[turn].speaker}: {one_line(turns[turn].text)}"
    axes.set_title(_title(text if features else f"{text} - no active feature"), loc="left", fontsize=9)
    return Picture(figure)


def plot_settings(traces: Mapping[str, GroundingTrace]) -> Picture:
    """The same question under several settings: salience of each turn as its rank, marked turns framed.

    The numbers at the right count the gold evidence turns that are marked.

    Args:
        traces: of one factual state, by a name for the settings.

    Raises:
        DataError: no traces, or traces of several states.
    """
    import numpy as np
    from matplotlib.patches import Rectangle

    from remind.viewing.pages import gold_turns, marked_turns
    from sae.figures import Picture, new_figure

    if not traces or len({trace.state.factual.positions for trace in traces.values()}) > 1:
        raise DataError("settings are compared on one factual state: give traces of the same one")
    order = np.argsort([trace.state.salience for trace in traces.values()], kind="stable")
    ranks = order.argsort() / max(1, order.shape[1] - 1)
    factual = next(iter(traces.values())).state.factual
    gold = gold_turns(factual.question, factual.turns)
    figure = new_figure(max(6.5, min(14.0, 0.17 * len(factual.turns) + 3.2)), 1.1 + 0.3 * len(traces))
    axes = figure.subplots()
    image = axes.imshow(ranks, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    for row, trace in enumerate(traces.values()):
        for start, end in trace.state.blocks:
            corner, width = (start - 0.5, row - 0.42), end - start + 1
            axes.add_patch(Rectangle(corner, width, 0.84, fill=False, edgecolor=_MARKED, linewidth=1.6))
        if gold:
            label = f"{len(marked_turns(trace.state.blocks).intersection(gold))} of {len(gold)}"
            axes.text(len(factual.turns) - 0.2, row, label, va="center", fontsize=8, color=_GOLD)
    axes.plot(gold, [-0.75] * len(gold), "v", color=_GOLD, markersize=5, clip_on=False)
    axes.set_yticks(range(len(traces)), list(traces), fontsize=8)
    axes.set_xlabel("retrieved turn")
    axes.spines[:].set_visible(False)
    title = "framed: marked   ▾ gold evidence, at the right how much of it is marked"
    axes.set_title(title, loc="left", fontsize=8, pad=12)
    bar = figure.colorbar(image, ax=axes, pad=0.09, fraction=0.03)
    bar.set_ticks([0, 1], labels=["least", "most\nsalient"], fontsize=7)
    return Picture(figure)


def _legend(axes: Axes, entries: Sequence[tuple[str, str, str]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, marker=shape, linestyle="", label=text) for colour, shape, text in entries]
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(handles=handles, fontsize=8, frameon=False, ncols=3, loc="outside lower right")


def _title(text: str, longest: int = 70) -> str:
    text = one_line(text)
    # a dollar sign would begin a formula
    return (text if len(text) <= longest else f"{text[: longest - 1]}…").replace("$", r"\$")
