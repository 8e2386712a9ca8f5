"""Excerpts that a feature fires on, others on which it does not, and the words that set excerpts apart."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from remind.states.pyramid import one_line
from remind.text.words import words

if TYPE_CHECKING:
    from sae.probe import Encoded, Example
    from sae.probe.pictures import TopPictures

#: Excerpts of the background, at most.
_BACKGROUND = 1000
#: Words of a feature without a name, and the weight of the prior in words.
_WORDS, _PRIOR = 5, 500.0


@dataclass(frozen=True)
class Excerpt:
    """A few tokens in a row: their texts, and on which of them a feature fires."""

    pieces: tuple[str, ...]
    fires: tuple[bool, ...]

    @property
    def text(self) -> str:
        return one_line("".join(self.pieces))

    def marked(self, marks: Sequence[bool]) -> str:
        """The text on one line, with runs of marked tokens between « and »."""
        parts = []
        for mark, group in groupby(zip(self.pieces, marks, strict=True), key=lambda pair: pair[1]):
            run = "".join(piece for piece, _ in group).replace("«", '"').replace("»", '"')
            inner = run.strip()
            parts.append(run.replace(inner, f"«{inner}»", 1) if mark and inner else run)
        return one_line("".join(parts))


def excerpt(example: Example) -> Excerpt:
    """The context of a top example."""
    return Excerpt(_cut(example.text, example.offsets), tuple(value > 0 for value in example.values))


def _cut(text: str, offsets: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Text of each token, with white space between it and the token before it; tokens may share characters."""
    pieces, cursor = [], offsets[0][0] if offsets else 0
    for start, end in offsets:
        gap = text[cursor:start]
        pieces.append((gap if gap.isspace() else "") + text[max(start, cursor) : end])
        cursor = max(cursor, end)
    return tuple(pieces)


@dataclass(frozen=True)
class Background:
    """Excerpts at large with the features that fire on them, to draw those from on which a feature does not fire."""

    found: Sequence[tuple[Excerpt, frozenset[int]]]

    @classmethod
    def of(cls, texts: Iterable[Encoded], layer: int, size: int, seed: int = 0) -> Background:
        """Excerpts of encoded texts.

        Args:
            texts: at most 1000 windows of them are kept, drawn at random.
            layer: whose features are meant.
            size: tokens of an excerpt, at most.
        """
        # a text that is shorter than an excerpt is one as it is
        windows = [(one, start) for one in texts for start in range(0, max(len(one) - size, 0) + 1, size)]
        random.Random(seed).shuffle(windows)
        found = []
        for one, start in windows[:_BACKGROUND]:
            part, codes = slice(start, start + size), one.layer(layer)
            active = frozenset(codes.indices[part][codes.active()[part]].tolist())
            pieces = _cut(one.text, one.offsets[part].tolist())
            found.append((Excerpt(pieces, (False,) * len(pieces)), active))
        return cls(found)

    def without(self, feature: int, most: int, draws: random.Random) -> list[Excerpt]:
        """At most so many excerpts on which the feature does not fire, at random."""
        silent = [one for one, active in self.found if feature not in active]
        return draws.sample(silent, min(most, len(silent)))


@dataclass(frozen=True)
class Captions:
    """Captions of images, to name features by that fire on images alone.

    Attributes:
        text: of an image, by path; images without one are not there.
        top: the images that each feature fires on most.
        shown: of some images, by path, the features that fire on them.
    """

    text: Mapping[str, str]
    top: TopPictures
    shown: Mapping[str, frozenset[int]]

    def excerpts(self, feature: int, most: int | None = None) -> list[Excerpt]:
        """Captions of the images that the feature fires on most, nothing marked in them."""
        found = [self.text[one.source] for one in self.top.examples(feature, most) if one.source in self.text]
        return [_plain(text) for text in dict.fromkeys(found)]

    @cached_property
    def background(self) -> Background:
        return Background([(_plain(self.text[path]), on) for path, on in self.shown.items() if path in self.text])


def _plain(text: str) -> Excerpt:
    return Excerpt((text,), (False,))


def distinctive_words(excerpts: Sequence[str], counts: Mapping[str, int], most: int = _WORDS) -> list[str]:
    """The words that set excerpts apart from all that was read, by falling z of their log-odds ratio.

    Monroe, Colaresi and Quinn (2008), with their informative Dirichlet prior, α_w = 500 n_w / Σ n. Words that occur
    once only, and parts of words at the ends of excerpts, are left out.

    Args:
        counts: of each word of all texts.
    """
    own = Counter(word for text in excerpts for word in words(text))
    n_own, n_all = sum(own.values()), sum(counts.values())
    scores = {}
    for word, y in own.items():
        if y < 2 or not counts.get(word):
            continue
        prior, other = _PRIOR * counts[word] / n_all, counts[word]
        odds = math.log((y + prior) / max(n_own + _PRIOR - y - prior, 1e-9))
        odds -= math.log((other + prior) / max(n_all + _PRIOR - other - prior, 1e-9))
        scores[word] = odds / math.sqrt(1 / (y + prior) + 1 / (other + prior))
    best = sorted((word for word in scores if scores[word] > 0), key=lambda word: (-scores[word], word))
    return best[:most]
