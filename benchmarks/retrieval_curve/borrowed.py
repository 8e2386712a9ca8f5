"""Vectors for histories that are too long to encode: copies of turns borrow those of what they were copied from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.retrieval_curve.history import History
from remind.data.dialogue import Dialogue
from remind.llm.offline import sentences
from remind.models.encoder import SentenceEncoder
from remind.perception.segment import turn_text
from remind.states.pyramid import Segment

#: Copied turns that are really encoded, to see how far a copy lies from its source.
SAMPLE = 128


class Borrowed(SentenceEncoder):
    """An encoder whose `encode_apart` encodes only what is the base's, and each source of a copy once.

    A copied turn has its source's vector, turned away from it at random as far as copies on average are. A cue of
    copies has the mean vector of the turns it quotes.

    Args:
        inner: what encodes; its weights are shared, and what it holds.
        history: the long dialogue.
        base: the dialogue in it whose turns and cues are encoded as they are.
        seed: of the turning away.
    """

    def __init__(self, inner: SentenceEncoder, history: History, base: Dialogue, seed: int) -> None:
        self.__dict__.update(inner.__dict__)
        self.name = f"{inner.name}-borrowed-{seed}"
        self._sources, self._seed = history.sources, seed
        #: Cosine of a copy with its source, mean of a sample.
        self.likeness = self._measure()
        self._own = set(_lines(base))
        self._quoted = _lines(history.dialogue)

    def encode_apart(self, texts: Sequence[str]) -> Tensor:
        distinct = list(dict.fromkeys(texts))
        rows = {text: row for row, text in enumerate(distinct)}
        vectors = torch.empty(len(distinct), self.dimension)
        copies = [text for text in distinct if text in self._sources]
        if copies:
            vectors[[rows[text] for text in copies]] = self._copies(copies)
        others = [text for text in distinct if text not in self._sources]
        known = {
            text: not self._own.issuperset(lines := text.split("\n")) and all(map(self._quoted.get, lines))
            for text in others
        }
        quoting = [text for text in others if known[text]]
        if quoting:
            vectors[[rows[text] for text in quoting]] = self._means(quoting)
        if real := [text for text in others if not known[text]]:
            vectors[[rows[text] for text in real]] = super().encode_apart(real)
        return vectors[[rows[text] for text in texts]]

    def _of_copies(self, lines: Sequence[str]) -> bool:
        return not self._own.issuperset(lines) and all(line in self._quoted for line in lines)

    def _copies(self, texts: Sequence[str]) -> Tensor:
        sources = super().encode([self._sources[text] for text in texts])
        away = torch.randn(sources.shape, generator=torch.Generator().manual_seed(self._seed))
        away = normalize(away - (away * sources).sum(-1, keepdim=True) * sources, dim=-1)
        return self.likeness * sources + (1 - self.likeness**2) ** 0.5 * away

    def _means(self, texts: Sequence[str]) -> Tensor:
        turns = list(dict.fromkeys(self._quoted[line] for text in texts for line in text.split("\n")))
        rows = {text: row for row, text in enumerate(turns)}
        vectors = self.encode_apart(turns)
        return torch.stack(
            [normalize(vectors[[rows[self._quoted[n]] for n in text.split("\n")]].sum(0), dim=0) for text in texts]
        )

    def _measure(self) -> float:
        pairs = list(self._sources.items())[:: max(1, len(self._sources) // SAMPLE)][:SAMPLE]
        if not pairs:
            return 1.0
        copies, sources = (super(Borrowed, self).encode_apart(side) for side in zip(*pairs, strict=True))
        return float((copies * sources).sum(-1).mean())


def _lines(dialogue: Dialogue) -> dict[str, str]:
    """`Speaker: sentence` as a cue quotes it, to the text of the first turn that holds it."""
    found: dict[str, str] = {}
    for place, turn in enumerate(dialogue.turns):
        for sentence in sentences(dialogue, Segment(place, place)):
            found.setdefault(f"{sentence.speaker}: {sentence.text}", turn_text(turn))
    return found
