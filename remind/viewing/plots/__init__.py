"""Plots of runs and of grounding, for scripts and notebooks. Importing them loads neither torch nor matplotlib."""

from remind.viewing.plots.answers import answer_probabilities, plot_answers, plot_next
from remind.viewing.plots.grounding import plot_carried, plot_salience, plot_settings
from remind.viewing.plots.trajectory import LEVEL_COLOURS, plot_run, plot_trajectory

__all__ = [
    "LEVEL_COLOURS",
    "answer_probabilities",
    "plot_answers",
    "plot_carried",
    "plot_next",
    "plot_run",
    "plot_salience",
    "plot_settings",
    "plot_trajectory",
]
