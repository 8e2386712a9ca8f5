"""What a training run went through, from its metrics.jsonl: the panels of Figure 14, and what they leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.alignment.metrics import METRICS, read_metrics
from remind.core.errors import ConfigError, DataError
from remind.states.pyramid import LEVELS
from remind.viewing.plots.style import LEVEL_COLOURS, LEVEL_SHAPES
from sae.figures import COLOURS, Picture, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
NOTE = "A low divergence (JSD) is not success: three wrong answers agree as well. See the accuracy beside it"


@dataclass
class PlotRunConfig:
    """Draw what training runs went through: loss shares, divergences, cross-entropies, entropies, accuracy."""

    run: list[str]
    """Run folders of train_pra.py, one row of the picture each."""
    out: str | None = None
    """File to write: .png, .svg or .pdf. None: trajectory.png in the first run folder."""
    panels: tuple[str, ...] = ()
    """Which of shares, jsd, ce, entropy, accuracy, lr to draw. None given: all that a run knows of but lr."""
    smooth: int = 1
    """Steps over which the lines of single training batches are averaged, each with those before it; 1: not at all."""

    def __post_init__(self) -> None:
        self.panels = tuple(self.panels)
        if not self.run:
            raise ConfigError("name a run folder: --run '[runs/pra]'")
        if self.smooth < 1:
            raise ConfigError(f"smooth is {self.smooth}; it must be 1 or more")
        if wrong := [name for name in self.panels if name not in PANELS]:
            raise ConfigError(f"no panel {wrong[0]!r}; there are {', '.join(PANELS)}")


def plot_run(cfg: PlotRunConfig) -> Path:
    """Write the picture; prints where it is.

    Raises:
        DataError: a folder without metrics.jsonl, or before its first step.
        ConfigError: a panel of which no run knows anything.
    """
    runs = {Path(folder).name: folder for folder in cfg.run}
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
    - jsd: Jensen–Shannon divergence of each pair of states that the objective has, in nats (Eq. 21; Figure 14).
    - ce, entropy: cross-entropy with the answers, and entropy, under each state. Lines: training batches; points: the
      same on held-out questions.
    - accuracy: questions answered rightly from each state, where the run measured it (`train_with_accuracy`).
    - lr: learning rate.

    Args:
        runs: a run folder, or by title several, or rows as metrics.jsonl has them.
        panels: names; none: all of which some run knows, but lr.
        smooth: as `PlotRunConfig` has it.

    Raises:
        DataError: a folder without metrics.jsonl, or before its first step.
        ConfigError: panels that are not there, or of which no run knows anything.
    """
    given = {"": runs} if isinstance(runs, str | Path) else runs
    found = {title: _rows(run) for title, run in given.items()}
    if wrong := [name for name in panels if name not in PANELS]:
        raise ConfigError(f"no panel {wrong[0]!r}; there are {', '.join(PANELS)}")
    known = [name for name in PANELS if any(_knows(rows, name) for rows in found.values())]
    names = list(panels) or [name for name in known if name != "lr"]
    if missing := [name for name in names if name not in known]:
        raise ConfigError(f"these runs tell nothing of {missing[0]}; there are {', '.join(known)}")
    figure = new_figure(3.6 * len(names), 2.7 * len(found) + 0.4)
    if "jsd" in names:
        figure.suptitle(NOTE, fontsize=9, color="#666666", x=0.01, ha="left")
    grid = figure.subplots(len(found), len(names), squeeze=False, sharex="row")
    for line, (title, rows) in zip(grid, found.items(), strict=True):
        for axes, name in zip(line, names, strict=True):
            PANELS[name][1](axes, rows, smooth)
        line[0].set_title(title, loc="left", fontsize=10, pad=18 if title else None)
    for name in names:
        # runs under one another are to be compared
        own = grid[:, names.index(name)]
        top = max(axes.get_ylim()[1] for axes in own)
        for axes in own:
            axes.set_ylim(0, {"shares": 1.0, "accuracy": 1.04}.get(name, top))
    for axes in grid[-1]:
        axes.set_xlabel("optimiser step")
    return Picture(figure)


def _rows(run: str | Path | Rows) -> Rows:
    if not isinstance(run, str | Path):
        return run
    rows = read_metrics(run)
    if not any(row["kind"] == "train" for row in rows):
        raise DataError("no step is in it yet", Path(run) / METRICS)
    return rows


