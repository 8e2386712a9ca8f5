"""Pictures of runs: what is drawn is what metrics.jsonl says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remind.core.errors import ConfigError, DataError
from remind.viewing.config import PlotRunConfig
from remind.viewing.plots import plot_run, plot_trajectory


def _folder(path: Path, steps: int = 10, accuracy: bool = True) -> Path:
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        hard = 0.5 * step / steps
        shares = {"share_hard": hard, "share_dist01": 0.75 * (1 - hard), "share_dist12": 0.25 * (1 - hard)}
        watched = {f"{name}{level}": step + level / 10 for name in ("ce", "entropy") for level in range(3)}
        rows.append({"step": step, "kind": "train", **shares, "jsd01": 1 / step, "jsd12": 2 / step, **watched, "lr": 1})
        if accuracy and step % 5 == 0:
            rows.append({"step": step, "kind": "accuracy", "x0": 0.1 * step, "x1": 0.7, "x2": 1.0, "questions": 10})
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_lines_are_the_numbers_of_the_file(tmp_path: Path) -> None:
    run = _folder(tmp_path / "a")
    figure = plot_trajectory({"a": run, "b": _folder(tmp_path / "b", 4, accuracy=False)}).figure
    shares, jsd, ce, _, accuracy = figure.axes[:5]

    def line(axes: Any, label: str) -> Any:
        return next(line for line in axes.get_lines() if line.get_label() == label)

    assert np.allclose(line(jsd, "x1 and x2").get_ydata(), [2 / step for step in range(1, 11)])
    assert np.allclose(line(ce, "x2").get_ydata()[:2], [1.2, 2.2])
    assert np.allclose(line(accuracy, "x0").get_xydata(), [[5, 0.5], [10, 1.0]])
    # the areas lie on one another and reach 1 together; the hard loss is the lowest
    tops = [area.get_paths()[0].vertices for area in shares.collections]
    assert np.isclose([max(tops[0][:, 1]), max(tops[2][:, 1])], [0.5, 1.0]).all()
    # a smoothed value is the mean of a step and those before it
    smoothed = plot_trajectory(run, ["jsd"], smooth=2).figure.axes[0]
    assert np.allclose(line(smoothed, "x0 and x1").get_ydata()[:3], [1, (1 + 1 / 2) / 2, (1 / 2 + 1 / 3) / 2])
    plot_run(PlotRunConfig([str(run)], panels=("shares", "lr")))
    assert (run / "trajectory.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_what_cannot_be_drawn_is_said_in_one_line(tmp_path: Path) -> None:
    run = _folder(tmp_path / "run", accuracy=False)
    with pytest.raises(ConfigError, match="has measured accuracy; there are shares, jsd, ce, entropy, lr"):
        plot_trajectory(run, ["accuracy"])
    with pytest.raises(ConfigError, match=r"plot\.txt: a plot is written as \.png"):
        PlotRunConfig([str(run)], out="plot.txt")
    with pytest.raises(DataError, match="not a run folder"):
        plot_run(PlotRunConfig([str(tmp_path)]))
