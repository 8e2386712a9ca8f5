"""What a bank of RMM learns from citations: against a reranker fed by hand, across kills, and what it never changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import dump, session
from words import WordEncoder, services

from remind.core.errors import DataError
from remind.memory.base import Query
from remind.memory.plain import PlainSystem
from remind.memory.reranker import NAME, Episode, Reranker, RerankerConfig
from remind.memory.rmm import RmmBank, RmmSystem, keep

TALK = [
    session(f"s{n}", None, *(f"{'Ann' if t % 2 else 'Bob'}: word{n} told{t} of thing{n * t % 7}" for t in range(4)))
    for n in range(8)
]
QUERIES = [Query(f"what of word{n} and thing{n % 5}?", f"q{n}") for n in range(9)]
SMALL = RerankerConfig(top_k=10, top_m=3, batch=2, lr=0.05)


def bank(folder: Path, reranker: RerankerConfig = SMALL, **options: Any) -> RmmBank:
    return RmmSystem(source="turns", reranker=reranker, **options).open(folder, "d", services())


def filled(folder: Path, *given: Any, **options: Any) -> RmmBank:
    memory = bank(folder, *given, **options)
    for each in TALK:
        memory.ingest(each)
    return memory


def ask(memory: RmmBank, query: Query) -> None:
    """Retrieve, and cite what holds an even turn."""
    found = memory.retrieve(query, k=5)
    cited = [place for place, one in enumerate(found.memories) if int((one.sources or ("",))[0][-1]) % 2]
    memory.feedback(found, cited)


def ranking(memory: Any, query: Query, k: int = 32) -> list[str]:
    return [one.id for one in memory.retrieve(query, k=k).memories]


@pytest.mark.parametrize("method", ["dense", "hybrid", "bank"])
def test_without_feedback_it_is_the_retriever(tmp_path: Path, method: Any) -> None:
    plain = PlainSystem("plain", method="dense" if method == "bank" else method)
    with (
        filled(tmp_path / "a", replace(SMALL, candidates=method)) as memory,
        plain.open(tmp_path / "b", "d", services()) as other,
    ):
        for each in TALK:
            other.ingest(each)
        for query in QUERIES:
            assert ranking(memory, query) == ranking(other, query)


@pytest.mark.parametrize("printed", [False, True])
def test_it_learns_as_a_reranker_that_is_fed_by_hand(tmp_path: Path, printed: bool) -> None:
    config = replace(SMALL, as_printed=printed)
    one, waiting = Reranker(config, 24), []
    encoder = WordEncoder()
    with filled(tmp_path / "a", config) as memory:
        for query in QUERIES:
            found = memory.retrieve(query, k=5)
            ask(memory, query)
            if not found.trace["sampled"]:
                assert query is QUERIES[0]
                continue
            texts = [memory.store.memory(int(name[1:])).text for name in found.trace["candidates"]]
            vectors, vector = encoder.encode(texts).numpy(), encoder.encode([query.text])[0].numpy()
            noise = one.noise(found.trace["name"], len(vectors))
            base = np.array(found.trace["base"])
            order = np.argsort(-(one.scores(vector, vectors, base) + noise), kind="stable")[:3]
            assert order.tolist() == found.trace["order"][:3]
            given = [1.0 if int((m.sources or ("",))[0][-1]) % 2 else -1.0 for m in found.memories[:3]]
            waiting.append(Episode(vector, vectors, order, np.array(given), base, noise))
            if len(waiting) == 2:
                one.learn(waiting)
                waiting = []
        learned = memory.reranker
        assert (learned.step, learned.ema) == (4, pytest.approx(one.ema))
        np.testing.assert_allclose(learned.w_q, one.w_q, atol=1e-6)
        np.testing.assert_allclose(learned.w_m, one.w_m, atol=1e-6)
        assert abs(learned.w_q).max() > 1e-3


def test_weights_learned_from_labels_serve_others(tmp_path: Path) -> None:
    """Contrastive learning raises what is cited, without samples; frozen, its weights do so in another bank."""
    common, cited = tmp_path / "common", dict[str, str]()
    with filled(tmp_path / "a", replace(SMALL, pretrain=20, batch=3)) as memory:
        before = {query.id: ranking(memory, query) for query in QUERIES}
        for query in QUERIES:
            found = memory.retrieve(query, k=10)
            assert not found.trace["sampled"]
            cited[query.id] = found.memories[7].id
            memory.feedback(found, {7})
        keep(memory.reranker.dump(), common)
        assert memory.reranker.step == 3
    frozen: dict[str, Any] = {"scope": "frozen", "weights": str(common)}
    with filled(tmp_path / "b", **frozen) as memory:
        after, content = {query.id: ranking(memory, query) for query in QUERIES}, dump(memory)
        ask(memory, QUERIES[0])
        assert dump(memory) == content, "nothing is learned"
    ranks = [np.mean([one[name].index(cited[name]) for name in cited]) for one in (before, after)]
    assert ranks[1] < ranks[0] - 2
    with filled(tmp_path / "e", lexical=True, **frozen) as memory:
        assert ranking(memory, QUERIES[1]) != after["q1"]
    with (
        filled(tmp_path / "other", replace(SMALL, scale=1.0), **frozen) as memory,
        pytest.raises(DataError, match="the weights are for dense candidates, scale 20 and dimension 24") as error,
    ):
        memory.retrieve(QUERIES[0], k=5)
    assert error.value.path == common / NAME
