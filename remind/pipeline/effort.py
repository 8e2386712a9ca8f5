"""How much work a dialogue's states are, by stage: what progress is measured in."""

from __future__ import annotations

from collections.abc import Sequence

from remind.data.dialogue import Dialogue, Question

#: What the time of a dialogue is told by, in order.
STAGES = ("segments", "cues", "retrieval", "codes", "grounding", "summaries", "states")


def effort(dialogue: Dialogue, questions: Sequence[Question]) -> dict[str, float]:
    """Units of work of each stage.

    Their ratios are those of the default settings on a CPU. Other models shift them, and with them the ETA within a
    dialogue; over several dialogues that evens out.
    """
    turns, asked = len(dialogue.turns), len(questions)
    kinds = len({question.dimension for question in questions})
    return {
        "segments": 4.0 * turns,
        "cues": 3.0 * turns * kinds,
        "retrieval": 6.0 * asked,
        "codes": 3.0 * turns,
        "grounding": 12.0 * asked,
        "summaries": 1.0 * asked,
        "states": 1.0 * asked,
    }
