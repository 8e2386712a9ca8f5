"""Grounding in pictures: salience over the dialogue, what a turn's alignment is made of, what settings change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from remind.core.errors import DataError
from remind.grounding.trace import GroundingTrace
from remind.states.pyramid import one_line
from sae.figures import COLOURS, Picture, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKED, _PLAIN, _GOLD = COLOURS[4], "#b8c4cc", COLOURS[2]
#: Turns whose names are still readable under the bars.
_NAMED = 40


def plot_salience(trace: GroundingTrace, gold: Sequence[str] | None = None) -> Picture:
    """s_turn of every retrieved turn (Eq. 5) in the order of the dialogue; marked blocks and gold evidence stand out.

    Turns without a token that counts have no bar. Lines part the runs: between two of them turns are left out.

    Args:
        gold: ids of the gold evidence turns; None: those of the question.
    """
    factual = trace.state.factual
    salience, turns = trace.state.salience, factual.turns
    marked = _marked(trace)
    wanted = set(_gold(trace) if gold is None else gold)
    heights = [value if value != float("-inf") else 0.0 for value in salience]
    low, high = min([0.0, *heights]), max([0.0, *heights])
    figure = new_figure(max(6.0, min(14.0, 0.2 * len(turns) + 2)), 3)
    axes = figure.subplots()
    axes.bar(
        range(len(turns)),
        heights,
        color=[_MARKED if index in marked else _PLAIN for index in range(len(turns))],
        width=0.8,
    )
    for index, turn in enumerate(turns):
        if turn.id in wanted:
            axes.plot(index, high + 0.08 * (high - low or 1), "v", color=_GOLD, markersize=6)
    for index, (before, after) in enumerate(zip(factual.runs, factual.runs[1:], strict=False)):
        if before != after:
            axes.axvline(index + 0.5, color="#999999", linewidth=0.6, linestyle=":")
    if len(turns) <= _NAMED:
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
    """The features that a turn's alignment with the strategy is made of: Σ over its tokens of v[j] h̃_t[j].

    Args:
        layer: one that has an SAE.
        turn: index into the retrieved turns; None: the most salient one.
        names: words to be shown beside the features' numbers.

    Raises:
        ModelError: a layer without an SAE.
        DataError: a turn that is not there.
    """
    turns = trace.state.factual.turns
    if turn is None:
        turn = max(range(len(turns)), key=lambda index: trace.state.salience[index])
    if not 0 <= turn < len(turns):
        raise DataError(f"there is no turn {turn}; {len(turns)} were retrieved", record=trace.state.factual.question.id)
    found = trace.top_features(layer, turn, n)
    figure = new_figure(7, 1.1 + 0.26 * max(1, len(found)))
    axes = figure.subplots()
    labels = [f"{feature}  {names[feature]}" if names and feature in names else str(feature) for feature, _ in found]
    axes.barh(range(len(found)), [value for _, value in found], color=COLOURS[0])
    axes.set_yticks(range(len(found)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"share in the turn's alignment, layer {layer}")
    axes.spines[["top", "right"]].set_visible(False)
    text = f"{turns[turn].speaker}: {one_line(turns[turn].text)}"
    axes.set_title(_title(text if found else f"{text} - nothing carried it"), loc="left", fontsize=9)
    return Picture(figure)


def plot_settings(traces: Mapping[str, GroundingTrace]) -> Picture:
    """The same question under several settings: salience of each turn as its rank, marked turns framed.

    The number at the right is the share of the gold evidence that the marked turns hold, where gold is known.

    Args:
        traces: by what was changed; of one factual state.

    Raises:
        DataError: no traces, or of different states.
    """
    if not traces or len({trace.state.factual.positions for trace in traces.values()}) > 1:
        raise DataError("settings are compared on one factual state: give traces of the same one")
    ranks = torch.stack([_ranks(trace) for trace in traces.values()])
    first = next(iter(traces.values()))
    turns, gold = first.state.factual.turns, set(_gold(first))
    figure = new_figure(max(6.5, min(14.0, 0.17 * len(turns) + 3.2)), 1.1 + 0.3 * len(traces))
    axes = figure.subplots()
    image = axes.imshow(ranks.numpy(), aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    for row, trace in enumerate(traces.values()):
        for start, end in trace.state.blocks:
            axes.add_patch(_frame(start - 0.5, row - 0.42, end - start + 1, 0.84))
        if gold:
            held = {turns[index].id for index in _marked(trace)}
            label = f"{len(gold & held)} of {len(gold)}"
            axes.text(len(turns) - 0.2, row, label, va="center", fontsize=8, color=_GOLD)
    if gold:
        places = [index for index, turn in enumerate(turns) if turn.id in gold]
        axes.plot(places, [-0.75] * len(places), "v", color=_GOLD, markersize=5, clip_on=False)
    axes.set_yticks(range(len(traces)), list(traces), fontsize=8)
    axes.set_xlabel("retrieved turn")
    axes.spines[:].set_visible(False)
    axes.set_title(
        "framed: marked   ▾ gold evidence, at the right how much of it is marked", loc="left", fontsize=8, pad=12
    )
    bar = figure.colorbar(image, ax=axes, pad=0.09, fraction=0.03)
    bar.set_ticks([0, 1], labels=["least", "most\nsalient"], fontsize=7)
    return Picture(figure)


def _marked(trace: GroundingTrace) -> set[int]:
    return {index for start, end in trace.state.blocks for index in range(start, end + 1)}


def _gold(trace: GroundingTrace) -> tuple[str, ...]:
    """Evidence turns; for visual questions the turns of the gold images."""
    factual = trace.state.factual
    if not factual.question.visual:
        return factual.question.evidence
    images = set(factual.question.images)
    return tuple(turn.id for turn in factual.turns if any(image.index in images for image in turn.images))


def _ranks(trace: GroundingTrace) -> torch.Tensor:
    values = torch.tensor(trace.state.salience)
    return values.argsort(stable=True).argsort().float() / max(1, len(values) - 1)


def _frame(x: float, y: float, width: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, fill=False, edgecolor=_MARKED, linewidth=1.6)


def _legend(axes: Axes, entries: Sequence[tuple[str, str, str]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, marker=shape, linestyle="", label=text) for colour, shape, text in entries]
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(handles=handles, fontsize=8, frameon=False, ncols=3, loc="outside lower right")


def _title(text: str, most: int = 70) -> str:
    # a dollar sign would begin a formula
    text = one_line(text).replace("$", r"\$")
    return text if len(text) <= most else f"{text[: most - 1]}…"
