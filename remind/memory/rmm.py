"""RMM (Tan et al. 2025, "In Prospect and Retrospect"): topic summaries that are merged as sessions come (Section 5),
and a reranker that learns from what answers cite (Section 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load, save

from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_file, sha256_json
from remind.core.processes import locked
from remind.data.dialogue import Session
from remind.memory.base import Bank, Query, Retrieval, Services
from remind.memory.expansions import Replaying
from remind.memory.reranker import NAME, Choice, Episode, Reranker, RerankerConfig, rewards
from remind.memory.store import Draft
from remind.memory.topics import Merge, Topic, by_segment, decided, extracted, joined, replayed
from remind.perception.perceive import standardise
from remind.states import prompts
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

    name: str = "rmm"
    """As the user calls it."""
    source: Literal["llm", "replay", "extractive", "turns"] = "llm"
    """Where summaries come from. llm: the endpoint of extract and update, and where there is none or it fails the
    rules, which marks the session. replay: `annotations`. extractive: key sentences by topical segment. turns: no
    summaries, single turns."""
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
    """Whose feedback the weights learn from: each dialogue's alone; that of all which are opened one after the other,
    whose order then matters; or nobody's."""
    weights: str | None = None
    """Folder of a reranker. dialogue and frozen: what every bank begins with; None: zeros, which change no order.
    shared: where the common weights are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope == "shared" and self.weights is None:
            raise ConfigError("scope shared needs weights, a folder to keep the common weights in")

    def about(self) -> dict[str, Any]:
        options = super().about()
        if self.scope == "shared":
            # what was learned is no part of the settings
            options["weights"] = None
        elif self.weights is not None:
            path = Path(self.weights) / NAME
            if not path.is_file():
                raise DataError("there is no reranker", path)
            options["weights"] = sha256_file(path)
        names = ("rmm_extract", "rmm_update") if self.source == "llm" else ()
        hashes = {name: prompts.fingerprint(name) for name in names}
        return {"system": "rmm", **options, "prompts": hashes, "degraded": [_NOT_AS_PUBLISHED[self.source]]}


class RmmBank(Bank, of=RmmSystem):
    """A bank whose journal holds merges, feedback, and where weights were stored.

    Forgetting and repairing keep the weights, as long as a turn is left.
    """

    system: RmmSystem

    def __init__(self, folder: str | Path, dialogue_id: str, system: RmmSystem, services: Services) -> None:
        super().__init__(folder, dialogue_id, system, services)
        self.learns = system.scope != "frozen"
        try:
            if system.scope == "shared":
                assert system.weights is not None
                common = Path(system.weights)
                common.mkdir(parents=True, exist_ok=True)
                self._held.enter_context(locked(common / ".lock", wait=False))
            self.weights = Weights(self)
            if system.scope == "shared":
                self.weights.publish()
        except BaseException:
            self.close()
            raise

    # prospective reflection

    def remember(self, session: Session) -> Iterable[str]:
        if self.store.learned(NAME) is not None and not self.store.journal():
            # the bank is made anew, of sessions alone
            self.weights.keep()
        if self.system.source == "turns":
            self.put_turns(session.turns)
            return ()
        lost: list[str] = []
        if self.system.source == "replay":
            topics = replayed(self.system.replayed[self.dialogue_id], session)
        elif self.system.source == "llm" and self.chat("extract") is not None:
            topics = extracted(self, session, lost)
        else:
            topics = by_segment(session, self.encoder)
            if self.system.source == "llm":
                lost.append("no endpoint for extract: key sentences stand for topics")
        for topic in topics:
            self._update(topic, lost)
        return lost

    def _update(self, topic: Topic, lost: list[str]) -> None:
        """Add the topic, or merge it into the memories it is about."""
        near = self.store.nearest(self.encoder.encode_apart([topic.summary])[0])
        own = ((number, cosine) for number, cosine in near if self._topic(number).speaker == topic.speaker)
        found = list(islice(own, self.system.update_k))
        old = [self._topic(number).summary for number, _ in found]
        actions: list[Merge | None] = []
        if found and self.system.source == "llm" and self.chat("update") is not None:
            actions = decided(self, topic, old, lost)
        if not actions:
            same = found and found[0][1] >= self.system.merge_at
            actions = [Merge(0, joined(topic.summary, old[0])) if same else None]
        for action in actions:
            if action is None:
                self._write(topic)
                continue
            number = found[action.place][0]
            before = self._topic(number)
            self.store.log({"event": "merge", "memory": number, "before": asdict(before), "new": asdict(topic)})
            self._write(Topic(action.text, topic.speaker, (*before.turns, *topic.turns)), number)

    def _write(self, topic: Topic, number: int | None = None) -> None:
        """Store a topic, under a number that there is or a new one."""
        note = {"summary": topic.summary, "speaker": topic.speaker}
        draft = Draft("topic", topic.turns, keys=(topic.summary,), note=note)
        vectors = self.encoder.encode_apart([topic.summary])
        if number is None:
            number = self.store.add(draft, 0, vectors)
        else:
            self.store.rewrite(number, draft, 0, vectors)
        # the store knows the turns' own words
        text = f"{topic.summary}\n{self.store.memory(number).text}"
        self.store.rewrite(number, replace(draft, text=text), self.encoder.count_tokens(text))

    def _topic(self, number: int) -> Topic:
        note = self.store.note(number)
        return Topic(note["summary"], note["speaker"], self.store.memory(number).sources or ())

    # retrospective reflection

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        """The candidates by the reranker, then the other memories by the retriever."""
        settings = self.system.reranker
        count = self.store.count() if settings.candidates == "bank" else settings.top_k
        hybrid = settings.candidates == "hybrid"
        found = iter(self.ranker.rank(query.text, "hybrid" if hybrid else "dense"))
        if not (first := list(islice(found, count))):
            return
        numbers = [number for number, _ in first]
        # with weights of zero the order is the retriever's to the last bit
        base = (1.0 if hybrid else settings.scale) * np.array([score for _, score in first])
        name = sha256_json([query.id, query.text, self.weights.told])[:16]
        reranker = self.weights.load()
        scores = reranker.scores(self._vector(query.text), self._vectors(numbers), base)
        noise = reranker.noise(name, len(first)) if self.weights.told and self.system.scope != "frozen" else None
        if noise is not None:
            by = scores + noise
        elif self.system.lexical:
            by = standardise(scores) + standardise(self._lexical(query.text, numbers))
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

    def learn(self, query: Query, retrieval: Retrieval, cited: frozenset[int]) -> None:
        if not self.learns:
            return
        trace, top = retrieval.trace, self.system.reranker.top_m
        entry: dict[str, Any] = {"event": "feedback", "query": query.id, "cited": sorted(cited)}
        shown = [memory.id for memory in retrieval.memories[:top] if memory.id in trace["candidates"]]
        sampled = trace.get("sampled", False) and bool(shown)
        if sampled:
            order = [trace["candidates"].index(name) for name in shown]
            entry |= {"text": query.text, "order": order, **{key: trace[key] for key in ("name", "candidates", "base")}}
        self.weights.learn(entry, self._episode)

    def _episode(self, entry: Mapping[str, Any]) -> Episode:
        memories = self._vectors([int(name[1:]) for name in entry["candidates"]])
        order = np.array(entry["order"], np.int64)
        choice = Choice(order, self.weights.load().noise(entry["name"], len(memories)))
        given, base = rewards(order, set(entry["cited"])), np.array(entry["base"])
        return Episode(self._vector(entry["text"]), memories, choice, given, base)

    def _vector(self, text: str) -> np.ndarray:
        return self.encoder.encode([text])[0].numpy()

    def _vectors(self, numbers: Sequence[int]) -> np.ndarray:
        """Of the memories' only keys [n, d]."""
        return self.store.vectors(self.store.rows(numbers)).numpy()

    def _lexical(self, text: str, numbers: Sequence[int]) -> np.ndarray:
        scores = dict(zip(self.ranker.owners.tolist(), self.ranker.scores(text, "bm25").tolist(), strict=True))
        return np.array([scores[number] for number in numbers])

    def _rebuild(self, *without: Any) -> None:
        # with a journal that names them
        self.weights.load()
        super()._rebuild(*without)
        self.weights.recall()


