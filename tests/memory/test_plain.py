"""The plain baselines: what a memory is, and the three rankings against ones worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scripted import session
from words import WordEncoder, services

from remind.data.dialogue import Session, Turn
from remind.memory.bank import Bank, Method
from remind.memory.base import Query
from remind.memory.plain import PlainSystem, Unit, cut
from remind.text.words import stems

TOLD = [
    session("1", None, "Ann: I saw a fox in the garden", "Bob: A red fox?", "Ann: Yes, red as fire"),
    session("2", None, "Ann: The garden needs rain", "Bob: It rained Monday", "Ann: Foxes hate rain", "Bob: Do they?"),
    session("3", None, "Ann: My bicycle is broken", "Bob: Again?"),
]


def bank_of(folder: Path, *, unit: Unit = "turn", method: Method = "dense", keys: str = "turns") -> Bank:
    bank = PlainSystem("plain", unit, method, keys).open(folder, "d", services())  # type: ignore[arg-type]
    for each in TOLD:
        bank.ingest(each)
    return bank


def spoken(*speakers: str) -> Session:
    return Session("S", None, tuple(Turn(str(n), who, "x") for n, who in enumerate(speakers)))


@pytest.mark.parametrize(
    ("speakers", "unit", "expected"),
    [
        ("abab", "turn", ["0", "1", "2", "3"]),
        ("aabbab", "round", ["0123", "45"]),
        ("abab", "session", ["0123"]),
    ],
)
def test_stretches(speakers: str, unit: Unit, expected: list[str]) -> None:
    parts = list(cut(spoken(*speakers), unit))
    assert ["".join(turn.id for turn in part) for part in parts] == expected


def lines() -> list[str]:
    return [f"{turn.speaker}: {turn.text}" for told in TOLD for turn in told.turns]


def cosines(question: str, texts: list[str]) -> np.ndarray:
    rows = WordEncoder().encode([question, *texts]).double().numpy()
    return rows[1:] @ rows[0] / np.linalg.norm(rows[1:], axis=1) / np.linalg.norm(rows[0])


def lexical(question: str, texts: list[str], k1: float = 1.5, b: float = 0.75) -> np.ndarray:
    """Lucene's BM25, written out; k1 and b are those of bm25s."""
    documents = [stems(text) for text in texts]
    mean = np.mean([len(document) for document in documents])
    scores = np.zeros(len(texts))
    for term in set(stems(question)):
        holding = sum(term in document for document in documents)
        idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
        for place, document in enumerate(documents):
            count = Counter(document)[term]
            scores[place] += idf * count / (count + k1 * (1 - b + b * len(document) / mean))
    return scores


def ranked(scores: np.ndarray) -> list[str]:
    return [f"m{place + 1}" for place in sorted(range(len(scores)), key=lambda place: (-scores[place], place))]


def z(values: np.ndarray) -> np.ndarray:
    return np.asarray((values - values.mean()) / values.std())


@pytest.mark.parametrize("question", ["Where was the red fox?", "rain in the garden", "bicycle", "nothing like that"])
@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_rankings(tmp_path: Path, method: Method, question: str) -> None:
    dense, words = cosines(question, lines()), lexical(question, lines())
    expected = {"dense": dense, "bm25": words, "hybrid": dense * 0}[method]
    if method == "hybrid":
        expected = z(dense) + (z(words) if words.any() else 0)
    with bank_of(tmp_path / "bank", method=method) as bank:
        found = bank.retrieve(Query(question), k=99).memories
    assert [memory.id for memory in found] == ranked(expected)
    np.testing.assert_allclose([memory.score for memory in found], sorted(expected, reverse=True), atol=1e-5)
