"""Plots of runs, grounding and answers. Importing them does not load matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from remind.alignment.metrics import METRICS, read_metrics
from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import gold_turns
from remind.grounding.ground import GroundingTrace
from remind.models.backbone import Backbone
from remind.models.chat import prompt_ids, tokenize
from remind.models.generate import check_generates
from remind.states.pyramid import LETTERS, LEVELS, one_line
from remind.states.records import StateRecord
from remind.viewing.config import PlotRunConfig
from remind.viewing.pages import marked_turns
from sae.figures import COLOURS, Picture, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
Answers = Mapping[str, Mapping[str, float]]
LEVEL_COLOURS = {"x0": "#0072B2", "x1": "#E69F00", "x2": "#009E73"}
_LEVEL_SHAPES = {"x0": "o", "x1": "s", "x2": "^"}
_NOTE = "A low divergence (JSD) is not success: three wrong answers agree as well. See the accuracy"
_MARKED, _PLAIN, _GOLD, _FEATURE = "#E69F00", "#b8c4cc", "#009E73", "#0072B2"
#: Turns whose ids are still readable below the bars.
_LABELLED = 40


def plot_run(cfg: PlotRunConfig) -> Path:
    """Write the plot; prints its path.

    Raises:
        DataError: a folder without metrics.jsonl, or before its first step.
        ConfigError: a panel that no run has measured.
    """
    runs = {folder: folder for folder in cfg.run}
    out = Path(cfg.out) if cfg.out is not None else Path(cfg.run[0]) / "trajectory.png"
    path = plot_trajectory(runs, cfg.panels, cfg.smooth).save(out)
    print(f"plot: {path}")
    return path


def plot_trajectory(
    runs: str | Path | Mapping[str, str | Path | Rows], panels: Sequence[str] = (), smooth: int = 1
) -> Picture:
    """A row of panels for each run.

    - shares: what each summand adds to the loss (Figure 14).
    - jsd: Jensen–Shannon divergence of each pair of states in the objective, in nats (Eq. 21; Figure 14).
    - ce, entropy: cross-entropy with the answers, and entropy, under each state. Lines: training batches; points:
      held-out questions.
    - accuracy: share of questions answered correctly from each state, where `accuracy_probe` measured it.
    - lr: learning rate.

    Args:
        runs: a run folder, or several by title, or rows of metrics.jsonl.
        panels: names; none: all that some run has measured, except lr.
        smooth: as in `PlotRunConfig`.

    Raises:
        DataError: a folder without metrics.jsonl, or before its first step.
        ConfigError: panels that no run has measured.
    """
    by_title = {"": runs} if isinstance(runs, str | Path) else runs
    rows_of = {title: _rows(run) for title, run in by_title.items()}
    measured = [name for name in _DRAWN if any(_keys(rows, name) for rows in rows_of.values())]
    names = list(panels) or [name for name in measured if name != "lr"]
    if missing := [name for name in names if name not in measured]:
        raise ConfigError(f"no run has measured {missing[0]}; there are {', '.join(measured)}")
    figure = new_figure(3.6 * len(names), 2.7 * len(rows_of) + 0.4)
    if "jsd" in names:
        where = "beside it" if "accuracy" in names else "by remind evaluate"
        figure.suptitle(f"{_NOTE} {where}", fontsize=9, color="#666666", x=0.01, ha="left")
    grid = figure.subplots(len(rows_of), len(names), squeeze=False, sharex="row")
    for panel_row, (title, rows) in zip(grid, rows_of.items(), strict=True):
        for axes, name in zip(panel_row, names, strict=True):
            _draw(axes, rows, name, smooth)
        panel_row[0].set_title(title, loc="left", fontsize=10, pad=18 if title else None)
    for column, name in zip(grid.T, names, strict=True):
        # one scale for all runs
        drawn = [axes.get_ylim()[1] for axes in column if axes.has_data()]
        top = {"shares": 1.0, "accuracy": 1.04}.get(name, max(drawn))
        for axes in column:
            axes.set_ylim(0, top)
    for axes in grid[-1]:
        axes.set_xlabel("optimiser step")
    return Picture(figure)


def _rows(run: str | Path | Rows) -> Rows:
    if not isinstance(run, str | Path):
        return run
    rows = read_metrics(run)
    if not any(row["kind"] == "train" for row in rows):
        raise DataError("it holds no step yet", Path(run) / METRICS)
    return rows


def _of(rows: Rows, kind: str) -> Rows:
    # a resumed run may have measured a step twice
    return list({row["step"]: row for row in rows if row.get("kind", "train") == kind}.values())


def _keys(rows: Rows, panel: str) -> list[str]:
    """What a panel shows of metrics.jsonl."""
    kinds = ("accuracy",) if panel == "accuracy" else ("train", "eval")
    measured = [row for kind in kinds for row in _of(rows, kind)]
    return sorted({key for row in measured for key in row if key.startswith(_DRAWN[panel][0])})


def _line(rows: Rows, name: str, smooth: int = 1) -> tuple[list[int], list[float]]:
    """Steps, and the values of this name averaged over up to `smooth` steps."""
    measured = [row for row in rows if row.get(name) is not None]
    values = [float(row[name]) for row in measured]
    windows = [values[max(0, end - smooth) : end] for end in range(1, len(values) + 1)]
    return [row["step"] for row in measured], [sum(window) / len(window) for window in windows]


def _draw(axes: Axes, rows: Rows, panel: str, smooth: int) -> None:
    """A line for training batches and points for held-out questions; shares as areas."""
    steps, held_out = _of(rows, "accuracy" if panel == "accuracy" else "train"), _of(rows, "eval")
    keys = _keys(rows, panel)
    if panel == "shares":
        # the hard loss at the bottom, then the edges by number
        keys.sort(key=lambda key: (key != "share_hard", key))
        labels = {"share_hard": "hard loss"}
        labels |= {f"share_dist{s}{t}": f"x{t} → x{s}" for s in range(3) for t in range(3)}
        filled = [{key: row.get(key, 0.0) for key in ("step", *keys)} for row in steps]
        if len(filled) == 1:  # an area needs two points
            filled = [{**filled[0], "step": filled[0]["step"] - 0.5}, *filled]
        values = [_line(filled, key, smooth)[1] for key in keys]
        colours = ["#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#E69F00"]
        names = [labels.get(key, key) for key in keys]
        axes.stackplot([row["step"] for row in filled], values, labels=names, colors=colours, alpha=0.85)
    else:
        for key in keys:
            level = f"x{key[-1]}"
            name, colour, shape = level, LEVEL_COLOURS.get(level, "#000000"), _LEVEL_SHAPES.get(level, "o")
            if panel == "jsd":
                name, shape = f"x{key[-2]} and {level}", "o"
                colour = {"01": "#56B4E9", "12": "#009E73"}.get(key[-2:], "#CC79A7")
            line, points = _line(steps, key, smooth), _line(held_out, key)
            marker = shape if panel == "accuracy" else ""
            if line[0]:
                axes.plot(*line, color=colour, linewidth=1.2, marker=marker, markersize=5, label=name)
            if points[0]:  # of a level that only teaches nothing else is measured
                axes.plot(*points, shape, color=colour, markersize=4, label=None if line[0] else name)
    axes.set_ylabel(_DRAWN[panel][1])
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params("x", integer=True)
    if panel != "lr" and axes.get_legend_handles_labels()[1]:
        where = {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98), "borderpad": 0.2, "handlelength": 1.2}
        axes.legend(**where, fontsize=7, frameon=False, ncols=3, columnspacing=1.0)


#: By panel, in order: how the keys it plots begin in metrics.jsonl, and what is on its axis.
_DRAWN = {
    "shares": ("share_", "share of the loss"),
    "jsd": ("jsd", "JSD (nats)"),
    "ce": ("ce", "cross-entropy (nats)"),
    "entropy": ("entropy", "entropy (nats)"),
    "accuracy": ("x", "accuracy"),
    "lr": ("lr", "learning rate"),
}


def plot_salience(trace: GroundingTrace) -> Picture:
    """s_turn of every retrieved turn (Eq. 5) in the order of the dialogue; marked blocks and gold evidence stand out.

    Turns without a token that counts have no bar. Dotted lines separate runs: between two of them turns are left out.
    """
    from matplotlib.lines import Line2D

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
    entries = ((_MARKED, "s", "in a marked block"), (_PLAIN, "s", "not marked"), (_GOLD, "v", "gold evidence"))
    handles = [Line2D([], [], color=colour, marker=shape, linestyle="", label=text) for colour, shape, text in entries]
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=handles, fontsize=8, frameon=False, ncols=3, loc="outside lower right")
    return Picture(figure)


def plot_carried(
    trace: GroundingTrace, layer: int, turn: int, n: int = 10, names: Mapping[int, str] | None = None
) -> Picture:
    """The features that a turn's alignment with the strategy is made of, as shares of Σ over its tokens of v[j] h̃_t[j].

    Args:
        layer: one that has an SAE.
        turn: index into the retrieved turns.
        names: labels shown beside feature numbers.

    Raises:
        ModelError: a layer without an SAE.
        DataError: no such turn.
    """
    turns = trace.state.factual.turns
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
    from matplotlib.patches import Rectangle

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


def _title(text: str, longest: int = 70) -> str:
    text = one_line(text)
    # a dollar sign would begin a formula
    return (text if len(text) <= longest else f"{text[: longest - 1]}…").replace("$", r"\$")


def answer_probabilities(backbone: Backbone, record: StateRecord) -> dict[str, dict[str, float]]:
    """The probability that a model's answer begins with each option's letter, by level.

    It is the product over the tokens of `<answer>` and the letter. What is missing to 1 is the probability of all other
    answers.

    Args:
        record: the states of a single-choice question.

    Raises:
        ConfigError: a question of another format. ModelError: a model that does not generate.
    """
    if record.format != "single":
        raise ConfigError(f"{record.question_id} is not a single-choice question")
    check_generates(backbone)
    names, prompts = LETTERS[: len(record.options)], {level: record.level(level).text for level in LEVELS}
    return {level: {name: _probability(backbone, text, name) for name in names} for level, text in prompts.items()}


def _probability(backbone: Backbone, prompt: str, name: str) -> float:
    before = prompt_ids(backbone.tokenizer, prompt)
    # the closing tag is tokenized with it, because it decides where a tokenizer splits the end of the candidate
    whole = tokenize(backbone.tokenizer, f"<answer>{name}</answer><explanation></explanation>")
    end = len(f"<answer>{name}")
    answer = [token for token, (start, _) in zip(whole.ids, whole.offsets, strict=True) if start < end]
    ids = torch.tensor([[*before, *answer]], device=backbone.device)
    with torch.no_grad():
        logits = backbone.model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1].float()
    return float(logits.log_softmax(-1).gather(-1, ids[0, len(before) :, None]).sum().exp())


def plot_answers(runs: Mapping[str, Answers], right: Sequence[str] = (), title: str = "") -> Picture:
    """Bars of `answer_probabilities`: a panel for each model, a bar for each state, gold answers in bold.

    Args:
        runs: by title, e.g. before and after training.
        right: the gold answers among the candidates.
    """
    figure = new_figure(3.4 * len(runs) + 0.6, 3)
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for axes, (name, answers) in zip(panels, runs.items(), strict=True):
        candidates = list(next(iter(answers.values())))
        rows = {level: [values[candidate] for candidate in candidates] for level, values in answers.items()}
        _grouped_bars(axes, candidates, rows, [LEVEL_COLOURS.get(level) for level in rows])
        for label in axes.get_xticklabels():
            label.set_fontweight("bold" if label.get_text() in right else "normal")
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylim(0, 1)
    panels[0].set_ylabel("probability of the answer")
    panels[-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(one_line(title).replace("$", r"\$"), fontsize=10, x=0.01, ha="left")
    return Picture(figure)


def plot_next(
    backbone: Backbone,
    prompt: str,
    under: Mapping[str, AbstractContextManager[Any]],
    start: str = "<answer>",
    n: int = 6,
) -> Picture:
    """The probability of the next token of a model's answer, under edits of its residual stream.

    Args:
        prompt: the user's message, e.g. `render(state).text`.
        under: by name, `sae.probe.steer(...)` and `ablate(...)`, each good for one call; `nullcontext()` for no edit.
        start: what the answer begins with.
        n: tokens shown, those with the largest probability under any edit.

    Raises:
        ModelError: a model that does not generate.
    """
    check_generates(backbone)
    ids = [*prompt_ids(backbone.tokenizer, prompt), *tokenize(backbone.tokenizer, start).ids]
    inputs = torch.tensor([ids], device=backbone.device)
    rows = {}
    for name, edit in under.items():
        with torch.no_grad(), edit:
            rows[name] = backbone.model(input_ids=inputs, use_cache=False).logits[0, -1].float().softmax(-1).cpu()
    tokens = torch.stack(list(rows.values())).amax(0).topk(n).indices.tolist()
    figure = new_figure(max(5.0, 0.9 * n + 1.5), 2.8)
    axes = figure.subplots()
    labels = [repr(backbone.tokenizer.decode([token]))[1:-1].replace("$", r"\$") for token in tokens]
    _grouped_bars(axes, labels, {name: values[tokens].tolist() for name, values in rows.items()}, COLOURS)
    axes.set_ylabel("probability of the next token")
    axes.legend(frameon=False, fontsize=8)
    return Picture(figure)


def _grouped_bars(
    axes: Axes, labels: Sequence[str], rows: Mapping[str, Sequence[float]], colours: Sequence[str | None]
) -> None:
    """A group of bars for each label, with one bar for each row."""
    for number, (name, values) in enumerate(rows.items()):
        shift = (number - (len(rows) - 1) / 2) * 0.8 / len(rows)
        places = [place + shift for place in range(len(labels))]
        axes.bar(places, values, 0.75 / len(rows), color=colours[number % len(colours)], label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.spines[["top", "right"]].set_visible(False)
