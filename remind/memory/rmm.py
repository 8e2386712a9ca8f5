"""RMM (Tan et al. 2025, "In Prospect and Retrospect"): topic summaries that are merged as sessions come (Section 5),
and a reranker that learns from what answers cite (Section 6)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from remind.core.files import read_bytes, sha256_file, sha256_json
from remind.data.dialogue import Session
from remind.memory.bank import Bank
from remind.memory.base import Draft, Query, Retrieval
from remind.memory.expansions import Replaying
from remind.memory.reranker import NAME, Episode, Reranker, RerankerConfig
from remind.memory.topics import Topic, by_segment, decided, extracted, joined, replayed
from remind.perception.perceive import standardise
from sae.ranges import PositiveInt, Share

_NOT_AS_PUBLISHED = {
    "llm": "the prompts are in our own words",
    "replay": "summaries are the facts shipped with LoCoMo, and are merged by a rule",
    "extractive": "summaries are taken from the dialogue's words and merged by a rule, not written by an LLM",
    "turns": "no prospective reflection: memories are single turns",
}


@dataclass(frozen=True)
class RmmSystem(Replaying):
    """Topics with the turns they are from, reranked by what answers have cited.

    A memory is found by its summary; its text is the summary and the turns' own words. What retrievals learn from is
    told by `Bank.feedback` alone. Before its first feedback a bank answers without noise, so that one that never gets
    any is plain retrieval.
    """

    rules = "the paper, Appendix D"
    name: str = "rmm"
    """As the user calls it."""
    source: Literal["llm", "replay", "extractive", "turns"] = "llm"
    """Where summaries come from. llm: the endpoint of extract and update. replay: `annotations`. extractive: key
    sentences by topical segment. turns: no summaries, single turns."""
    update_k: PositiveInt = 5
    """Memories of the same speaker that a new topic is compared with; the paper names no number."""
    merge_at: Share = 0.85
    """Cosine from which the rule merges a topic into the nearest memory of the same speaker."""
    reranker: RerankerConfig = field(default_factory=RerankerConfig)
    """The reranker, its candidates, and what is learned."""
    lexical: bool = False
    """Whether candidates are shown by z(learned score) + z(BM25) over the candidates. What is explored are samples of
    the learned part alone."""
    scope: Literal["dialogue", "shared", "frozen"] = "dialogue"
    """Whose feedback the weights learn from: each dialogue's alone; that of the run's dialogues one after the other,
    whose order then matters; or nobody's."""
    weights: str | None = None
    """Folder of a reranker that banks begin with; with scope shared the first of a run. None: zeros, which change no
    order."""

    def about(self) -> dict[str, Any]:
        # what a run has learned is no part of the settings
        path = Path(self.weights) / NAME if self.weights and self.scope != "shared" else None
        return {**super().about(), "weights": path and sha256_file(path)}

    @property
    def templates(self) -> tuple[str, ...]:
        return ("rmm_extract", "rmm_update") if self.source == "llm" else ()

    @property
    def not_as_published(self) -> tuple[str, ...]:
        return (_NOT_AS_PUBLISHED[self.source],)


