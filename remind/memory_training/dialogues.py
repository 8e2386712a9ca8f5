"""MemBuilder's task on one's own dialogues, with chat models behind endpoints (arXiv 2601.05488, Section 3.4).

An expert (`llm.memory`) keeps the memory of each dialogue. SFT imitates its replies, and a rollout starts from its
memory before a session. A question is asked after the session of its last evidence turn: `llm.answer` answers from the
core block and the nearest entries of the rollout's memory, and `llm.judge` compares with the gold answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from remind.core.errors import DataError
from remind.core.progress import ProgressBar, warn
from remind.data.dialogue import Corpus, Dialogue, Question, spread
from remind.data.readers import read
from remind.llm import asking
from remind.llm.client import Chats
from remind.llm.endpoints import LLMConfig
from remind.llm.request import ChatModel, Request, Stage
from remind.memory.base import Memory, Query, Services
from remind.memory.logged import dated
from remind.memory.membuilder import ROLES, MemBuilderSystem, request
from remind.memory.operations import Entry, State
from remind.memory.proposals import Occasion, Role, propose, undated
from remind.memory.readers import ChatReader
from remind.memory_training.config import MemoryDataConfig
from remind.memory_training.episodes import Examined, Lesson
from remind.memory_training.rewards import RETRIEVED, task_reward
from remind.models.encoder import SentenceEncoder


@dataclass(frozen=True)
class Asked:
    """What a role is asked: a request, as `remind run-memory` sends it, in the language of chat models."""

    role: str
    asked: Request

    def request(self) -> Request:
        """As a chat."""
        return self.asked

    def as_json(self, reply: str) -> str:
        """A reply is taken as it is."""
        return reply

    from_json = as_json


@dataclass(frozen=True)
class View(Asked):
    """What a role of MemBuilder is asked.

    Attributes:
        entries: those that the request numbers; of core the block.
        place: where its operations are proposed.
    """

    role: Role
    entries: tuple[Entry, ...]
    place: Occasion

    def occasion(self, dialogue: str) -> Occasion:
        """Where its operations are proposed."""
        return self.place


class Exam:
    """Asks questions of memories and has the answers judged.

    Args:
        encoder: ranks entries.
        answerer, judge: chat models.
        top: entries that an answer is read from, besides the core block.
    """

    def __init__(self, encoder: SentenceEncoder, answerer: ChatModel, judge: ChatModel, top: int) -> None:
        self.encoder, self.answerer, self.judge, self.top = encoder, answerer, judge, top

    def examined(self, states: Sequence[State], questions: Sequence[Question]) -> list[Examined]:
        """All requests of a kind go out together. Where one fails, the memory it is about has no worth (NaN)."""
        queries = [Query.of(one) for one in questions]
        memories = [[self.memories(state, query) for query in queries] for state in states]
        tasks = [pair for own in memories for pair in zip(queries, own, strict=True)]
        readings = ChatReader("direct").read_all(tasks, lambda stage: self.answerer)
        asked = [question for _ in states for question in questions]
        answered = [n for n, one in enumerate(readings) if one.text]
        requests = [
            asking.judge_request(asked[n].text, asked[n].answers, readings[n].text, asked[n].id) for n in answered
        ]
        # an empty answer is wrong, a failed one is none
        right: list[bool | None] = [False if one.failure is None else None for one in readings]
        for n, reply in zip(answered, self.judge.complete(requests), strict=True):
            right[n] = asking.verdict_in(reply).value
        found = []
        for n, own in enumerate(memories):
            verdicts = right[n * len(questions) : (n + 1) * len(questions)]
            known = [one for one in verdicts if one is not None]
            task = task_reward(known) if len(known) == len(verdicts) else nan
            found.append(Examined(task, None, tuple(one.kind for each in own for one in each if one.kind in RETRIEVED)))
        return found

    def memories(self, state: State, query: Query) -> list[Memory]:
        """The core block and the entries nearest to a question, old versions included, as MemBuilder retrieves them."""
        entries = state.kept(*RETRIEVED)
        vectors = self.encoder.encode([query.text, *(undated(one.text) for one in entries)])
        # rounded: the last bits differ with the batch that a text was encoded in
        cosines = [round(one, 5) for one in (vectors[1:] @ vectors[0]).tolist()]
        best = sorted(range(len(entries)), key=lambda n: -cosines[n])[: self.top]
        block = [state.block] if state.block is not None and state.block.text else []
        chosen = [*block, *(entries[n] for n in best)]
        return [Memory(one.id, one.text, one.store, one.sources, one.time, 0.0, 0) for one in chosen]


class Source:
    """Dialogues with the questions that are of use, and the chat models behind the endpoints.

    Raises:
        DataError: an input that cannot be used.
        ModelError: an endpoint that cannot be used: no key in the environment, for instance.
    """

    def __init__(self, cfg: MemoryDataConfig, llm: LLMConfig, stages: Sequence[Stage]) -> None:
        self.cfg, self.chats = cfg, Chats(llm)
        self.models = {stage: model for stage in stages if (model := self.chats.stage(stage)) is not None}
        paths = [cfg.input] if isinstance(cfg.input, str) else list(cfg.input)
        corpus = Corpus.merge([read(path, cfg.format) for path in paths], paths)
        self.dialogues = corpus.dialogues[: cfg.limit]
        names = {one.id for one in self.dialogues}
        self.questions = [
            one
            for one in corpus.questions
            if one.dialogue_id in names and cfg.split in (None, one.split)
            if one.format == "direct" and one.answers and one.evidence and not one.unanswerable
        ]
        if not self.dialogues:
            raise DataError("it holds no dialogues", paths[0])
        if "judge" in stages and not self.questions:
            raise DataError("no question has evidence and a free answer", paths[0])

    def lessons(self, length: Callable[[View], int], longest: int) -> list[Lesson]:
        """All sessions as the expert goes through the dialogues; its replies come from the cache where they are in it.

        Args:
            length: of a prompt in tokens of the policy.
            longest: sessions with a longer prompt are left out.

        Raises:
            DataError: the expert replied to nothing, or every prompt is too long.
            ModelError: an endpoint as a whole cannot be used.
        """
        encoder, exam = SentenceEncoder(), None
        if "judge" in self.models:
            exam = Exam(encoder, self.models["answer"], self.models["judge"], self.cfg.top)
        found: list[Lesson | None] = []
        with ProgressBar("expert", sum(len(one.sessions) for one in self.dialogues)) as bar:
            for dialogue in self.dialogues:
                own = (one for one in self.questions if one.dialogue_id == dialogue.id)
                asks = asked_after(dialogue, own, self.cfg.questions)
                for lesson in _lessons(dialogue, self.models["memory"], encoder, asks, exam):
                    found.append(lesson)
                    bar.step()
        lessons = [one for one in found if one is not None]
        if not lessons:
            raise DataError("the expert's replies could not be had in any session", self.dialogues[0].id)
        if silent := len(found) - len(lessons):
            warn(f"{silent} of {len(found)} sessions are left out, since the expert did not reply for every role")
        short = [one for one in lessons if max(map(length, one.views)) <= longest]
        if many := len(lessons) - len(short):
            why = f"a prompt of {many} of {len(found)} sessions has more than {longest} tokens, the policy's limit"
            if not short:
                raise DataError(why, self.dialogues[0].id)
            warn(f"{why}; they are left out")
        return short


def asked_after(dialogue: Dialogue, questions: Iterable[Question], most: int) -> Mapping[str, tuple[Question, ...]]:
    """By session the questions whose last evidence is in it, at most so many, evenly apart."""
    session_of = {turn.id: session.id for session in dialogue.sessions for turn in session.turns}
    found: dict[str, list[Question]] = {}
    for one in questions:
        last = max(one.evidence, key=dialogue.positions.__getitem__)
        found.setdefault(session_of[last], []).append(one)
    return {name: tuple(spread(own, most)) for name, own in found.items()}


def _lessons(
    dialogue: Dialogue,
    expert: ChatModel,
    encoder: SentenceEncoder,
    asks: Mapping[str, tuple[Question, ...]],
    exam: Exam | None,
) -> Iterator[Lesson | None]:
    """The sessions of a dialogue in order; None for one where not every role replied."""
    services = Services(encoder, lambda system, name, stage: expert)
    with (
        TemporaryDirectory() as folder,
        MemBuilderSystem().open(Path(folder) / "bank", dialogue.id, services) as bank,
    ):
        for session in (one for one in dialogue.sessions if one.turns):
            state = bank.state()
            bank.ingest(session)
            if len(bank.told) < len(ROLES):
                yield None
                continue
            place = Occasion(dialogue.id, session.id, dated(session.time), tuple(turn.id for turn in session.turns))
            ask = partial(request, dialogue=dialogue.id, session=session)
            told = [(role, *bank.told[role][:2]) for role in ROLES]
            views = [View(role, ask(role, entries=entries), tuple(entries), place) for role, _, entries in told]
            replies = [text for _, text, _ in told]
            examples = [
                (view, text)
                for view, text in zip(views, replies, strict=True)
                for own in [propose(view.role, text, place, view.entries, state.seq + 1)]
                if all(one.status == "applied" for one in own)
            ]
            questions = asks.get(session.id, ())
            examined: Any = exam and partial(exam.examined, questions=questions)
            yield Lesson(dialogue.id, state, views, replies, examples, len(questions), examined)
