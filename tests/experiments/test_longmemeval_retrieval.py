"""Our rankings of a haystack's turns: by segment cues, words and vectors, made up so that each can be told by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.official.ranking import KS, Haystack, average
from experiments.official.retrieval import ScoreRetrievalConfig, rankings, table
from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue, Session, Turn
from remind.perception import PerceptionConfig, RetrieveConfig
from remind.states.pyramid import Segment
from remind.text.words import BM25, stems

TEXTS = ("we talked of cats", "a violin", "a violin and a violin bow", "the weather")


@pytest.fixture
def index() -> Any:
    """Four turns in two segments; the question's vector is closest to turn 3 and to the cue of the second segment."""
    turns = tuple(Turn(f"t{n}", "user", text) for n, text in enumerate(TEXTS))
    cues = SimpleNamespace(vectors=torch.tensor([[0.0, 1.0], [1.0, 0.2]]))
    return SimpleNamespace(
        dialogue=Dialogue("d", (Session("s", None, turns),)),
        bm25=BM25([stems(text) for text in TEXTS]),
        vectors=torch.tensor([[0.0, 1.0], [0.5, 1.0], [0.1, 1.0], [1.0, 0.0]]),
        segments=(Segment(0, 1), Segment(2, 3)),
        cues=lambda dimension: cues,
    )


def test_each_method_ranks_every_turn(index: Any) -> None:
    config = PerceptionConfig(retrieve=RetrieveConfig(sigma=0))
    found = rankings(index, "who has a violin?", torch.tensor([1.0, 0.0]), config)
    # the second segment's turns first, in time order; equals stay in time order
    assert found["cue"] == ["t2", "t3", "t0", "t1"]
    assert found["dense"] == ["t3", "t1", "t2", "t0"]
    lexical = index.bm25.scores(stems("who has a violin?"))
    assert found["bm25"] == sorted(("t0", "t1", "t2", "t3"), key=lambda turn: -lexical[int(turn[1])])
    assert set(found["bm25"][:2]) == {"t1", "t2"}
    assert sorted(found["hybrid"]) == ["t0", "t1", "t2", "t3"]
    assert found["hybrid"][-1] == "t0"
    assert list(rankings(index, "violin", torch.tensor([1.0, 0.0]), config, ["dense"])) == ["dense"]


def test_the_table_marks_what_is_trivial() -> None:
    haystack = Haystack("q", ("a", "b", "c"), {"a": "A", "b": "B", "c": "C"}, frozenset({"b"}))
    row = average([haystack], [["a", "b"]], [1, 2, 3], resamples=5)
    shown = table({"config": {"ks": [1, 2, 3]}, "methods": {"cue": row}})
    line = next(line for line in shown.splitlines() if "turn" in line and "recall_any" in line)
    assert line.split() == ["cue", "turn", "recall_any", "0.0", "100.0", "100.0*"]
    assert "1 questions; left out: 0 abstention, 0 without" in shown


def test_what_cannot_be_run_is_told() -> None:
    assert ScoreRetrievalConfig("x").ks == list(KS)
    for change, message in (
        ({"methods": ["odd"]}, "'odd'"),
        ({"methods": []}, "no method"),
        ({"ks": [0]}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            ScoreRetrievalConfig("x", **change)  # type: ignore[arg-type]
