"""RMM (Tan et al. 2025, "In Prospect and Retrospect"): what a session tells of its speakers, topic by topic, merged
into what is known (prospective reflection, Section 5); a reranker that learns from what answers cite (retrospective
reflection, Section 6); and how a run learns: in copies of banks, from who says what an answer cites.

Summaries and decisions come from a chat model, from the facts that LoCoMo ships, or by rule from the dialogue's words.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from remind.core.files import atomic_path, read_bytes, sha256_file, sha256_json
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.data.readers.locomo import Annotations
from remind.llm.request import from_template
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, mapping
from remind.memory.base import TEXT, Draft, Memory, Query, Retrieval
from remind.memory.base import words as prose
from remind.memory.longmemeval import Replaying
from remind.memory.plain import cut
from remind.memory.reranker import NAME, Episode, Reranker, RerankerConfig
from remind.models.encoder import SentenceEncoder
from remind.perception.config import SegmentConfig
from remind.perception.perceive import segment, standardise
from remind.states.pyramid import one_line, turn_lines, turn_text, unnumbered
from remind.text.words import fillers, key_sentences, rarity, sentences, stem, stems, telling, words
from sae.ranges import PositiveInt, Share

#: Tokens of a reply; the paper names none.
ROOM = {"extract": 2000, "update": 1000}
_REFERENCE = {"type": "array", "items": {"anyOf": [{"type": "integer"}, TEXT]}}
SCHEMA = object_schema(extracted_memories={"type": "array", "items": object_schema(summary=TEXT, reference=_REFERENCE)})
#: The text ends at the last bracket of the line, since it may hold commas and brackets of its own.
_MERGE = re.compile(r"\bMerge\s*\(\s*(\d+)\s*,\s*(.*\S)\s*\)", re.IGNORECASE)
_ADD = re.compile(r"\bAdd\s*\(\s*\)", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?…])\s+")
_NOT_AS_PUBLISHED = {
    "llm": "the prompts are in our own words",
    "replay": "summaries are the facts shipped with LoCoMo, and are merged by a rule",
    "extractive": "summaries are taken from the dialogue's words and merged by a rule, not written by an LLM",
    "turns": "no prospective reflection: memories are single turns",
}
#: Citers that look at gold evidence. oracle: every memory with some among its sources. noisy: these with probability
#: `USEFUL`, others with `USELESS`. Besides them lexical: every memory with at least `SHARED` of the question's words.
GOLD = ("oracle", "noisy")
#: Recalls of useful and of useless memories (RMM, Table 3): the latter are cited where they are not left out.
USEFUL, USELESS = 0.911, 0.154
SHARED = 0.5


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
        few = None if settings.pretrain else settings.top_m
        shown = [memory.id for memory in retrieval.memories[:few] if memory.id in trace["candidates"]]
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


# topics


@dataclass(frozen=True, slots=True)
class Topic:
    """One matter in the life of a speaker.

    Attributes:
        summary: on one line; what it is found by.
        speaker: whom it is about.
        turns: ids of the turns it was taken from.
    """

    summary: str
    speaker: str
    turns: tuple[str, ...]


def extracted(bank: Bank, session: Session) -> list[Topic]:
    """The topics of each speaker by the chat model (Appendix D.1.1).

    A turn of the paper is an exchange: what is said until the opener of the session speaks again.
    """
    parts = list(cut(session, "round"))
    lines = [line for number, part in enumerate(parts) for line in (f"Turn {number}:", *map(turn_lines, part))]
    topics: list[Topic] = []
    for speaker in dict.fromkeys(turn.speaker for turn in session.turns):
        data = {"speaker": one_line(speaker), "conversation": "\n".join(lines)}
        ask = from_template("extract", "rmm_extract", bank.dialogue_id, SCHEMA, ROOM["extract"], data)
        (reply,) = bank.send(ask, salvaged=True)
        if reply.failure == "invalid" and "NO_TRAIT" not in prose(reply):
            bank.lost.append(f"extract: invalid: {reply.message}")
        for one in mapping(reply).get("extracted_memories", ()):
            numbers = {int(text) for item in one["reference"] for text in re.findall(r"-?\d+", str(item))}
            # references to what is not there are passed over
            turns = tuple(turn.id for place, part in enumerate(parts) if place in numbers for turn in part)
            if turns and (summary := one_line(one["summary"])):
                topics.append(Topic(summary, speaker, turns))
    return topics


def replayed(annotations: Annotations, session: Session) -> list[Topic]:
    """LoCoMo's facts of the session, each about the speaker of its first turn."""
    speakers = {turn.id: turn.speaker for turn in session.turns}
    facts = [(one_line(text), ids) for text, ids in annotations.get(session.id, ())]
    return [Topic(text, speakers[ids[0]], ids) for text, ids in facts if text and ids and speakers.keys() >= {*ids}]


