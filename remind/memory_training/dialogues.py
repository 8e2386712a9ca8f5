"""Tasks on one's own dialogues, with chat models behind endpoints.

MemBuilder (arXiv 2601.05488, Section 3.4): an expert (`llm.memory`) keeps the memory of each dialogue. SFT imitates its
replies, and a rollout starts from its memory before a session. A question is asked after the session of its last
evidence turn: `llm.answer` answers from the core block and the nearest entries of the rollout's memory, and `llm.judge`
compares with the gold answers.

SaliMory (arXiv 2606.04120, Algorithm 1, Appendix E): an episode is a question and at most `salimory.turns` turns around
its evidence. `llm.answer` replies from the utilizer's profile, and `llm.judge` grades the reply (E.1), every entry of
the memory (E.2) and the profile (E.3).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import nan
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from remind.core.errors import DataError
from remind.core.progress import ProgressBar, warn
from remind.data.dialogue import Corpus, Dialogue, Question, Session, spread
from remind.data.readers import read
from remind.llm.client import Chats
from remind.llm.endpoints import LLMConfig
from remind.llm.request import ChatModel, Reply, Request, Stage
from remind.memory import salimory
from remind.memory.base import Memory, Query
from remind.memory.logged import dated, numbered
from remind.memory.membuilder import ROLES
from remind.memory.operations import BANKS, Entry, Occasion, Role, State, fold, propose, undated
from remind.memory.quality import grade_request, grades
from remind.memory.readers import ChatReader
from remind.memory.salimory import SaliMorySystem, listed, shown
from remind.memory_training.config import MemoryDataConfig, SaliMoryConfig
from remind.memory_training.episodes import Episode, Examined, Lesson, Scores, together
from remind.memory_training.pico import remember, spoken
from remind.memory_training.rewards import RETRIEVED, Judged, Played, scores
from remind.memory_training.salimory import SaliMoryTask, read_reply, retired
from remind.models.encoder import SentenceEncoder
from remind.perception.auxiliary import judge_request, verdict_in
from remind.refmem.items import counted
from remind.refmem.styles import episode, walked
from remind.states.pyramid import turn_text
from remind.text.days import day_of


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


def examined(
    states: Sequence[State],
    questions: Sequence[Question],
    found: Callable[..., list[Memory]],
    models: Mapping[Any, Any],
) -> list[Examined]:
    """What memories are worth for questions: a model answers from what is found in them, and one judges.

    All requests of a kind go out together. Where one fails, the memory it is about has no worth (NaN).
    """
    queries = [Query.of(one) for one in questions]
    memories = [[found(state, query) for query in queries] for state in states]
    tasks = [pair for own in memories for pair in zip(queries, own, strict=True)]
    readings = ChatReader("direct").read_all(tasks, lambda stage: models["answer"])
    asked = [question for _ in states for question in questions]
    answered = [n for n, one in enumerate(readings) if one.text]
    requests = [judge_request(asked[n].text, asked[n].answers, readings[n].text, asked[n].id) for n in answered]
    # an empty answer is wrong, a failed one is none
    right = [0.0 if one.failure is None else nan for one in readings]
    for n, reply in zip(answered, models["judge"].complete(requests), strict=True):
        verdict = verdict_in(reply).value
        right[n] = nan if verdict is None else float(verdict)
    worth = [fmean(right[n : n + len(questions)]) for n in range(0, len(right), len(questions))]
    kinds = (tuple(one.kind for each in own for one in each if one.kind in RETRIEVED) for own in memories)
    return [Examined(task, None, own) for task, own in zip(worth, kinds, strict=True)]


def nearest(encoder: SentenceEncoder, top: int, state: State, query: Query) -> list[Memory]:
    """The core block and the `top` entries nearest to a question, old versions included, as MemBuilder retrieves
    them."""
    entries = state.kept(*RETRIEVED)
    vectors = encoder.encode([query.text, *(undated(one.text) for one in entries)])
    # rounded: the last bits differ with the batch that a text was encoded in
    cosines = [round(one, 5) for one in (vectors[1:] @ vectors[0]).tolist()]
    best = sorted(range(len(entries)), key=lambda n: -cosines[n])[:top]
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
        #: Called after each reply of a model.
        self.replied: Callable[[], object] = lambda: None
        models = {stage: model for stage in stages if (model := self.chats.stage(stage)) is not None}
        self.models = {stage: counted(model, lambda: self.replied()) for stage, model in models.items()}
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
        if "judge" in stages and not self.questions:
            raise DataError("no question has evidence and a free answer", paths[0])

    def lessons(self, length: Callable[[View], int], longest: int) -> list[Lesson]:
        """All sessions as the expert goes through the dialogues; its replies come from the cache where they are in it.

        Args:
            length: of a prompt in tokens of the policy.
            longest: sessions with a longer prompt are left out.

        Raises:
            ModelError: an endpoint as a whole cannot be used.
        """
        encoder, exam = SentenceEncoder(), None
        if "judge" in self.models:
            exam = partial(examined, found=partial(nearest, encoder, self.cfg.top), models=self.models)
        expert = self.models["memory"]
        asks = [asked_after(one, self.questions, self.cfg.questions) for one in self.dialogues]
        sessions = sum(bool(session.turns) for one in self.dialogues for session in one.sessions)
        with ProgressBar("expert", len(ROLES) * sessions) as bar:
            # a block that is too long is compressed by further requests
            self.replied = lambda: bar.n < bar.total and bar.step()
            talks = zip(self.dialogues, asks, strict=True)
            found = [lesson for one, own in talks for lesson in _lessons(one, expert, encoder, own, exam)]
        lessons = [one for one in found if one is not None]
        if silent := len(found) - len(lessons):
            warn(f"{silent} of {len(found)} sessions are left out, since the expert did not reply for every role")
        short = [one for one in lessons if max(map(length, one.views)) <= longest]
        if many := len(lessons) - len(short):
            warn(f"{many} of {len(found)} sessions are left out: a prompt has more than the policy's {longest} tokens")
        return short


def asked_after(dialogue: Dialogue, questions: Iterable[Question], most: int) -> Mapping[str, tuple[Question, ...]]:
    """By session the questions whose last evidence is in it, at most so many, evenly apart."""
    session_of = {turn.id: session.id for session in dialogue.sessions for turn in session.turns}
    found: dict[str, list[Question]] = {}
    for one in (one for one in questions if one.dialogue_id == dialogue.id):
        last = max(one.evidence, key=dialogue.positions.__getitem__)
        found.setdefault(session_of[last], []).append(one)
    return {name: tuple(spread(own, most)) for name, own in found.items()}


def _lessons(
    dialogue: Dialogue,
    expert: ChatModel,
    encoder: SentenceEncoder,
    asks: Mapping[str, tuple[Question, ...]],
    exam: Callable[..., list[Examined]] | None,
) -> Iterator[Lesson | None]:
    """The sessions of a dialogue in order; None for one where not every role replied."""
    heard: list[tuple[Request, Reply]] = []

    def hear(requests: Sequence[Request], on_reply: Any = None) -> list[Reply]:
        replies = expert.complete(requests, on_reply)
        heard.extend(zip(requests, replies, strict=True))
        return replies

    for bank, session, near in walked(dialogue, SimpleNamespace(name=expert.name, complete=hear), encoder):
        state, numbers = bank.state(), {"core": bank.store.numbers("core")}
        numbers |= {role: bank.nearest(near, bank.system.shown, role) for role in ROLES[1:]}
        heard.clear()
        entries = [tuple(bank.entries(numbers[role])) for role in ROLES]
        bank.ingest(session)
        # a block that is too long is compressed after them
        told = heard[: len(ROLES)]
        if any(reply.failure not in (None, "invalid") for _, reply in told):
            yield None
            continue
        place = Occasion(dialogue.id, session.id, dated(session.time), tuple(turn.id for turn in session.turns))
        views = [View(role, asked, own, place) for role, (asked, _), own in zip(ROLES, told, entries, strict=True)]
        replies = [reply.text for _, reply in told]
        pairs = list(zip(views, replies, strict=True))
        _, proposed = remember(state, dialogue.id, pairs)
        examples = [pair for pair, own in zip(pairs, proposed, strict=True) if all(o.status == "applied" for o in own)]
        questions = asks.get(session.id, ())
        asked: Any = exam and partial(exam, questions=questions)
        yield Lesson(dialogue.id, state, views, replies, examples, len(questions), asked)


# SaliMory (arXiv 2606.04120, Algorithm 1, Appendix E)


def play(dialogue: Dialogue, question: Question) -> Generator[list[Asked], list[str], Played]:
    """The roles go through a dialogue with an empty memory, then write a profile for a question, as `SaliMoryBank`."""
    state, flagged, valid = State(), list[str](), list[bool]()
    numbers = {session.id: n for n, session in enumerate(dialogue.sessions)}

    def aged(entry: Entry, time: str | None, session: Session | None = None) -> bool:
        now, said = day_of(time), day_of(entry.time)
        if now is not None and said is not None:
            return now - said > timedelta(SaliMorySystem.window_days)
        return session is not None and numbers[session.id] - numbers[entry.session] >= SaliMorySystem.window_sessions

    for session in dialogue.sessions:
        old = [one for one in state.current("working") if aged(one, session.time, session)]
        state = retired(state, old, dialogue.id, session.id)
        verdicts = yield [
            Asked("filter", salimory.request("filter", dialogue.id, shown(session, turn))) for turn in session.turns
        ]
        read = [read_reply(reply, "filter") for reply in verdicts]
        valid += [verdict is not None for verdict in read]
        for turn in (turn for turn, verdict in zip(session.turns, read, strict=True) if verdict and verdict["salient"]):
            flagged.append(turn.id)
            entries = _listed(state)
            data = {**shown(session, turn), "entries": listed((one.store, one.text) for one in entries)}
            (written,) = yield [Asked("booster", salimory.request("booster", dialogue.id, data))]
            place = Occasion(dialogue.id, session.id, dated(turn.time or session.time), (turn.id,))
            operations = propose("booster", written, place, entries, state.seq + 1)
            valid.append(all(one.status == "applied" for one in operations))
            state = fold(operations, state)
    entries = [one for one in _listed(state) if not (one.store == "working" and aged(one, question.time))]
    profile = ""
    if entries:
        data = {"entries": listed((one.store, one.text) for one in entries), "question": Query.of(question).asked}
        (written,) = yield [Asked("utilizer", salimory.request("utilizer", dialogue.id, data))]
        value = read_reply(written, "utilizer")
        valid.append(value is not None)
        profile = value["profile"].strip() if value else ""
    return Played(tuple(state.current(*BANKS)), tuple(flagged), tuple(valid), profile)


def _listed(state: State) -> list[Entry]:
    """What booster and utilizer are shown: an episode is too short for more."""
    return state.current(*BANKS)[-SaliMorySystem.whole :]


def imitated(source: Source, turns: int) -> Iterator[tuple[Asked, str]]:
    """What an expert is asked in all episodes, and its replies that could be read and applied."""

    def answer(steps: Sequence[Asked]) -> list[str]:
        replies = source.models["memory"].complete([one.request() for one in steps])
        return [one.text if one.failure in (None, "invalid") else "" for one in replies]

    asked = episodes(source, turns)
    with ProgressBar("expert", len(asked)) as bar:
        for pair in asked:
            ((played, traces),) = together([play(*pair)], answer)
            bar.step()
            yield from (one for one, valid in zip(traces, played.valid, strict=True) if valid)


def episodes(source: Source, turns: int) -> list[tuple[Dialogue, Question]]:
    """A dialogue of its own for each question."""
    dialogues = {one.id: one for one in source.dialogues}
    return [episode(dialogues[one.dialogue_id], one, turns) for one in source.questions]


class SaliMoryDialoguesTask(SaliMoryTask):
    """Each row is an episode; all roles of a rollout share one reward (Algorithm 1, line 8)."""

    def __init__(self, source: Source, tokenizer: Any, cfg: SaliMoryConfig) -> None:
        super().__init__(episodes(source, cfg.turns), tokenizer, cfg)
        self.answerer, self.judge = source.models["answer"], source.models["judge"]

    def episode(self, row: int) -> Episode:
        """Prompts of the roles in their order; returns what is `Played`."""
        return spoken(play(*self.rows[row]), self.speech)

    def score(self, row: int, outcomes: Sequence[Any]) -> Scores:
        """The replies of the answerer go out together, then all that the judge grades; without a grade a reward is NaN.

        An empty profile is worth nothing, and an empty memory is not graded, see `memory_reward`.
        """
        dialogue, question = self.rows[row]
        query, said = Query.of(question), "\n".join(turn_text(turn) for turn in dialogue.turns)
        about = {"question": query.text, "right": numbered(question.answers)}
        profiles = [Memory("profile", one.profiles, "profile", None, None, 1.0, 0) for one in outcomes]
        tasks = [(query, [one] if one.text else []) for one in profiles]
        # R1 is of what a person is told, not of a phrase
        readings = ChatReader("respond").read_all(tasks, lambda stage: self.answerer)
        given: dict[tuple[int, str], dict[str, str]] = {}
        for n, (one, reading) in enumerate(zip(outcomes, readings, strict=True)):
            memory = {"memory": listed((entry.store, entry.text) for entry in one.bank)}
            if reading.text:
                given[n, "response"] = {**about, "reply": reading.text, **memory}
            if one.bank:
                given[n, "memory"] = {"conversation": said, **memory}
            if one.profiles:
                given[n, "profile"] = {**about, "profile": one.profiles, **memory}
        replies = self.judge.complete([grade_request(step, question.id, parts) for (_, step), parts in given.items()])
        told = {place: grades(place[1], reply) for place, reply in zip(given, replies, strict=True)}
        judged = []
        for n, (one, reading) in enumerate(zip(outcomes, readings, strict=True)):
            response = told.get((n, "response"), {} if reading.failure else {"accuracy": 0.0})
            accuracy, personalisation = response.get("accuracy", nan), response.get("personalisation")
            profile = told.get((n, "profile"), {"score": 0.0}).get("score", nan)
            entries = _shares(told.get((n, "memory")), one.bank)
            judged.append(Judged(one, accuracy, personalisation, entries, profile))
        return scores(judged, set(question.evidence), self.cfg)


def _shares(grade: Any, bank: Sequence[Entry]) -> tuple[float | None, float | None]:
    """φ_f and φ_v, as `shares` of the memory world; NaN where the judge did not grade every entry."""
    if not bank:
        return None, None
    entries = (grade or {}).get("entries", ())
    if len(entries) != len(bank):
        return nan, nan
    return tuple(sum(one[name] for one in entries) / len(bank) for name in ("factual", "vague"))  # type: ignore[return-value]
