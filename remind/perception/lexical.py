"""Words: how text is cut into them, which of them carry no topic, and BM25 over the turns of a dialogue."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
import yaml

WORD = re.compile(r"\w+")


@cache
def data(name: str) -> dict[str, Any]:
    """A word list or guide kept beside this module as `<name>.yaml`."""
    content: dict[str, Any] = yaml.safe_load((files(__package__) / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


@cache
def word_list(name: str) -> frozenset[str]:
    """A list of `words.yaml`."""
    return frozenset(str(data("words")[name]).split())


@cache
def fillers() -> frozenset[str]:
    """Function words and words of small talk."""
    return word_list("stopwords") | word_list("filler")


@cache
def _stemmer() -> Any:
    from nltk.stem import PorterStemmer

    return PorterStemmer()


@lru_cache(maxsize=200_000)
def stem(word: str) -> str:
    """Porter stem of a lower-case word."""
    return str(_stemmer().stem(word))


def words(text: str) -> list[str]:
    """Lower-case words in order."""
    return WORD.findall(text.lower())


def stems(text: str, skip: frozenset[str] | None = None) -> list[str]:
    """Porter stems of the words that are not skipped (None: function words), in order."""
    skip = word_list("stopwords") if skip is None else skip
    return [stem(word) for word in words(text) if word not in skip]


def rarity(documents: Sequence[Sequence[str]]) -> dict[str, float]:
    """ln((1 + N) / (1 + df)) of every term over N documents."""
    df = Counter(term for document in documents for term in set(document))
    return {term: math.log((1 + len(documents)) / (1 + count)) for term, count in df.items()}


class BM25:
    """BM25 (bm25s, Lucene's variant) over stemmed documents."""

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        import bm25s

        self._n = len(documents)
        self._model = bm25s.BM25() if any(documents) else None
        if self._model is not None:
            self._model.index([list(document) for document in documents], show_progress=False)

    def scores(self, query: Sequence[str]) -> np.ndarray:
        """Score of every document, float64 [n]; zeros if no query term occurs."""
        if self._model is None:
            return np.zeros(self._n)
        known = [term for term in query if term in self._model.vocab_dict]
        if not known:
            return np.zeros(self._n)
        return np.asarray(self._model.get_scores(known), dtype=np.float64)