def by_segment(session: Session, encoder: SentenceEncoder) -> list[Topic]:
    """The key sentences of each speaker in each topical segment."""
    texts = [unnumbered(turn_lines(turn)) for turn in session.turns]
    # numbers of images count over the whole dialogue
    bare = replace(session, turns=tuple(replace(turn, images=()) for turn in session.turns))
    parts = segment(
        Dialogue(session.id, (bare,)), encoder.encode_apart(texts), SegmentConfig(), encoder.count_many(texts)
    )
    topics = []
    for part in parts:
        turns = session.turns[part.start : part.end + 1]
        for speaker in dict.fromkeys(turn.speaker for turn in turns):
            own = tuple(turn for turn in turns if turn.speaker == speaker)
            topics.append(Topic(gist(session, own), speaker, tuple(turn.id for turn in own)))
    return topics


def decided(bank: Bank, topic: Topic, entries: Sequence[str]) -> list[tuple[int, str] | None]:
    """What becomes of the topic by the chat model (Appendix D.1.2): an entry's place and the summary that it has from
    now on; None: it is added. Empty: it does not tell.

    Args:
        entries: summaries of memories of the same speaker.
    """
    data = {
        "history": json.dumps({"history_summaries": list(entries)}, ensure_ascii=False, indent=0),
        "new": json.dumps({"new_summary": topic.summary}, ensure_ascii=False),
    }
    reply = bank.ask("update", "rmm_update", data, ROOM["update"])
    actions = [] if reply.failure is not None else read_actions(prose(reply), len(entries))
    if reply.failure is None and not actions:
        bank.lost.append("rmm_update: the reply is neither Add() nor Merge(i, text) of an entry")
    return actions


def read_actions(text: str, count: int) -> list[tuple[int, str] | None]:
    """The lines Add() and Merge(i, text) of a reply; of several Add() one. Empty: there are none, or one names an entry
    that there is not."""
    actions: list[tuple[int, str] | None] = []
    for line in text.splitlines():
        if match := _MERGE.search(line):
            place, merged = int(match[1]), one_line(match[2]).strip('"')
            if place >= count:
                return []
            actions.append((place, merged))
        elif _ADD.search(line) and None not in actions:
            actions.append(None)
    return actions


def joined(new: str, old: str) -> str:
    """The sentences of a new summary, then those of an older one that are not among them."""
    return " ".join(dict.fromkeys(_SENTENCE.split(new) + _SENTENCE.split(old)))


def gist(session: Session, turns: Sequence[Turn]) -> str:
    """Key sentences of turns of one speaker, those with words that are rare in the session; the speaker is named once,
    and all on one line."""
    weights, parts = rarity([stems(turn_text(turn)) for turn in session.turns]), sentences(turns)
    name = f"{one_line(turns[0].speaker)}: "
    lines = key_sentences(parts, [telling(part.text, weights) for part in parts]).splitlines()
    said = " ".join(line.removeprefix(name) for line in lines) or one_line(turn_text(turns[0])).removeprefix(name)
    return name + said


# citations


def cited(citer: str, question: Question, memories: Sequence[Memory]) -> frozenset[int] | None:
    """Places of the memories that an answer would cite; the same for the same question and memories.

    Returns:
        None: it cannot tell, since there is no gold evidence, and nothing may be learned.
    """
    if citer in GOLD and not question.evidence:
        return None
    if citer == "lexical":
        wanted = {stem(word) for word in words(question.text) if word not in fillers()}
        least = max(1.0, SHARED * len(wanted))
        has = [len(wanted & {stem(word) for word in words(memory.text)}) >= least for memory in memories]
    else:
        gold = {*question.evidence}
        has = [not gold.isdisjoint(memory.sources or ()) for memory in memories]
    if citer == "noisy":
        seed = int(sha256_json([question.id, [memory.id for memory in memories]])[:16], 16)
        has = (np.random.default_rng(seed).random(len(has)) < np.where(has, USEFUL, USELESS)).tolist()
    return frozenset(place for place, one in enumerate(has) if one)


def warning(citer: str) -> str | None:
    """What every report has to say where systems learned; None: they did not, or from shared words."""
    if citer == "reader":
        return (
            "Systems that learn were told after each question which of their memories the reader cites. Their rows "
            "depend on the order of the questions."
        )
    if citer not in GOLD:
        return None
    return (
        f"Systems that learn were told after each question which of their memories the {citer} citer cites, which is "
        "taken from gold evidence. Their rows show what the update rule does, and are not comparable with the others."
    )


@contextmanager
def learning(bank: Bank, folder: Path, weights: str | None, after: Path) -> Iterator[Bank]:
    """A copy of a bank that learns, which is closed; gone afterwards. So a run that is killed or made again does not
    begin with what was learned in it.

    Args:
        folder: of the temporary copy.
        weights: folder of those that the copy begins with.
        after: folder that those after the block are kept in if it succeeds, where dialogues share them.
    """
    bank.close()
    system = replace(bank.system, weights=weights)  # type: ignore[call-arg]
    with TemporaryDirectory(prefix=".asked.", suffix=".tmp", dir=folder) as copies:
        copied = shutil.copytree(bank.folder, Path(copies) / "bank")
        with system.open(copied, bank.dialogue_id, bank.services) as opened:
            yield opened
            if isinstance(opened, RmmBank) and opened.system.scope == "shared":
                keep(opened.reranker.dump(), after)


def keep(weights: bytes, folder: Path) -> None:
    """Write weights into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / NAME) as temporary:
        temporary.write_bytes(weights)
