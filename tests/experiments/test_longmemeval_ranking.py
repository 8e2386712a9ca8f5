"""LongMemEval's retrieval figures against the benchmark's definition and by hand; our own rankings."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_corpus import short_haystack

from experiments.official.retrieval import (
    KS,
    Haystack,
    ScoreRetrievalConfig,
    average,
    haystack_of,
    rankings,
    score_ranking,
    score_retrieval,
    table,
)
from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.data.readers import read
from remind.perception import PerceptionConfig
from remind.perception.perceive import BM25
from remind.states.pyramid import Segment
from remind.text.words import stems


def dcg(relevances: Sequence[int], k: int) -> float:
    values = np.asarray(relevances, dtype=float)[:k]
    return float(values[0] + np.sum(values[1:] / np.log2(np.arange(2, values.size + 1)))) if values.size else 0.0


def by_definition(order: list[int], gold: set[str], corpus: list[str], k: int) -> tuple[float, float, float]:
    """The benchmark's three figures over corpus positions and document names."""
    top = {corpus[i] for i in order[:k]}
    relevances = [int(name in gold) for name in corpus]
    ideal = dcg(sorted(relevances, reverse=True), k)
    found = dcg([relevances[i] for i in order[:k]], k) / ideal if ideal else 0.0
    return float(any(g in top for g in gold)), float(all(g in top for g in gold)), found


def by_definition_of_sessions(
    order: list[int], corpus: list[str], gold: set[str], k: int
) -> tuple[float, float, float]:
    """Turn names `<session>_<n>` cut to their session; k grows until k sessions are seen."""
    documents = [name.rsplit("_", 1)[0] for name in corpus]
    wanted = {name.rsplit("_", 1)[0] for name in gold}
    size = k
    while size <= len(documents) and len({documents[i] for i in order[:size]}) < k:
        size += 1
    return by_definition(order, wanted, documents, size)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 10, 30, 50])
def test_both_levels_against_the_benchmark(k: int) -> None:
    generator = random.Random(k)
    for _ in range(60):
        sessions = {f"s{n}": generator.randint(1, 6) for n in range(generator.randint(1, 12))}
        turns = [(name, f"{name}:{n}") for name, count in sessions.items() for n in range(count)]
        gold = {turn for name, turn in turns if name in ("s0", "s3") and generator.random() < 0.5}
        if not gold:
            continue
        # as the benchmark names them: in a gold session what holds no evidence becomes a document of its own
        special = {name for name, turn in turns if turn in gold}
        names = [
            f"{'answer' if turn in gold else 'noans'}-{name}_{n}" if name in special else f"{name}_{n}"
            for n, (name, turn) in enumerate(turns)
        ]
        gold_names = {name for name, (_, turn) in zip(names, turns, strict=True) if turn in gold}
        haystack = Haystack("q", tuple(t for _, t in turns), {t: s for s, t in turns}, frozenset(gold))
        order = generator.sample(range(len(turns)), len(turns))
        found = score_ranking(haystack, [turns[i][1] for i in order], [k])
        for level, wanted in (
            ("turn", by_definition(order, gold_names, names, k)),
            ("session", by_definition_of_sessions(order, names, gold_names, k)),
        ):
            figures = tuple(found[level][f"{name}@{k}"] for name in ("recall_any", "recall_all", "ndcg_any"))
            assert figures == pytest.approx(wanted, abs=1e-12), (level, order)


@pytest.fixture
def three_sessions() -> Haystack:
    """Sessions A (turns a1, a2), B (b1, b2), C (c1); evidence a2 and c1."""
    session = {"a1": "A", "a2": "A", "b1": "B", "b2": "B", "c1": "C"}
    return Haystack("q", tuple(session), session, frozenset({"a2", "c1"}))


