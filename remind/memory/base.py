"""The interface of memory systems: a bank stores the sessions of a dialogue and retrieves memories for a question.

A system is one file with a `Bank` that defines what is stored of a session and how it is ranked for a question.
Repeated ingesting, transactions, budgets, feedback tokens and forgetting are the same for all and implemented here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from remind.core.errors import ConfigError, DataError, ModelError, shown
from remind.core.processes import locked
from remind.data.dialogue import Format, Question, Session, Turn
from remind.memory.store import Draft, Ranker, Store
from remind.states.pyramid import turn_text

if TYPE_CHECKING:
    from remind.llm.request import ChatModel, Reply, Request, Stage
    from remind.memory.systems import System
    from remind.models.encoder import SentenceEncoder

#: Candidates in a row that may not fit a budget before the search for smaller ones ends.
_MISSES = 64
#: Retrievals that wait for feedback at once.
_WAITING = 1000
#: Requests of a bank before its share of lost ones can end a dialogue that is being taken in.
_EARLY_CHECK = 100
#: Stages at which questions are asked, not sessions taken in.
_ASKING = ("read", "note", "time_range", "profile", "strategy", "answer", "judge")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Memory:
    """A retrieved memory, as shown to a reader.

    Attributes:
        id: unique in its bank.
        text: what the reader sees of it.
        kind: "turn", "round", "session", "fact", "topic", ...
        sources: ids of the turns it was made from, in the order of the dialogue; None if the system does not know.
        time: of the first of them, as in `Turn`.
        score: it was ranked by; higher is better, the scale depends on the system.
        tokens: of the text, in the vocabulary of the run's encoder.
        position: of its first source among the turns of the dialogue; None if the system does not know.
    """

    id: str
    text: str
    kind: str
    sources: tuple[str, ...] | None
    time: str | None
    score: float
    tokens: int
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """A question as a system sees it, without answers, evidence and split."""

    text: str
    id: str = ""
    time: str | None = None
    format: Format = "direct"
    options: tuple[str, ...] = ()

    @staticmethod
    def of(question: Question) -> Query:
        """The question without its gold."""
        # LongMemEval's ids tell which questions have no answer
        name = question.id.removesuffix("_abs")
        return Query(question.text, name, question.time, question.format, question.options)


@dataclass(frozen=True)
class Retrieval:
    """What a bank returns for a query.

    Attributes:
        memories: best first.
        token: names this retrieval in `Bank.feedback`.
        trace: details for inspection, as JSON; depends on the system.
    """

    memories: tuple[Memory, ...]
    token: str = field(compare=False)
    trace: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Of all texts together."""
        return sum(memory.tokens for memory in self.memories)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of ingesting a session.

    Attributes:
        session_id: its id.
        known: whether the bank already had it; then nothing was done.
        added: by how many the number of memories grew; negative if memories were merged or deleted.
        degraded: reasons why a fallback was used, one line each; see `Bank.repair`.
    """

    session_id: str
    known: bool = False
    added: int = 0
    degraded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Services:
    """What all systems of a run share.

    Attributes:
        encoder: turns texts into vectors and counts tokens.
        chat: the chat model for (system, dialogue, stage); None for stages without an endpoint.
        url: of the loopback endpoint for (system, dialogue, stage), for packages with a client of their own.
        max_failed: share of a bank's requests that may be lost before the dialogue is given up.
    """

    encoder: SentenceEncoder
    chat: Callable[[str, str, Stage], ChatModel | None] | None = None
    url: Callable[[str, str, Stage], str] | None = None
    max_failed: float = 0.1


class MemorySystem(Protocol):
    """A memory system with its settings."""

    @property
    def name(self) -> str:
        """As the user calls it."""
        ...

    def about(self) -> dict[str, Any]:
        """Package, version, prompt hashes, options, and under `degraded` differences from the publication. Systems with
        equal values can open each other's banks."""
        ...

    def open(self, folder: str | Path, dialogue_id: str, services: Services) -> Bank:
        """The bank in the folder, made if absent.

        Raises:
            DataError: the folder holds the bank of another dialogue, system or encoder, a damaged one, or other files.
            ConfigError: another process has it open.
        """
        ...


