"""Questions with gold evidence, by dialogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue, Question
from remind.data.readers import format_of, read


@dataclass(frozen=True)
class DialogueQuestions:
    """The questions of one dialogue that have gold evidence.

    Attributes:
        gold: positions of each question's gold turns in `Dialogue.turns`, ascending, each once.
    """

    dataset: str
    dialogue: Dialogue
    questions: tuple[Question, ...]
    gold: tuple[Tensor, ...]

    @property
    def categories(self) -> list[str]:
        return [str(question.dimension or question.category or "none") for question in self.questions]

    @property
    def session_of(self) -> Tensor:
        """Number of the session of every turn, int64 [n]."""
        sizes = torch.tensor([len(session.turns) for session in self.dialogue.sessions])
        return torch.repeat_interleave(torch.arange(len(sizes)), sizes)


def gold_turns(dialogue: Dialogue, question: Question) -> Tensor:
    """Positions of the gold turns; for a visual question of the turns that hold its gold images. int64, ascending."""
    if question.visual:
        wanted = set(question.images)
        found = {p for p, turn in enumerate(dialogue.turns) if wanted & {image.index for image in turn.images}}
    else:
        found = {dialogue.positions[turn_id] for turn_id in question.evidence}
    return torch.tensor(sorted(found), dtype=torch.int64)


def load(paths: Sequence[str], limit: int | None = None) -> list[DialogueQuestions]:
    """Questions with evidence. A dataset is named after its format; files of one are joined.

    Args:
        limit: at most this many questions per dialogue, the first ones.

    Raises:
        DataError, FormatError: what cannot be read.
        ConfigError: a dataset without gold evidence, or dialogues of one id in two files.
    """
    asked: list[DialogueQuestions] = []
    for path in paths:
        corpus = read(path)
        name = format_of(path)
        found = []
        for dialogue, questions in corpus.by_dialogue():
            pairs = [(q, gold) for q in questions if len(gold := gold_turns(dialogue, q))][:limit]
            if pairs:
                found.append(
                    DialogueQuestions(name, dialogue, tuple(q for q, _ in pairs), tuple(gold for _, gold in pairs))
                )
        if not found:
            raise ConfigError(f"{path} has no question with gold evidence")
        asked += found
    keys = [(one.dataset, one.dialogue.id) for one in asked]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"dialogue {next(k for k in keys if keys.count(k) > 1)[1]!r} stands in two of the data files")
    return asked