def test_a_ranking_that_leaves_turns_out_pays_for_them(three_sessions: Haystack) -> None:
    figures = score_ranking(three_sessions, ["a2"], [5])
    for level in ("turn", "session"):
        assert (figures[level]["recall_all@5"], figures[level]["ndcg_any@5"]) == (0.0, 0.5)
    assert set(score_ranking(three_sessions, [], [1])["session"].values()) == {0.0}


def test_the_corpus_is_the_users_turns() -> None:
    turns = tuple(Turn(f"S1:T{n}", "user" if n % 2 else "assistant", "x") for n in range(1, 7))
    dialogue = Dialogue("d", (Session("S1", None, turns[:2]), Session("S2", None, turns[2:])))
    haystack = haystack_of(dialogue, Question("q", "d", "?", evidence=("S1:T3", "S1:T4")))
    assert haystack.turns == ("S1:T1", "S1:T3", "S1:T5")
    assert haystack.session == {"S1:T1": "S1", "S1:T3": "S2", "S1:T5": "S2"}
    assert haystack.gold == {"S1:T3"}


def test_abstention_and_questions_without_user_evidence_take_no_part(three_sessions: Haystack) -> None:
    abstention = replace(three_sessions, question_id="q_abs")
    nothing = replace(three_sessions, gold=frozenset())
    report = average([three_sessions, abstention, nothing], [["a2"], ["b1"], ["b1"]], [1])
    assert report["counts"] == {"questions": 1, "abstention": 1, "without_gold": 1}
    assert (report["turn"]["recall_any@1"]["value"], report["turn"]["recall_any@1"]["n"]) == (1.0, 1)


def test_our_rankings_of_a_real_haystack(remind_data: Path, tmp_path: Path) -> None:
    path, instance = short_haystack(remind_data, tmp_path, others=5)
    config = ScoreRetrievalConfig(str(path), ["bm25"], cache=str(tmp_path), out=str(tmp_path / "out.json"), bootstrap=5)
    result = score_retrieval(config)
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(json.dumps(result))
    assert result["methods"]["bm25"]["counts"]["questions"] == 1
    figures = result["methods"]["bm25"]["turn"]
    values = [figures[f"recall_any@{k}"]["value"] for k in KS]
    assert values == sorted(values)
    assert values[-1] == 1.0
    assert "bm25 session recall_all" in table(result)
    haystack = haystack_of(read(path).dialogues[0], read(path).questions[0])
    said = [turn for session in instance["haystack_sessions"] for turn in session if turn["role"] == "user"]
    assert len(haystack.turns) == len(said)
    assert sum(bool(turn.get("has_answer")) for turn in said) == len(haystack.gold)


TEXTS = ("we talked of cats", "a violin", "a violin and a violin bow", "the weather")


@pytest.fixture
def index() -> Any:
    """Four turns in two segments; the question's vector is closest to turn 3 and to the cue of the second segment."""
    turns = tuple(Turn(f"t{n}", "user", text) for n, text in enumerate(TEXTS))
    unit = torch.nn.functional.normalize
    cues = SimpleNamespace(vectors=unit(torch.tensor([[0.0, 1.0], [1.0, 0.2]])))
    vectors = unit(torch.tensor([[0.0, 1.0], [0.5, 1.0], [0.1, 1.0], [1.0, 0.0]]))
    return SimpleNamespace(
        dialogue=Dialogue("d", (Session("s", None, turns),)),
        bm25=BM25([stems(text) for text in TEXTS]),
        vectors=vectors,
        costs=SimpleNamespace(session_of=(0,) * len(vectors)),
        segments=(Segment(0, 1), Segment(2, 3)),
        cues=lambda dimension: cues,
    )


def test_each_method_ranks_every_turn(index: Any) -> None:
    config = PerceptionConfig()
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


def test_what_cannot_be_run_is_told() -> None:
    assert ScoreRetrievalConfig("x").ks == list(KS)
    for change, message in (
        ({"methods": ["odd"]}, "'odd'"),
        ({"methods": []}, "no method"),
        ({"ks": [0]}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            ScoreRetrievalConfig("x", **change)  # type: ignore[arg-type]