class Weights:
    """The reranker of a bank.

    After every full batch its weights are stored in the transaction of the feedback that filled it. Episodes of a batch
    that is not full are made from the journal when it is.

    Args:
        bank: whose journal it is.

    Attributes:
        told: grows with every feedback; the same when the bank is opened again. 0: there was none.
    """

    def __init__(self, bank: RmmBank) -> None:
        self.bank = bank
        self.recall()

    def recall(self) -> None:
        """Read what the bank has of feedback and weights."""
        journal = self.bank.store.journal()
        self._reranker: Reranker | None = None
        self.told = sum(entry["event"] in ("feedback", "weights") for entry in journal)
        places = [place for place, entry in enumerate(journal) if entry["event"] == "weights"]
        self._waiting = [entry for entry in journal[places[-1] + 1 if places else 0 :] if "order" in entry]

    def load(self) -> Reranker:
        """The reranker with the weights that are stored, else those that the bank begins with.

        Raises:
            DataError: weights that cannot be read, or do not go with the system's settings or the encoder.
        """
        if self._reranker is None:
            self._reranker = self._checked(self._found())
        return self._reranker

    def learn(self, entry: Mapping[str, Any], episode: Callable[[Mapping[str, Any]], Episode]) -> None:
        """Log feedback, and learn from it together with what waits where that makes a batch.

        Args:
            entry: for the journal; with "order" where there is something to learn from.
            episode: makes an episode of such an entry.
        """
        system, store = self.bank.system, self.bank.store
        waiting = [*self._waiting, entry] if "order" in entry else self._waiting
        full = len(waiting) >= system.reranker.batch
        try:
            with store.transaction():
                store.log(entry)
                if full:
                    self.load().learn([episode(one) for one in waiting])
                    self.keep()
        except BaseException:
            # what was learned in memory is not what is stored
            self._reranker = None
            raise
        self.told += 1 + full
        self._waiting = [] if full else waiting
        if full and system.scope == "shared":
            self.publish()

    def publish(self) -> None:
        """Bring the folder of the common weights up to date."""
        path = Path(str(self.bank.system.weights))
        if not (path / NAME).is_file() or Reranker.load(path).step < self.load().step:
            self.load().save(path)

    def keep(self) -> None:
        """Store the weights in the transaction under way; before the first update there is nothing to store."""
        one, store = self.load(), self.bank.store
        if one.step:
            ema = np.array(np.nan if one.ema is None else one.ema)
            store.learn(NAME, save({"w_q": one.w_q, "w_m": one.w_m, "ema": ema, "step": np.array(one.step)}))
            store.log({"event": "weights"})

    def _found(self) -> Reranker | None:
        """The bank's own weights, or those it is given: at the start, and where others went on with the common ones."""
        own, path = self._own(), self.bank.system.weights
        if path is None or (own is not None and self.bank.system.scope != "shared"):
            return own
        given = Reranker.load(path) if (Path(path) / NAME).is_file() else None
        return max((one for one in (own, given) if one is not None), key=lambda one: one.step, default=None)

    def _own(self) -> Reranker | None:
        if (stored := self.bank.store.learned(NAME)) is None:
            return None
        held = load(stored)
        own = Reranker(self.bank.system.reranker, self.bank.encoder.dimension)
        own.w_q, own.w_m, own.step = held["w_q"], held["w_m"], int(held["step"])
        own.ema = None if np.isnan(held["ema"]) else float(held["ema"])
        return own

    def _checked(self, found: Reranker | None) -> Reranker:
        wanted, dimension = self.bank.system.reranker, self.bank.encoder.dimension
        if found is None:
            return Reranker(wanted, dimension)
        have = (found.config.candidates, found.config.scale, found.dimension)
        if have != (wanted.candidates, wanted.scale, dimension):
            needed = f"{wanted.candidates} candidates, scale {wanted.scale:g} and dimension {dimension}"
            message = "the weights are for {} candidates, scale {:g} and dimension {}, not for {}".format(*have, needed)
            raise DataError(message, self.bank.system.weights or self.bank.folder)
        found.config = wanted
        return found
