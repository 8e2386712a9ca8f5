"""Pages that show what grounding saw: tokens by resonance, their features, blocks, evidence, and the three states."""

from remind.viewing.inspector.collect import Inspection, LevelAnswer, inspect_record, inspect_state, level_answers
from remind.viewing.inspector.config import InspectConfig
from remind.viewing.inspector.page import page_data, write_page
from remind.viewing.inspector.run import inspect_grounding

__all__ = [
    "InspectConfig",
    "Inspection",
    "LevelAnswer",
    "inspect_grounding",
    "inspect_record",
    "inspect_state",
    "level_answers",
    "page_data",
    "write_page",
]
