"""What notebooks show: a workbench of model, dialogues and SAEs, and pages of shaded tokens.

Plots are in `remind.viewing.plots`, self-contained pages of grounding in `remind.viewing.inspector`. Importing any of
them loads neither torch nor matplotlib.
"""

from remind.viewing.pages import Page, show_dialogue, show_levels
from remind.viewing.plots import plot_next
from remind.viewing.probing import (
    best_features,
    example_words,
    feature_heat,
    image_tokens,
    search_table,
    show_examples,
    show_generated,
    turn_features,
)
from remind.viewing.workbench import Workbench, ask_about, new_folder, open_workbench

__all__ = [
    "Page",
    "Workbench",
    "ask_about",
    "best_features",
    "example_words",
    "feature_heat",
    "image_tokens",
    "new_folder",
    "open_workbench",
    "plot_next",
    "search_table",
    "show_dialogue",
    "show_examples",
    "show_generated",
    "show_levels",
    "turn_features",
]
