"""Pictures of runs, for scripts and notebooks. What they show is said in each function."""

from remind.viewing.plots.answers import answer_probabilities, plot_answers
from remind.viewing.plots.grounding import plot_carried, plot_salience, plot_settings
from remind.viewing.plots.style import LEVEL_COLOURS
from remind.viewing.plots.trajectory import PlotRunConfig, plot_run, plot_trajectory

__all__ = [
    "LEVEL_COLOURS",
    "PlotRunConfig",
    "answer_probabilities",
    "plot_answers",
    "plot_carried",
    "plot_run",
    "plot_salience",
    "plot_settings",
    "plot_trajectory",
]
