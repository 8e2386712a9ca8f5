"""What retrieval knows of each turn, question by question: cosines, BM25 and a few plain facts, for `fusion`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue
from remind.grounding.dates import asked_dates, closeness, turn_dates
from remind.perception.segment import turn_text
from remind.text.strategy import target_speakers
from remind.text.words import BM25, stems, word_list, words

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder


@cache
def empty_words() -> frozenset[str]:
    """Function words and words that only make a question."""
    return word_list("stopwords") | word_list("question")


def name_words(dialogue: Dialogue) -> frozenset[str]:
    """Words of the speakers' names. They stand at the head of every line, so they tell no turn from another."""
    parts = {part for speaker in dialogue.speakers for part in words(speaker)}
    return frozenset(parts | {part + "s" for part in parts})


def without_names(text: str, names: frozenset[str]) -> str:
    """The text less the words that are a speaker's name; the text itself where nothing else is left."""
    kept = [word for word in text.split() if re.sub(r"(?:['’]s)?\W*$", "", word.lower()) not in names]
    return " ".join(kept) or text


class TurnIndex:
    """A dialogue as retrieval reads it, made once for all its questions.

    Args:
        dialogue: n turns.
        encoder: gives the vectors of turns and questions.
    """

    def __init__(self, dialogue: Dialogue, encoder: SentenceEncoder) -> None:
        self.dialogue, self.encoder = dialogue, encoder
        self.names = name_words(dialogue)
        self.skipped = empty_words() | self.names
        texts = [turn_text(turn) for turn in dialogue.turns]
        sessions = [number for number, session in enumerate(dialogue.sessions) for _ in session.turns]
        self.vectors = encoder.encode(texts)
        self.stems = BM25([stems(text, self.skipped) for text in texts])
        self.asks = torch.tensor([float("?" in turn.text) for turn in dialogue.turns])
        follows = torch.tensor([n > 0 and sessions[n] == sessions[n - 1] for n in range(len(texts))])
        self.answers = torch.where(follows, self.asks.roll(1), 0.0)
        self.dates = turn_dates(dialogue)

    def signals(self, questions: Sequence[str]) -> dict[str, Tensor]:
        """Scores of every turn for each question, float32 [n, len(questions)].

        dense: cosine of the turn (its line and captions) and the question less speakers' names. bm25: over stems,
        without names, function and question words.
        speaker: 1 where the turn's speaker is named. date: see `closeness`. asks: 1 for a turn with a question mark,
        answers: for the one after it.
        """
        if not questions:
            raise ConfigError("no questions to score turns for")
        asked = self.encoder.encode([without_names(question, self.names) for question in questions]).T
        n, ones = len(self.dialogue.turns), torch.ones(1, len(questions))
        return {
            "dense": self.vectors @ asked,
            "bm25": _columns([self.stems.scores(stems(question, self.skipped)) for question in questions]),
            "speaker": self._named(questions),
            "date": torch.stack([closeness(self.dates, asked_dates(question)) for question in questions], 1),
            "asks": self.asks.reshape(n, 1) * ones,
            "answers": self.answers.reshape(n, 1) * ones,
        }

    def _named(self, questions: Sequence[str]) -> Tensor:
        columns = []
        for question in questions:
            named = set(target_speakers(self.dialogue, question))
            columns.append(torch.tensor([float(turn.speaker in named) for turn in self.dialogue.turns]))
        return torch.stack(columns, 1)


class TurnSignals:
    """The indexes of the dialogues asked about last.

    Args:
        encoder: gives the vectors.
        cached_dialogues: indexes in memory; the least recently used one leaves first.
    """

    def __init__(self, encoder: SentenceEncoder, cached_dialogues: int = 4) -> None:
        self.encoder, self.cached_dialogues = encoder, max(1, cached_dialogues)
        self._held: list[TurnIndex] = []

    def index(self, dialogue: Dialogue) -> TurnIndex:
        """The dialogue's index, made when first asked for."""
        # by equality of the few that are held: hashing a dialogue takes longer than scoring it
        place = next((n for n, held in enumerate(self._held) if held.dialogue is dialogue), None)
        if place is None:
            place = next((n for n, held in enumerate(self._held) if held.dialogue == dialogue), None)
        found = TurnIndex(dialogue, self.encoder) if place is None else self._held.pop(place)
        self._held.append(found)
        del self._held[: -self.cached_dialogues]
        return found


def _columns(scores: Sequence[object]) -> Tensor:
    return torch.stack([torch.as_tensor(column, dtype=torch.float32) for column in scores], 1)
