"""Figure 14: the training trajectory: shares of the loss and divergence of student and teacher, by equal intervals."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.paper.config import PaperConfig
from experiments.paper.items import Result
from experiments.paper.settings import SMALL_MODEL
from remind.alignment.metrics import read_metrics
from remind.evaluation.tables import markdown_table
from sae.figures import COLOURS, Picture, new_figure

#: The paper's phases of training: the first 30 %, up to 70 %, the rest.
PHASES = (0.0, 0.3, 0.7, 1.0)
_STEPS = 12
#: Equal intervals of training in the picture.
_INTERVALS = 10
Row = Mapping[str, Any]


def fig14(cfg: PaperConfig) -> Result:
    """Means of each phase, and the plot; the small form trains first. Raises as training and plotting do."""
    assert cfg.out is not None
    runs = [Path(run) for run in cfg.runs] if cfg.runs else [_train(cfg, seed) for seed in cfg.seeds]
    metrics = {str(run): read_metrics(run) for run in runs}
    rows = {run: phases(found) for run, found in metrics.items()}
    names = list(dict.fromkeys(name for found in rows.values() for phase in found for name in phase if name != "steps"))
    body = [
        [_title(run), f"{PHASES[n]:.0%} to {PHASES[n + 1]:.0%}", str(phase["steps"])]
        + [f"{phase[name]:.3f}" if name in phase else "–" for name in names]
        for run, found in rows.items()
        for n, phase in enumerate(found)
    ]
    text = markdown_table(["run", "part of training", "steps", *names], body)
    intervals = {run: phases(found, [n / _INTERVALS for n in range(_INTERVALS + 1)]) for run, found in metrics.items()}
    data = {"phases": list(PHASES), "runs": rows, "intervals": intervals}
    return Result(data, text, _picture({_title(run): found for run, found in metrics.items()}))


def _title(run: str) -> str:
    """The end of a run's path: runs of several seeds have the same name."""
    return "/".join(Path(run).parts[-2:])


def parts(rows: Sequence[Row], bounds: Sequence[float]) -> list[list[Row]]:
    """The steps of each part of training; a step measured again after a resumed run counts once."""
    steps = list({row["step"]: row for row in rows if row["kind"] == "train"}.values())
    last = max((row["step"] for row in steps), default=0)
    return [[row for row in steps if start * last < row["step"] <= end * last] for start, end in pairwise(bounds)]


def phases(rows: Sequence[Row], bounds: Sequence[float] = PHASES) -> list[dict[str, float]]:
    """Of each part its number of steps, and means of what each summand adds to the loss and of the divergences."""
    found = []
    for here in parts(rows, bounds):
        names = sorted({name for row in here for name in row if name.startswith(("share_", "jsd"))})
        means = {name: sum(row.get(name, 0.0) for row in here) / len(here) for name in names}
        found.append({"steps": len(here), **means})
    return found


def _picture(runs: Mapping[str, Sequence[Row]]) -> Picture:
    """A panel for each run: bars of the shares in equal intervals of training, and above them the divergences, with
    the middle half of the steps of an interval."""
    figure = new_figure(7, 3.2 * len(runs))
    bounds = [n / _INTERVALS for n in range(_INTERVALS + 1)]
    for panel, (title, rows) in zip(figure.subplots(len(runs), 1, squeeze=False)[:, 0], runs.items(), strict=True):
        pieces, means = parts(rows, bounds), phases(rows, bounds)
        places = [100 * (start + end) / 2 for start, end in pairwise(bounds)]
        bottom = [0.0] * len(means)
        names = sorted({name for one in means for name in one if name.startswith("share_")})
        # the hard loss lies at the bottom, as in the paper
        for name, colour in zip(sorted(names, key=lambda name: name != "share_hard"), COLOURS[1:], strict=False):
            heights = [one.get(name, 0.0) for one in means]
            panel.bar(
                places, heights, 80 / _INTERVALS, bottom, color=colour, alpha=0.8, label=name.removeprefix("share_")
            )
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        right = panel.twinx()
        for name, line in zip(
            sorted({key for one in means for key in one if key.startswith("jsd")}), "-:", strict=False
        ):
            drawn = [
                (at, values)
                for at, here in zip(places, pieces, strict=True)
                if (values := [r[name] for r in here if name in r])
            ]
            low, middle, high = zip(*(np.quantile(values, (0.25, 0.5, 0.75)) for _, values in drawn), strict=True)
            spread = [np.subtract(middle, low), np.subtract(high, middle)]
            right.errorbar(
                [at for at, _ in drawn], middle, spread, fmt=f"o{line}", color="#B00000", label=name, capsize=2
            )
        panel.set_title(title, loc="left", fontsize=9)
        panel.set_ylabel("share of the loss")
        panel.set_xlabel("training, %")
        right.set_ylabel("JSD, nats")
        right.set_ylim(0, None)
        if title == next(iter(runs)):
            for axes, place in ((panel, "outside right upper"), (right, "outside right lower")):
                figure.legend(*axes.get_legend_handles_labels(), loc=place, fontsize=8)
    return Picture(figure)


def _train(cfg: PaperConfig, seed: int) -> Path:
    """A short run of the paper's objective on states of a world with its known answers."""
    from remind.testbed.ladder import LadderConfig, write_states
    from remind.testbed.world import WorldConfig, make_world
    from remind.train_pra.config import TrainConfig, TrainerConfig
    from remind.train_pra.run import train

    folder = Path(str(cfg.out)) / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    world = make_world(WorldConfig(train=2, dev=1, test=0, seed=seed))
    states = write_states(world, folder / "states", LadderConfig())
    trainer = TrainerConfig(learning_rate=1e-3, max_steps=_STEPS)
    return train(
        TrainConfig(states=str(states), model=SMALL_MODEL, out=str(folder / "run"), seed=seed, trainer=trainer)
    )
