"""Words: how text is cut into them, which of them carry no topic, and BM25 over the turns of a dialogue."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

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
    """BM25 (bm25s, Lucene's variant) over stemmed documents: for every term, in order, its documents and their weights.

    Args:
        documents: stems of each.
    """

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        self._n = len(documents)
        self._terms = np.zeros(0, dtype=np.uint8)
        self._ends = self._bounds = np.zeros(1, dtype=np.int64)
        self._documents, self._weights = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        if any(documents):
            self._index(documents)

    def _index(self, documents: Sequence[Sequence[str]]) -> None:
        import bm25s

        model = bm25s.BM25()
        model.index([list(document) for document in documents], show_progress=False)
        scores = model.scores
        first, last = scores["indptr"][:-1], scores["indptr"][1:]
        # numbers of terms differ from process to process; sorted, the files do not
        vocabulary = {term.encode(): number for term, number in model.vocab_dict.items() if number < len(first)}
        terms = sorted(term for term, number in vocabulary.items() if last[number] > first[number])
        numbers = np.array([vocabulary[term] for term in terms], dtype=np.int64)
        counts = (last - first)[numbers]
        self._terms = np.frombuffer(b"".join(terms), dtype=np.uint8)
        self._ends = np.cumsum([0, *map(len, terms)], dtype=np.int64)
        self._bounds = np.cumsum([0, *counts.tolist()], dtype=np.int64)
        # where each posting of the sorted terms stands in the model's arrays
        places = np.repeat(first[numbers] - self._bounds[:-1], counts) + np.arange(self._bounds[-1])
        self._documents, self._weights = scores["indices"][places].astype(np.int32), scores["data"][places]

    @classmethod
    def of_tensors(cls, n: int, tensors: Mapping[str, Tensor]) -> BM25:
        """Of n documents, from what `tensors` gave; nothing is copied."""
        made = cls([])
        made._n = n
        made._terms, made._ends = tensors["terms"].numpy(), tensors["ends"].numpy()
        made._bounds = tensors["bounds"].numpy()
        made._documents, made._weights = tensors["documents"].numpy(), tensors["weights"].numpy()
        return made

    def tensors(self) -> dict[str, Tensor]:
        """Terms (UTF-8 in one row, and where each ends), where each term's documents begin, documents and weights."""
        rows: dict[str, np.ndarray] = {"terms": self._terms, "ends": self._ends, "bounds": self._bounds}
        rows |= {"documents": self._documents, "weights": self._weights}
        return {name: torch.from_numpy(row.copy()) for name, row in rows.items()}

    def scores(self, query: Sequence[str]) -> np.ndarray:
        """Score of every document, float64 [n]; zeros if no query term occurs."""
        scores = np.zeros(self._n, dtype=np.float32)
        for term in query:
            number = self._number(term.encode())
            if number is not None:
                part = slice(self._bounds[number], self._bounds[number + 1])
                # a document stands once under a term
                scores[self._documents[part]] += self._weights[part]
        return scores.astype(np.float64)

    def _number(self, term: bytes) -> int | None:
        low = bisect_left(range(len(self._ends) - 1), term, key=self._term)
        return low if low < len(self._ends) - 1 and self._term(low) == term else None

    def _term(self, number: int) -> bytes:
        return self._terms[self._ends[number] : self._ends[number + 1]].tobytes()