class RmmBank(Bank, of=RmmSystem):
    """A bank whose journal holds merges, feedback, and where weights were stored.

    After every full batch the weights are stored in the transaction of the feedback that filled it. Episodes of a batch
    that is not full are made from the journal when it is. A bank that is made anew has learned nothing.
    """

    system: RmmSystem

    @property
    def learns(self) -> bool:
        return self.system.scope != "frozen"

    # prospective reflection

    def remember(self, session: Session) -> None:
        if self.system.source == "turns":
            self.put_turns(session.turns)
            return
        if self.system.source == "replay":
            topics = replayed(self.system.replayed[self.dialogue_id], session)
        elif self.system.source == "llm":
            topics = extracted(self, session)
        else:
            topics = by_segment(session, self.encoder)
        for topic in topics:
            self._update(topic)

    def _update(self, topic: Topic) -> None:
        """Add the topic, or merge it into the memories it is about."""
        near = self.store.nearest(self.encoder.encode_apart([topic.summary])[0])
        own = ((number, cosine) for number, cosine in near if self._topic(number).speaker == topic.speaker)
        found = list(islice(own, self.system.update_k))
        old = [self._topic(number).summary for number, _ in found]
        actions: list[tuple[int, str] | None] = []
        if found and self.system.source == "llm":
            actions = decided(self, topic, old)
        if not actions:
            same = found and found[0][1] >= self.system.merge_at
            actions = [(0, joined(topic.summary, old[0])) if same else None]
        for action in actions:
            if action is None:
                self._write(topic)
                continue
            number = found[action[0]][0]
            before = self._topic(number)
            self.store.log({"event": "merge", "memory": number, "before": asdict(before), "new": asdict(topic)})
            self._write(Topic(action[1], topic.speaker, (*before.turns, *topic.turns)), number)

    def _write(self, topic: Topic, number: int | None = None) -> None:
        """Store a topic, under a number that there is or a new one."""
        note = {"summary": topic.summary, "speaker": topic.speaker}
        text = f"{topic.summary}\n{self.store.words(topic.turns)}"
        self.put(Draft("topic", topic.turns, text, (topic.summary,), note=note), number)

    def _topic(self, number: int) -> Topic:
        note = self.store.note(number)
        return Topic(note["summary"], note["speaker"], self.store.memory(number).sources or ())

    # retrospective reflection

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        """The candidates by the reranker, then the other memories by the retriever."""
        settings = self.system.reranker
        count = self.store.count() if settings.candidates == "bank" else settings.top_k
        hybrid = settings.candidates == "hybrid"
        found = iter(self.store.rank(query.text, "hybrid" if hybrid else "dense"))
        if not (first := list(islice(found, count))):
            return
        numbers = [number for number, _ in first]
        # with weights of zero the order is the retriever's to the last bit
        base = (1.0 if hybrid else settings.scale) * np.array([score for _, score in first])
        told, reranker = self._told(), self.reranker
        name = sha256_json([query.id, query.text, told])[:16]
        scores = reranker.scores(self._vector(query.text), self.store.vectors(numbers).numpy(), base)
        noise = reranker.noise(name, len(first)) if told and self.learns and not settings.pretrain else None
        if noise is not None:
            by = scores + noise
        elif self.system.lexical:
            lexical = dict(self.store.rank(query.text, "bm25"))
            by = standardise(scores) + standardise(np.array([lexical[number] for number in numbers]))
        else:
            by = scores
        order = np.argsort(-by, kind="stable")
        trace |= {
            "updates": reranker.step,
            "name": name,
            "sampled": noise is not None,
            "candidates": [f"m{number}" for number in numbers],
            "base": base.tolist(),
            "scores": scores.tolist(),
            "order": order.tolist(),
        }
        yield from ((numbers[place], float(by[place])) for place in order)
        lowest = float(by[order[-1]])
        yield from ((number, min(lowest, score)) for number, score in found)

    def feedback(self, retrieval: Retrieval, cited: Collection[int]) -> None:
        """Log feedback, and learn from it together with what waits where that makes a batch."""
        if not self.learns:
            return
        query, trace, settings = retrieval.query, retrieval.trace, self.system.reranker
        entry: dict[str, Any] = {"event": "feedback", "query": query.id, "cited": sorted(cited)}
        # a choice of the best few is learned from; labels are of all
        few = retrieval.memories[: None if settings.pretrain else settings.top_m]
        shown = [memory.id for memory in few if memory.id in trace["candidates"]]
        if shown and (trace["sampled"] or settings.pretrain):
            order = [trace["candidates"].index(name) for name in shown]
            entry |= {"text": query.text, "order": order, **{key: trace[key] for key in ("name", "candidates", "base")}}
        journal = self.store.journal()
        last = max((place for place, one in enumerate(journal) if one["event"] == "weights"), default=-1)
        waiting = [one for one in [*journal[last + 1 :], entry] if "order" in one]
        full = len(waiting) >= settings.batch
        with self.store.transaction():
            self.store.log(entry)
            if full:
                reranker = self.reranker
                reranker.learn([self._episode(one, reranker) for one in waiting])
                self.store.learn(NAME, reranker.dump())
                self.store.log({"event": "weights"})

    def _told(self) -> int:
        """Grows with every feedback; 0: there was none."""
        return sum(entry["event"] in ("feedback", "weights") for entry in self.store.journal())

    def _episode(self, entry: Mapping[str, Any], reranker: Reranker) -> Episode:
        memories = self.store.vectors([int(name[1:]) for name in entry["candidates"]]).numpy()
        order = np.array(entry["order"], np.int64)
        noise = reranker.noise(entry["name"], len(memories))
        # Section 6.2
        rewards = np.array([1.0 if place in entry["cited"] else -1.0 for place in range(len(order))])
        base = np.array(entry["base"])
        return Episode(self._vector(entry["text"]), memories, order, rewards, base, 0.0 if noise is None else noise)

    def _vector(self, text: str) -> np.ndarray:
        return self.encoder.encode([text])[0].numpy()

    @property
    def reranker(self) -> Reranker:
        """With the bank's own weights, or those it begins with.

        Raises:
            DataError: weights that cannot be read, or do not go with the system's settings or the encoder.
        """
        system, data, path = self.system, self.store.learned(NAME), self.folder
        if data is None and system.weights is not None:
            path = Path(system.weights) / NAME
            data = read_bytes(path)
        made = (system.reranker, self.encoder.dimension)
        return Reranker(*made) if data is None else Reranker.load(data, *made, path)
