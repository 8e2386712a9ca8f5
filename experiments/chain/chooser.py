"""A model chooses turns of x0 itself, by number, and summarises what it chose: teachers that need no gold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from remind.core.files import read_json, sha256_json, write_json
from remind.core.progress import track
from remind.data.dialogue import Turn
from remind.models.backbone import load_backbone
from remind.models.generate import generate
from remind.reflect import key_lines
from remind.states.pyramid import AttentionalState, line_of

if TYPE_CHECKING:
    from remind.models.backbone import Backbone

#: Turns that a model may choose.
MOST = 4
_CHOOSE = (
    "Lines of conversations, numbered:\n\n{lines}\n\nQuestion: {question}\n\nWhich of these lines help to answer the "
    "question? Reply with their numbers, at most {most}, the most helpful one first, and nothing else."
)
_TELL = (
    "Lines of conversations:\n\n{lines}\n\nQuestion: {question}\n\nSay in one or two short sentences what these lines "
    "tell about the question. Keep names, dates and words as they are."
)


class Chooser:
    """What a model chose, and said of it; kept in a file, so that each question is asked once.

    Args:
        model: as `ChainConfig.chooser` names it; loaded when there is something to ask, and asked greedily.
        path: JSON of replies by the hash of their prompt; no words of a prompt are kept.
    """

    def __init__(self, model: str, path: Path, dtype: str, device: str) -> None:
        self.model, self.path, self.dtype, self.device = model, path, dtype, device
        self.replies: dict[str, str] = read_json(path) if path.exists() else {}

    @cached_property
    def _backbone(self) -> Backbone:
        return load_backbone(self.model, dtype=self.dtype, device=self.device)

    def _ask(self, prompts: Sequence[str], room: int) -> list[str]:
        asked = {sha256_json(prompt): prompt for prompt in prompts}
        missing = [key for key in asked if key not in self.replies]
        for key in track(missing, "choose", len(missing)):
            [answer] = generate(self._backbone, [asked[key]], room)
            self.replies[key] = answer.text if answer else ""
            write_json(self.path, self.replies)
        return [self.replies[sha256_json(prompt)] for prompt in prompts]

    def turns(self, states: Sequence[AttentionalState]) -> list[list[Turn]]:
        """The turns of each state that the model named first, in order of time."""
        prompts = []
        for state in states:
            lines = "\n".join(f"{number}. {line_of(turn)}" for number, turn in enumerate(state.factual.turns, 1))
            prompts.append(_CHOOSE.format(lines=lines, question=state.factual.question.text, most=MOST))
        chosen = []
        for state, reply in zip(states, self._ask(prompts, 24), strict=True):
            turns = state.factual.turns
            named = dict.fromkeys(int(number) for number in re.findall(r"\d+", reply) if len(number) < 4)
            places = sorted([number - 1 for number in named if 0 < number <= len(turns)][:MOST])
            chosen.append([turns[place] for place in places])
        return chosen

    def told(self, states: Sequence[AttentionalState]) -> list[str]:
        """The turns chosen of each state, quoted, and what the model says of them; "" where it chose none."""
        chosen = self.turns(states)
        having = [(state, turns) for state, turns in zip(states, chosen, strict=True) if turns]
        prompts = [
            _TELL.format(lines="\n".join(map(line_of, turns)), question=state.factual.question.text)
            for state, turns in having
        ]
        said = iter(self._ask(prompts, 64))
        return [f"{key_lines(turns)}\n{next(said).strip()}".strip() if turns else "" for turns in chosen]
