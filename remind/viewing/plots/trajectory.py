"""Plots of training runs from their metrics.jsonl: the panels of Figure 14, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import ConfigError, DataError
from remind.states.pyramid import LEVELS
from remind.viewing.config import PANELS, PlotRunConfig, check_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sae.figures import Picture

Rows = Sequence[Mapping[str, Any]]
LEVEL_COLOURS = {"x0": "#0072B2", "x1": "#E69F00", "x2": "#009E73"}
_LEVEL_SHAPES = {"x0": "o", "x1": "s", "x2": "^"}
_NOTE = "A low divergence (JSD) is not success: three wrong answers agree as well. See the accuracy"


def plot_run(cfg: PlotRunConfig) -> Path:
    """Write the plot; prints its path.

    Raises:
        DataError: a folder without metrics.jsonl, or before its first step.
        ConfigError: a panel that no run has measured.
    """
    runs: dict[str, str | Path | Rows] = {Path(folder).name: folder for folder in cfg.run}
    if len(runs) < len(cfg.run):
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
        ConfigError: unknown panels, or panels that no run has measured.
    """
    from sae.figures import Picture, new_figure

    check_panels(panels)
    by_title = {"": runs} if isinstance(runs, str | Path) else runs
    rows_of = {title: _rows(run) for title, run in by_title.items()}
    measured = [name for name in PANELS if any(_has(rows, name) for rows in rows_of.values())]
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
            _DRAWN[name][1](axes, rows, smooth)
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
    from remind.alignment.metrics import METRICS, read_metrics

    if not isinstance(run, str | Path):
        return run
    rows = read_metrics(run)
    if not any(row["kind"] == "train" for row in rows):
        raise DataError("it holds no step yet", Path(run) / METRICS)
    return rows


def _of(rows: Rows, kind: str) -> Rows:
    # a resumed run may have measured a step twice
    return list({row["step"]: row for row in rows if row.get("kind", "train") == kind}.values())


def _has(rows: Rows, panel: str) -> bool:
    if panel == "accuracy":
        return bool(_of(rows, "accuracy"))
    return bool(_names(_of(rows, "train"), _DRAWN[panel][0]))


def _names(rows: Rows, start: str) -> list[str]:
    return sorted({name for row in rows for name in row if name.startswith(start)})


def _line(rows: Rows, name: str, smooth: int = 1) -> tuple[list[int], list[float]]:
    """Steps, and the values of this name averaged over up to `smooth` steps."""
    measured = [row for row in rows if row.get(name) is not None]
    values = [float(row[name]) for row in measured]
    windows = [values[max(0, end - smooth) : end] for end in range(1, len(values) + 1)]
    return [row["step"] for row in measured], [sum(window) / len(window) for window in windows]


def _finish(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params("x", integer=True)
    if axes.get_legend_handles_labels()[1]:
        where = {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98), "borderpad": 0.2, "handlelength": 1.2}
        axes.legend(**where, fontsize=7, frameon=False, ncols=3, columnspacing=1.0)


def _shares(axes: Axes, rows: Rows, smooth: int) -> None:
    steps = _of(rows, "train")
    # the hard loss at the bottom, then the edges by number
    names = sorted(_names(steps, "share_"), key=lambda name: (name != "share_hard", name))
    labels = {"share_hard": "hard loss"}
    labels |= {f"share_dist{s}{t}": f"x{t} → x{s}" for s in range(3) for t in range(3)}
    filled = [{name: row.get(name, 0.0) for name in ("step", *names)} for row in steps]
    if len(filled) == 1:  # an area needs two points
        filled = [{**filled[0], "step": filled[0]["step"] - 0.5}, *filled]
    values = [_line(filled, name, smooth)[1] for name in names]
    places = [row["step"] for row in filled]
    colours = ["#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#E69F00"]
    axes.stackplot(places, values, labels=[labels.get(name, name) for name in names], colors=colours, alpha=0.85)
    _finish(axes, "share of the loss")


def _lines(axes: Axes, rows: Rows, smooth: int, key: str, label: str, colour: str, marker: str = "o") -> None:
    """A line for training batches and points for held-out questions."""
    steps, values = _line(_of(rows, "train"), key, smooth)
    held_out = _line(_of(rows, "eval"), key)
    if steps:
        axes.plot(steps, values, color=colour, linewidth=1.2, label=label)
    if held_out[0]:  # of a level that only teaches nothing else is measured
        axes.plot(*held_out, marker, color=colour, markersize=4, label=None if steps else label)


def _divergences(axes: Axes, rows: Rows, smooth: int) -> None:
    for key, colour in zip(_names(_of(rows, "train"), "jsd"), ("#56B4E9", "#009E73", "#CC79A7"), strict=False):
        _lines(axes, rows, smooth, key, f"x{key[-2]} and x{key[-1]}", colour)
    _finish(axes, "JSD (nats)")


def _by_level(key: str, label: str) -> Callable[[Axes, Rows, int], None]:
    def draw(axes: Axes, rows: Rows, smooth: int) -> None:
        for number, level in enumerate(LEVELS):
            _lines(axes, rows, smooth, f"{key}{number}", level, LEVEL_COLOURS[level], _LEVEL_SHAPES[level])
        _finish(axes, label)

    return draw


def _accuracies(axes: Axes, rows: Rows, smooth: int) -> None:
    for level in LEVELS:
        steps, values = _line(_of(rows, "accuracy"), level)
        axes.plot(steps, values, marker=_LEVEL_SHAPES[level], color=LEVEL_COLOURS[level], markersize=5, label=level)
    _finish(axes, "accuracy")


def _rates(axes: Axes, rows: Rows, smooth: int) -> None:
    axes.plot(*_line(_of(rows, "train"), "lr"), color="#000000")
    _finish(axes, "learning rate")


#: By name: how the keys it plots begin in metrics.jsonl, and the function that draws it.
_DRAWN: dict[str, tuple[str, Callable[[Axes, Rows, int], None]]] = {
    "shares": ("share_", _shares),
    "jsd": ("jsd", _divergences),
    "ce": ("ce", _by_level("ce", "cross-entropy (nats)")),
    "entropy": ("entropy", _by_level("entropy", "entropy (nats)")),
    "accuracy": ("x", _accuracies),
    "lr": ("lr", _rates),
}
