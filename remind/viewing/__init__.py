"""What notebooks show: a workbench that opens model, dialogues and SAEs, and pages of coloured tokens."""

from remind.viewing.own import ask_about, new_folder
from remind.viewing.page import Page
from remind.viewing.probing import (
    best_features,
    example_words,
    feature_heat,
    image_tokens,
    search_table,
    show_examples,
    show_feature,
    turn_features,
)
from remind.viewing.steered import plot_next
from remind.viewing.tokens import show_dialogue, show_levels
from remind.viewing.workbench import Workbench, open_workbench

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
    "show_feature",
    "show_levels",
    "turn_features",
]
