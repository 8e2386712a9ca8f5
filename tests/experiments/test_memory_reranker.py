"""The experiment on the reranker: a run on the bundled sample, and its parts against counts by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.memory.candidates import Ranked, candidates, centred, encode, fixed
from experiments.memory.config import MemoryExperimentConfig
from experiments.memory.learning import held_out, learned, leave_one_out, online, shuffled, training
from experiments.memory.report import Rows, table
from experiments.memory.reranker import reranker
from remind.core.errors import ConfigError
from remind.data.sample import sample_path
from remind.memory.reranker import RerankerConfig
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception, PerceptionConfig
from remind.states.pyramid import turn_text

SAMPLE = str(sample_path() / "dev.jsonl")


def asked(dialogues: int = 3, each: int = 12, seed: int = 0, size: int = 16) -> list[Ranked]:
    """Questions whose one evidence turn lies where a rotation of the question points, far from the question."""
    draws = np.random.default_rng(seed)
    turned = np.linalg.qr(draws.standard_normal((size, size)))[0]
    found = []
    for number in range(dialogues * each):
        rows = draws.standard_normal((9, size))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        query, memories = rows[0], rows[1:]
        memories[3] = turned @ query
        gold, values = np.arange(8) == 3, memories @ query
        name = f"d{number // each}"
        found.append(
            Ranked(f"{name} {number}", name, query, memories, gold, 2, np.arange(8) + 1, values, values, values, None)
        )
    return found


SETTINGS = RerankerConfig(top_k=8, top_m=2, scale=5, lr=0.1)


def test_recall_counts_what_was_never_a_candidate() -> None:
    one = asked()[0]
    scores = np.array([0.0, 0, 3, 2, 0, 0, 0, 0])
    # one of two evidence turns is a candidate and second; turns of 3 and 4 tokens are retrieved
    assert one.shares(scores, 2) == (0.5, 7, 0.5)
    assert one.shares(scores, 1) == (0.0, 3, 0.5)
    # 100 and 60 do not go together into 150 tokens; what comes after and fits is taken
    longer = replace(one, tokens=np.array([10, 10, 100, 60, 10, 10, 10, 10]))
    assert longer.shares(scores, 2) == (0.5, 160, 0.0)
    assert replace(longer, gold=np.arange(8) == 4).shares(scores, 2) == (0.0, 160, 0.5)


def test_what_is_learned_on_some_dialogues_ranks_another() -> None:
    questions = asked()
    folds = leave_one_out(questions)
    assert [len(asks) for _, asks in folds] == [12, 12, 12]
    for known, asks in folds:
        assert not {one.name for one in known} & {one.name for one in asks}
        assert len({one.dialogue for one in asks}) == 1
    found = held_out(folds, SETTINGS, (0, 1), [0, 100], {"learned": learned})["learned"]
    dense = [one.shares(one.dense, 2) for one in questions]
    np.testing.assert_allclose(found[0].T, dense)
    # the most there is: half of the evidence stands among the candidates
    assert found[1, 0].mean() > found[0, 0].mean() + 0.15
    nothing = held_out(folds, SETTINGS, (0,), [100], {"learned": learned}, shuffled)["learned"]
    assert nothing[0, 0].mean() < found[0, 0].mean() + 0.1


def test_a_question_is_ranked_online_before_it_is_learned_from() -> None:
    """Whatever four questions cite, a batch of four changes none of their ranks."""
    questions = asked(dialogues=1)
    settings = replace(SETTINGS, lr=2.0, baseline=0.0)

    def cites(evidence: bool) -> Any:
        return lambda gold, _: gold if evidence else ~gold

    first, second = (
        online(questions[:4], replace(settings, batch=4), (0,), True, cites(kind)) for kind in (True, False)
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first.T, [one.shares(one.dense, 2) for one in questions[:4]])
    # with batches of one the second question is ranked by what the first one's citations taught
    first, second = (online(questions, replace(settings, batch=1), (0,), True, cites(kind)) for kind in (True, False))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first[:, 0], second[:, 0])


def test_every_question_is_learned_from_once_a_pass() -> None:
    questions, seen = asked(dialogues=1), []

    def cite(gold: np.ndarray, _: np.random.Generator) -> np.ndarray:
        seen.append(1)
        return gold

    steps = list(training(questions, replace(SETTINGS, batch=5), 12, cite))
    assert len(steps) == 13
    assert steps[-1].step == 12
    assert len(seen) == 60


def test_rows_say_whether_what_is_demanded_is_reached() -> None:
    questions, rows = asked(each=4), Rows(200)
    low, high = np.zeros((3, 12)), np.ones((3, 12))
    rows.add("d", questions, ("a", "b"), (low, high), 0.5, 0.2)
    rows.add("d", questions, ("a", "b"), (low, high), 1.5)
    rows.add("d", questions, ("a", "b"), (low, high), 0.5, 1.0)
    rows.add("d", questions, ("a", "b"), (low, high), null=True)
    rows.add("d", questions, ("a", "a"), (low, low), null=True)
    rows.add("d", questions, ("a", "b"), (low, high))
    assert [row["reached"] for row in rows.rows] == [True, False, False, False, True, None]
    assert table(rows.rows, 5).count("not reached") == 3


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def result(cache: Path) -> dict[str, Any]:
    return reranker(
        MemoryExperimentConfig(
            "reranker", SAMPLE, str(cache / "r.json"), updates=4, curve=25, seeds=(0,), resamples=50, limit=4,
            cache=str(cache),
        )
    )  # fmt: skip


def test_a_run_leaves_rows_curve_and_plot(result: dict[str, Any], cache: Path) -> None:
    assert json.loads((cache / "r.json").read_text())["rows"] == result["rows"]
    assert (cache / "r.png").stat().st_size > 10_000
    assert [row["updates"] for row in result["curve"]] == [0, 4, 25]
    assert all(0 <= row["second"] <= 1 and len(row["tokens"]) == 2 for row in result["rows"])
    dense = {row["first"] for row in result["rows"] if row["minus"] == "dense"}
    assert dense == {result["curve"][0]["recall"]}
    assert set(result["milliseconds"]) == {"score 20", "sample 5 of 20", "update of 4"}


def test_candidates_are_the_nearest_turns(result: dict[str, Any], cache: Path) -> None:
    """Against cosines one by one in float64, and z-scores by numpy."""
    from experiments.evidence.data import load
    from remind.llm.auxiliary import OfflineLLM

    sentences = SentenceEncoder()
    dialogue = load([SAMPLE], 2)[0][0]
    encoded = encode(dialogue, Perception(PerceptionConfig(), sentences, OfflineLLM(sentences), cache / "index"))
    turns = sentences.encode([turn_text(turn) for turn in dialogue.dialogue.turns]).double().numpy()
    for number, question in enumerate(candidates(encoded, "dense", 7)):
        query = sentences.encode([dialogue.questions[number].text]).double().numpy()[0]
        cosines = np.array([float(np.dot(turn, query)) for turn in turns])
        best = sorted(range(len(turns)), key=lambda place: -cosines[place])[:7]
        np.testing.assert_allclose(question.dense, cosines[best], atol=1e-5)
        assert question.gold.tolist() == [place in dialogue.gold[number].tolist() for place in best]
        assert question.wanted == len(dialogue.gold[number])
        lexical = question.lexical
        spread = lexical.std() or 1.0
        expected = (question.dense - question.dense.mean()) / question.dense.std() + (lexical - lexical.mean()) / spread
        np.testing.assert_allclose(fixed(question), expected, atol=1e-9)
        np.testing.assert_allclose(centred(np.zeros(384), np.zeros(384), question), question.dense, atol=1e-6)
    for number, question in enumerate(candidates(encoded, "hybrid", 7)):
        lexical, cosines = encoded.lexical[:, number].numpy(), turns @ encoded.questions[number].double().numpy()
        both = sum((values - values.mean()) / values.std() for values in (lexical, cosines))
        np.testing.assert_allclose(question.base, np.sort(both)[::-1][:7], atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"curve": 3, "updates": 5}, "curve must be at least updates"),
        ({"seeds": ()}, "seeds: at least one"),
        ({"cited_useful": 1.2}, "cited_useful must be"),
        ({"item": "facts"}, "item must be one of reranker"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryExperimentConfig(**{"item": "reranker", "data": SAMPLE, "out": "r.json"} | settings)
