"""Pictures of runs: what is drawn is what metrics.jsonl says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remind.core.errors import ConfigError, DataError
from remind.viewing.config import PlotRunConfig
from remind.viewing.plots.trajectory import plot_run, plot_trajectory


def _rows(steps: int = 10, accuracy: bool = True) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        hard = 0.5 * step / steps
        shares = {"share_hard": hard, "share_dist01": 0.75 * (1 - hard), "share_dist12": 0.25 * (1 - hard)}
        watched = {f"{name}{level}": step + level / 10 for name in ("ce", "entropy") for level in range(3)}
        rows.append(
            {"step": step, "kind": "train", **shares, "jsd01": 1 / step, "jsd12": 2 / step, **watched, "lr": 1e-3}
        )
        if accuracy and step % 5 == 0:
            rows.append({"step": step, "kind": "accuracy", "x0": 0.1 * step, "x1": 0.7, "x2": 1.0, "questions": 10})
    return rows


def _folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_lines_are_the_numbers_of_the_file(tmp_path: Path) -> None:
    figure = plot_trajectory(_folder(tmp_path / "run", _rows())).figure
    labels = ["share of the loss", "JSD (nats)", "cross-entropy (nats)", "entropy (nats)", "accuracy"]
    assert [axes.get_ylabel() for axes in figure.axes] == labels
    shares, jsd, ce, _, accuracy = figure.axes

    def line(axes: Any, label: str) -> Any:
        return next(line for line in axes.get_lines() if line.get_label() == label)

    assert np.allclose(line(jsd, "x1 and x2").get_ydata(), [2 / step for step in range(1, 11)])
    assert np.allclose(line(ce, "x2").get_ydata()[:2], [1.2, 2.2])
    assert np.allclose(line(accuracy, "x0").get_xydata(), [[5, 0.5], [10, 1.0]])
    # the areas lie on one another and reach 1 together; the hard loss is the lowest
    assert [area.get_label() for area in shares.collections] == ["hard loss", "x1 → x0", "x2 → x1"]
    tops = [area.get_paths()[0].vertices for area in shares.collections]
    assert np.isclose(max(tops[0][:, 1]), 0.5)
    assert np.isclose(max(tops[2][:, 1]), 1.0)
    assert figure._suptitle.get_text().endswith("See the accuracy beside it")
    without = plot_trajectory(tmp_path / "run", ["jsd"]).figure
    assert without._suptitle.get_text().endswith("See the accuracy by remind evaluate")
    # a smoothed value is the mean of a step and those before it
    smoothed = plot_trajectory(tmp_path / "run", ["jsd"], smooth=2).figure.axes[0]
    assert np.allclose(line(smoothed, "x0 and x1").get_ydata()[:3], [1, (1 + 1 / 2) / 2, (1 / 2 + 1 / 3) / 2])


def test_runs_under_one_another_share_their_scale_and_panels(tmp_path: Path) -> None:
    runs = {"a": _folder(tmp_path / "a", _rows()), "b": _folder(tmp_path / "b", _rows(4, accuracy=False))}
    figure = plot_trajectory(runs).figure
    assert len(figure.axes) == 10
    assert figure.axes[1].get_ylim() == figure.axes[6].get_ylim()
    assert figure.axes[5].get_title(loc="left") == "b"
    # plain fine-tuning, after a single step
    rows = [{"step": 1, "kind": "train", "share_hard": 1.0, "ce0": 2.0, "entropy0": 1.0, "lr": 1e-3}]
    figure = plot_trajectory(_folder(tmp_path / "sft", rows)).figure
    assert [axes.get_ylabel() for axes in figure.axes][:2] == ["share of the loss", "cross-entropy (nats)"]
    # its empty panel stretches nobody's scale, and levels that are measured on held-out questions alone have a name
    some = [{**rows[0], "jsd01": 0.02}, {"step": 1, "kind": "eval", "ce0": 2.0, "ce1": 1.0}]
    figure = plot_trajectory({"pra": some, "sft": rows}, ["jsd", "ce"]).figure
    assert all(axes.get_ylim()[1] < 0.1 for axes in figure.axes[::2])
    assert [line.get_label() for line in figure.axes[1].get_legend().get_lines()] == ["x0", "x1"]


def test_what_cannot_be_drawn_is_said_in_one_line(tmp_path: Path) -> None:
    run = _folder(tmp_path / "run", _rows(accuracy=False))
    with pytest.raises(ConfigError, match="has measured accuracy; there are shares, jsd, ce, entropy, lr"):
        plot_trajectory(run, ["accuracy"])
    with pytest.raises(ConfigError, match="no panel 'loss'"):
        PlotRunConfig([str(run)], panels=("loss",))
    with pytest.raises(DataError, match="not a run folder"):
        plot_run(PlotRunConfig([str(tmp_path)]))
    with pytest.raises(DataError, match="it holds no step yet"):
        plot_trajectory(_folder(tmp_path / "empty", []))


def test_a_plot_is_written_into_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _folder(tmp_path / "run", _rows())
    plot_run(PlotRunConfig([str(run)], panels=("shares", "lr")))
    assert capsys.readouterr().out == f"plot: {run / 'trajectory.png'}\n"
    assert (run / "trajectory.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "trajectory.png"]