class Bank(ABC):
    """The memory of one dialogue, in a folder that only this process writes to.

    Args:
        folder: made if absent.
        dialogue_id: whose memory it is.
        system: the system it belongs to.
        services: encoder and chat models.

    Raises:
        DataError, ConfigError: as `MemorySystem.open`.
    """

    #: Whether feedback changes anything.
    learns = False

    def __init_subclass__(cls, of: type[System] | None = None) -> None:
        """Make this class that of the banks of a system."""
        if of is not None:
            of.banks = cls

    def __init__(self, folder: str | Path, dialogue_id: str, system: MemorySystem, services: Services) -> None:
        self.folder, self.dialogue_id, self.system, self.services = Path(folder), dialogue_id, system, services
        self.encoder = services.encoder
        self._held = ExitStack()
        lock = self.folder.with_name(f".{self.folder.name}.lock")
        self._held.enter_context(locked(lock, wait=False, place=self.folder))
        try:
            self.store = Store(
                self.folder, {"dialogue": dialogue_id, "system": system.about(), "encoder": self.encoder.name}
            )
        except BaseException:
            self._held.close()
            raise
        #: Ranks the memories of the store.
        self.ranker = Ranker(self.store, self.encoder)
        self._open: dict[str, tuple[Query, Retrieval]] = {}
        self._given = 0
        #: Requests made to take sessions in, since the bank was opened or made anew.
        self.asked = 0

    def ingest(self, session: Session) -> Receipt:
        """Store a session, completely or not at all.

        Sessions must be given in the order of time. A session that is already stored is not ingested again.

        Raises:
            DataError: a session of no turns, a turn without text or picture, an id of another session or turn, the same
                id with other content, or a time before the last session's.
            ModelError: as `finish`, where many requests were made.
        """
        if (held := self.store.session(session.id)) is not None:
            if held.session != session:
                raise DataError("the bank holds a session of this id with other content", self.folder, session.id)
            return Receipt(session.id, known=True, degraded=held.degraded)
        self._check(session)
        before = self.store.count()
        with self.store.transaction():
            degraded = self._store(session)
        self._open.clear()
        self._check_lost(done=False)
        return Receipt(session.id, added=self.store.count() - before, degraded=degraded)

    def finish(self) -> None:
        """Compute what depends on the whole dialogue. Call it after the last session, and again after more.

        A line of the log tells how many requests were lost.

        Raises:
            ModelError: more than the share `Services.max_failed` of the requests were lost: they failed, or the reply
                cannot be read. `repair` makes them again.
        """
        self.complete()
        self._check_lost(done=True)

    def retrieve(self, query: Query, k: int | None = None, budget: int | None = None) -> Retrieval:
        """The best memories for a query. Does not change the bank.

        Args:
            k: maximum number of memories; None: no limit.
            budget: maximum number of tokens in all. A memory that does not fit is skipped, and lower ones may follow.

        Raises:
            ConfigError: k or budget below 1, or neither given; a query without text.
        """
        if k is None and budget is None:
            raise ConfigError("k, budget or both must be given")
        for name, value in (("k", k), ("budget", budget)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if not query.text.strip():
            raise ConfigError(f"the query {shown(query.id)} has no text")
        trace: dict[str, Any] = {}
        chosen = tuple(self._choose(self.rank(query, k, trace), k, budget))
        self._given += 1
        retrieval = Retrieval(chosen, f"r{self._given}", trace)
        self._open[retrieval.token] = (query, retrieval)
        if len(self._open) > _WAITING:
            del self._open[next(iter(self._open))]
        return retrieval

    def feedback(self, token: str, cited: Collection[int]) -> None:
        """Report which memories of a retrieval an answer cited, by their positions from 0.

        Raises:
            DataError: a token that this bank did not give since it was opened or a session last came or went, that was
                used before, or after which 1,000 others were given; a place that the retrieval does not have.
        """
        if token not in self._open:
            raise DataError(f"no retrieval {shown(token)} is waiting for feedback", self.folder)
        query, retrieval = self._open[token]
        if wrong := [place for place in cited if not 0 <= place < len(retrieval.memories)]:
            raise DataError(f"cited memory {wrong[0]} of {len(retrieval.memories)} retrieved", self.folder, query.id)
        del self._open[token]
        self.learn(query, retrieval, frozenset(cited))

    def forget(self, turn_ids: Iterable[str]) -> int:
        """Change memories, vectors and journal to what they would be without these turns. Returns how many of the turns
        were stored. Call `finish` again afterwards."""
        gone = {turn for turn in turn_ids if self.store.holds_turn(turn)}
        if gone:
            self._rebuild(gone)
        return len(gone)

    def repair(self) -> bool:
        """Rebuild the bank if a fallback was used; earlier replies come from the run's cache.

        Returns:
            Whether there was anything to do.
        """
        if needed := bool(self.store.degraded()):
            self._rebuild()
        return needed

    def report(self) -> dict[str, Any]:
        """Counts of sessions, turns, memories and lost requests, bytes; why some had a fallback, by session."""
        size = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        degraded = self.store.degraded()
        lost = sum(map(len, degraded.values())) if self.asked else 0
        return {**self.store.counts(), "bytes": size, "degraded": degraded, "asked": self.asked, "lost": lost}

    def close(self) -> None:
        """Close the bank and release its folder."""
        self.store.close()
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # what a system is

    @abstractmethod
    def remember(self, session: Session) -> Iterable[str]:
        """Store memories of the session in `store`; runs inside the session's transaction.

        Returns:
            Reasons why a fallback was used, one line each; usually none.
        """

    @abstractmethod
    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterable[tuple[int, float] | Memory]:
        """Numbers of memories with their scores, best first; read only as far as needed. A memory that is written for
        the query and not stored is given itself instead of a number.

        Args:
            k: how many will be read, if known.
            trace: for explanations, as JSON.
        """

    def complete(self) -> None:
        """What `finish` computes; by default nothing."""
        return

    def put(self, draft: Draft, number: int | None = None) -> int:
        """Store a memory that has a text, under a number that there is or a new one. Returns the number."""
        assert draft.text is not None
        tokens, keys = self.encoder.count_tokens(draft.text), [key or draft.text for key in draft.keys]
        vectors = self.encoder.encode_apart(keys) if keys else None
        if number is None:
            return self.store.add(draft, tokens, vectors)
        self.store.rewrite(number, draft, tokens, vectors)
        return number

    def put_turns(self, turns: Sequence[Turn]) -> None:
        """Store turns as memories of their own."""
        texts = [turn_text(turn) for turn in turns]
        vectors, tokens = self.encoder.encode_apart(texts), self.encoder.count_many(texts)
        for turn, vector, count in zip(turns, vectors, tokens, strict=True):
            self.store.add(Draft("turn", (turn.id,)), count, vector[None])

    def learn(self, query: Query, retrieval: Retrieval, cited: frozenset[int]) -> None:
        """Learn from feedback; by default does nothing."""
        return

    def chat(self, stage: Stage) -> ChatModel | None:
        """The chat model for a stage of this system and dialogue; None without an endpoint."""
        source = self.services.chat
        model = None if source is None else source(self.system.name, self.dialogue_id, stage)
        return model if model is None or stage in _ASKING else _Counted(model, self)

    def _check_lost(self, done: bool) -> None:
        """Raise where too many requests were lost; in the end tell of them in any case."""
        lost, most = [line for lines in self.store.degraded().values() for line in lines], self.services.max_failed
        if not lost or self.asked < (1 if done else _EARLY_CHECK):
            return
        told = f"{self.system.name}: {len(lost)} of {self.asked} requests for dialogue {self.dialogue_id} were lost"
        if len(lost) > most * self.asked:
            raise ModelError(f"{told}, more than max_failed {most:g}; the last: {lost[-1]}")
        if done:
            _log.warning("%s; the last: %s", told, lost[-1])

    def _choose(
        self, ranked: Iterable[tuple[int, float] | Memory], k: int | None, budget: int | None
    ) -> Iterator[Memory]:
        spent = count = misses = 0
        for item in ranked:
            if count == k:
                return
            memory = item if isinstance(item, Memory) else self.store.memory(*item)
            if budget is not None and spent + memory.tokens > budget:
                misses += 1
                if misses == _MISSES:
                    return
                continue
            misses, spent, count = 0, spent + memory.tokens, count + 1
            yield memory

    def _check(self, session: Session) -> None:
        if not session.turns:
            raise DataError("the session has no turns", self.folder, session.id)
        seen: set[str] = set()
        for turn in session.turns:
            if not turn.text.strip() and not turn.images:
                raise DataError("the turn has neither text nor picture", self.folder, turn.id)
            if turn.id in seen or self.store.holds_turn(turn.id):
                raise DataError("another turn has this id", self.folder, turn.id)
            seen.add(turn.id)
        last, now = self.store.last_time(), session.time
        # as far as both are known: a day is not before an hour of it
        if last and now and _dated(now) and now[: len(last)] < last[: len(now)]:
            raise DataError(f"its time {now} is before the last session's, {last}", self.folder, session.id)

    def _store(self, session: Session) -> tuple[str, ...]:
        self.store.add_session(session)
        degraded = tuple(self.remember(session))
        self.store.degrade(session.id, degraded)
        return degraded

    def _rebuild(self, without: Collection[str] = ()) -> None:
        """Make the bank anew of the stored sessions, less these turns, in one transaction."""
        sessions, self.asked = list(self.store.sessions()), 0
        with self.store.transaction():
            self.store.clear()
            for session in sessions:
                left = tuple(turn for turn in session.turns if turn.id not in without)
                if left:
                    self._store(replace(session, turns=left))
        self._open.clear()


@dataclass(frozen=True)
class _Counted:
    """A chat model whose requests are counted as those of a bank."""

    model: ChatModel
    bank: Bank

    @property
    def name(self) -> str:
        return self.model.name

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        self.bank.asked += len(requests)
        return self.model.complete(requests, on_reply)


def _dated(time: str) -> bool:
    """Whether it is an ISO time; these sort as text."""
    return time[:4].isdigit() and time[4:5] == "-"
