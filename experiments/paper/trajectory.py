"""Figure 14: the training trajectory: shares of the loss and divergence of student and teacher, by phases of it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.paper.config import PaperConfig
from experiments.paper.items import Result
from experiments.paper.settings import SMALL_MODEL
from remind.alignment.metrics import read_metrics
from remind.evaluation.tables import markdown_table
from remind.viewing.plots import plot_trajectory

#: The paper's phases of training: the first 30 %, up to 70 %, the rest.
PHASES = (0.0, 0.3, 0.7, 1.0)
_STEPS = 12
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
    picture = plot_trajectory({_title(run): found for run, found in metrics.items()}, ("shares", "jsd"))
    return Result({"phases": list(PHASES), "runs": rows}, text, picture)


def _title(run: str) -> str:
    """The end of a run's path: runs of several seeds have the same name."""
    return "/".join(Path(run).parts[-2:])


def phases(rows: Sequence[Row], bounds: Sequence[float] = PHASES) -> list[dict[str, float]]:
    """Of each part its number of steps, and means of what each summand adds to the loss and of the divergences; a step
    measured again after a resumed run counts once."""
    steps = list({row["step"]: row for row in rows if row["kind"] == "train"}.values())
    last = max((row["step"] for row in steps), default=0)
    found = []
    for start, end in pairwise(bounds):
        here = [row for row in steps if start * last < row["step"] <= end * last]
        names = sorted({name for row in here for name in row if name.startswith(("share_", "jsd"))})
        means = {name: sum(row.get(name, 0.0) for row in here) / len(here) for name in names}
        found.append({"steps": len(here), **means})
    return found


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