def _of(rows: Rows, kind: str) -> Rows:
    # what a resumed run measured again counts once
    return list({row["step"]: row for row in rows if row.get("kind", "train") == kind}.values())


def _knows(rows: Rows, name: str) -> bool:
    start = PANELS[name][0]
    if name == "accuracy":
        return bool(_of(rows, "accuracy"))
    return any(key.startswith(start) for row in _of(rows, "train") for key in row)


def _names(rows: Rows, start: str) -> list[str]:
    return sorted({name for row in rows for name in row if name.startswith(start)})


def _line(rows: Rows, name: str, smooth: int = 1) -> tuple[list[int], list[float]]:
    own = [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]
    values = [value for _, value in own]
    windows = [values[max(0, end - smooth) : end] for end in range(1, len(values) + 1)]
    return [step for step, _ in own], [sum(window) / len(window) for window in windows]


def _finish(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params("x", integer=True)
    if axes.get_legend_handles_labels()[1]:
        # above the axes, where it hides nothing
        where = {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98), "borderpad": 0.2, "handlelength": 1.2}
        axes.legend(**where, fontsize=7, frameon=False, ncols=3, columnspacing=1.0)


def _shares(axes: Axes, rows: Rows, smooth: int) -> None:
    steps = _of(rows, "train")
    # the hard loss lies at the bottom, then the edges by number
    names = sorted(_names(steps, "share_"), key=lambda name: (name != "share_hard", name))
    labels = {"share_hard": "hard loss"}
    labels |= {f"share_dist{s}{t}": f"x{t} → x{s}" for s in range(3) for t in range(3)}
    filled = [{name: row.get(name, 0.0) for name in ("step", *names)} for row in steps]
    values = [_line(filled, name, smooth)[1] for name in names]
    if len(filled) == 1:  # an area needs two points
        filled, values = filled * 2, [value * 2 for value in values]
    places = [row["step"] - 0.5 * (number == 0 and len(steps) == 1) for number, row in enumerate(filled)]
    colours = [COLOURS[5], COLOURS[1], COLOURS[2], COLOURS[3], COLOURS[4]]
    axes.stackplot(places, values, labels=[labels.get(name, name) for name in names], colors=colours, alpha=0.85)
    _finish(axes, "share of the loss")


def _divergences(axes: Axes, rows: Rows, smooth: int) -> None:
    for name, colour in zip(_names(_of(rows, "train"), "jsd"), (COLOURS[1], COLOURS[2], COLOURS[3]), strict=False):
        label = f"x{name[-2]} and x{name[-1]}"
        axes.plot(*_line(_of(rows, "train"), name, smooth), color=colour, linewidth=1.2, label=label)
        axes.plot(*_line(_of(rows, "eval"), name), "o", color=colour, markersize=4)
    _finish(axes, "JSD (nats)")


def _by_level(start: str, label: str) -> Callable[[Axes, Rows, int], None]:
    def draw(axes: Axes, rows: Rows, smooth: int) -> None:
        for number, level in enumerate(LEVELS):
            name, colour = f"{start}{number}", LEVEL_COLOURS[level]
            steps, values = _line(_of(rows, "train"), name, smooth)
            if steps:
                axes.plot(steps, values, color=colour, linewidth=1.2, label=level)
            axes.plot(*_line(_of(rows, "eval"), name), LEVEL_SHAPES[level], color=colour, markersize=4)
        _finish(axes, label)

    return draw


def _accuracies(axes: Axes, rows: Rows, smooth: int) -> None:
    for level in LEVELS:
        steps, values = _line(_of(rows, "accuracy"), level)
        axes.plot(steps, values, marker=LEVEL_SHAPES[level], color=LEVEL_COLOURS[level], markersize=5, label=level)
    _finish(axes, "accuracy")


def _rates(axes: Axes, rows: Rows, smooth: int) -> None:
    axes.plot(*_line(_of(rows, "train"), "lr"), color=COLOURS[6])
    _finish(axes, "learning rate")


#: By name: how the figures it needs begin in metrics.jsonl, and what draws it.
PANELS: dict[str, tuple[str, Callable[[Axes, Rows, int], None]]] = {
    "shares": ("share_", _shares),
    "jsd": ("jsd", _divergences),
    "ce": ("ce", _by_level("ce", "cross-entropy (nats)")),
    "entropy": ("entropy", _by_level("entropy", "entropy (nats)")),
    "accuracy": ("x", _accuracies),
    "lr": ("lr", _rates),
}
