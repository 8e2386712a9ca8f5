"""Words: how text is split into them, their stems, and which of them carry no topic."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

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
