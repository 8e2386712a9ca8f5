"""Memory systems as context providers: each is given a dialogue, remembers it, and is asked for every question.

What a unit, a system with a dialogue, found and cost is one file of the run; a unit that is there is not made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from remind.core.errors import ConfigError, DataError, RemindError
from remind.core.files import Cache, read_json, sha256_json, sweep, write_json
from remind.core.progress import ProgressBar
from remind.core.run_folder import RunFolder
from remind.data.dialogue import Dialogue, Question, Turn
from remind.data.readers import format_of
from remind.evaluation.contexts import Context
from remind.evaluation.personalisation import TEMPLATE
from remind.llm.request import Stage
from remind.memory.asking import dated
from remind.memory.base import Bank, Memory, MemorySystem, Query, Retrieval, Services
from remind.memory.citers import CiterName, tell, warning
from remind.memory.config import RunMemoryConfig
from remind.memory.learning import courses, learning
from remind.memory.meter import Meter
from remind.memory.readers import Answers, ChatReader, Reading, as_turns, in_order
from remind.memory.systems import SYSTEMS, make_system
from remind.models.encoder import SentenceEncoder
from remind.models.generate import Failure, Generation
from remind.states import prompts
from remind.states.pyramid import turn_text

_FORMAT = 3
#: One of each endpoint that has a part in a unit.
_STAGES: tuple[Stage, ...] = ("extract", "answer")
#: Settings that have no part in what a unit holds.
_ELSEWHERE = ("input", "out", "systems", "options", "format", "split", "states", "limit", "dialogues", "llm")
#: `Bank.retrieve`, or what stands in for it.
Retrieve = Callable[..., Retrieval]


class CachedEncoder(SentenceEncoder):
    """A sentence encoder that encodes the texts of a session once for all systems.

    Attributes:
        saved: seconds that vectors from the cache had taken when they were made.
    """

    def __init__(self, name: str, cache: Cache) -> None:
        super().__init__(name, load=False)
        self._cache, self.saved = cache, 0.0

    def encode_apart(self, texts: Sequence[str]) -> Tensor:
        key = [self.name, list(texts)]
        if (entry := self._cache.read("vectors", key)) is not None:
            self.saved += entry[1]
            return entry[0]["vectors"]
        start = time.perf_counter()
        vectors = super().encode_apart(texts)
        self._cache.write("vectors", key, {"vectors": vectors}, time.perf_counter() - start)
        return vectors


class Memories:
    """What the memory systems of a run share: encoder, chat models, reader, citer.

    Args:
        cfg: systems and settings; the input is not read here.
        out: folder that what they remember and find is kept in.
        held: closes the meter.
        reads: whether the reader answers; otherwise contexts are for the model of an evaluation.
        own: systems that stand in `cfg.systems` and not in `SYSTEMS`.

    Attributes:
        datasets: of the dialogues, where they are of several.
        units: files of the units made so far.
        notes: what must be said beside the figures.

    Raises:
        ConfigError: an unknown system or option, or an endpoint that is missing.
    """

    def __init__(
        self,
        cfg: RunMemoryConfig,
        out: Path,
        held: ExitStack,
        reads: bool = True,
        own: Mapping[str, MemorySystem] | None = None,
    ) -> None:
        self.cfg, self.out = cfg, out
        self.systems = dict(own or {})
        self.systems |= {
            name: make_system(name, _options(cfg, name)) for name in cfg.systems if name not in self.systems
        }
        held.enter_context(RunFolder(out).held())
        for place in [*out.glob("**/")]:
            sweep(place)
        self.encoder = CachedEncoder(cfg.encoder, Cache(out / "cache"))
        self.meter = held.enter_context(Meter(cfg.llm, out / "costs.jsonl"))
        self.writing = cfg.llm.endpoint("extract")
        url = None if self.writing is None else self.meter.url
        self.services = Services(self.encoder, self.meter.chat, url, cfg.max_failed)
        self.reader = ChatReader(cfg.reader)
        # opened before anything is done, so that a missing key is reported at once
        _, answers = (self.meter.chat("", "", stage) is not None for stage in _STAGES)
        self.reads = reads and answers
        if cfg.judge == "p13n" and self.meter.chat("", "", "judge") is None:
            raise ConfigError("judge p13n needs an endpoint; name one: --llm.judge.base_url or --llm.default.base_url")
        cites = cfg.reader == "cite" and self.reads
        # nothing can be learned from stand-ins
        self.citer: CiterName = "none" if cfg.llm.dry_run or (cfg.citer == "reader" and not cites) else cfg.citer
        self.courses = courses(self.systems, self.citer, out / "learned", self.encoder)
        self.about = {name: chosen.about() for name, chosen in self.systems.items()}
        self.datasets: dict[str, str] = {}
        self.units: list[str] = []
        self.notes = list(filter(None, [warning(self.citer), *self._who()]))

    def providers(self, controls: Sequence[str] = ()) -> dict[str, SystemContexts]:
        """By name; the controls first."""
        return {name: SystemContexts(name, self) for name in (*controls, *self.systems)}

    def costs(self) -> list[dict[str, Any]]:
        """What was asked and what it cost, by system, dialogue and stage."""
        return self.meter.ledger.groups("system", "dialogue", "stage")

    def told(self) -> Iterator[str]:
        """Notes and costs, for a person."""
        yield from (*self.notes, *([self.meter.table()] if self.costs() else []))

    def _who(self) -> Iterator[str]:
        """Who answers and who assesses, with the hashes of the prompts, a line each."""
        cfg = self.cfg
        if self.reads and (one := cfg.llm.endpoint("answer")) is not None:
            template = "answer" if cfg.reader == "x0" else "memory_read"
            yield f"Answers: {one.identity}, reader {cfg.reader}, {prompts.prompt_id(template)}."
        if cfg.judge in ("llm", "p13n") and (one := cfg.llm.endpoint("judge")) is not None:
            yield f"Verdicts: {one.identity}, {prompts.prompt_id('ask_judge')}."
        if cfg.judge == "p13n" and (one := cfg.llm.endpoint("judge")) is not None:
            yield f"Personalisation and errors: {one.identity}, {prompts.prompt_id(TEMPLATE)}."


class SystemContexts:
    """A memory system, or a control (nothing, the newest turns that fit, the gold evidence), as a context provider.

    Args:
        name: of the system in the run, or of the control.
        memories: what the systems of the run share.
    """

    #: It is given the gold, to record what of it was found; a system sees `Query` alone.
    measures = True

    def __init__(self, name: str, memories: Memories) -> None:
        self.name, self._run, self.system = name, memories, memories.systems.get(name)

    def contexts(self, questions: Sequence[Question], dialogue: Dialogue) -> list[Context]:
        """A context for each question, from the unit of this dialogue, which is made where it is not there."""
        run, system = self._run, self.system
        dataset = run.datasets.get(dialogue.id, "")
        said = [[s.id, s.time, [[t.id, t.speaker, turn_text(t), t.time] for t in s.turns]] for s in dialogue.sessions]
        course = run.courses.get(self.name)
        begins = [] if course is None else [course.begins]
        settings = {k: v for k, v in asdict(run.cfg).items() if k not in _ELSEWHERE}
        models = [one and one.identity for one in map(run.cfg.llm.endpoint, _STAGES)]
        made_by = [_FORMAT, run.about.get(self.name), models, settings, run.citer, run.reads]
        key = sha256_json([*made_by, dataset, dialogue.id, said, list(map(asdict, questions)), *begins])
        path = f"units/{self.name}/{key[:24]}.json"
        unit = _made(run.out / path, key)
        if unit is None:
            asked = (
                self._control(dialogue, questions) if system is None else self._ask(system, dialogue, questions, key)
            )
            about = {"dataset": dataset, "system": self.name, "dialogue": dialogue.id, "bank": _bank_name(dialogue)}
            unit = {"key": key, **about, "k": run.cfg.k, "notes": run.notes, **asked}
            write_json(run.out / path, unit)
        if course is not None:
            course.advance(key)
        run.units.append(path)
        if unit["failed"] is not None:
            message = f"{unit['failed']['stage']}: {unit['failed']['message']}"
            lost = Generation("", 0, failure="error", message=message)
            return [Context("", output=lost)] * len(questions)
        return [_context(row) for row in unit["rows"]]

    def _ask(self, system: MemorySystem, dialogue: Dialogue, questions: Sequence[Question], key: str) -> dict[str, Any]:
        run, cfg, name = self._run, self._run.cfg, _bank_name(dialogue)
        # memories that a model writes are that model's
        writes = run.writing is not None and (self.name not in SYSTEMS or SYSTEMS[self.name].stages)
        made_by = sha256_json([run.about[self.name], run.writing.identity if run.writing and writes else None])
        folder = run.out / "banks" / f"{self.name}-{made_by[:8]}" / sha256_json(dialogue.id)[:16]
        stage, report, failed = "ingest", {}, None
        rows, shown, readings = list[dict[str, Any]](), list[tuple[Memory, ...]](), list[Reading]()
        k, budget = None if cfg.budget_tokens else cfg.answer_k, cfg.budget_tokens
        try:
            with system.open(folder, name, run.services) as made:
                self._ingest(made, dialogue)
                report = {**made.report(), "ingest_seconds": sum(_seconds(folder).values())}
                with learning(run.citer, made, run.out, run.courses.get(self.name), key) as bank:
                    answers = isinstance(bank, Answers) and run.reads
                    for question in questions:
                        stage, query = "retrieve", Query.of(question)
                        rows.append(self._row(question, bank.retrieve))
                        found = Retrieval((), "") if answers else bank.retrieve(query, k=k, budget=budget)
                        shown.append(found.memories)
                        tell(run.citer, bank, question, cfg.answer_k)
                        if run.citer == "reader" and bank.learns:
                            stage = "answer"
                            readings.append(run.reader.read(query, found.memories, bank.chat))
                            if (cited := readings[-1].cited) is not None:
                                bank.feedback(found.token, cited)
                    stage = "answer"
                    if isinstance(bank, Answers) and run.reads:
                        own = [bank.answer(Query.of(question)) for question in questions]
                        readings = [Reading(one.text, one.cited, one.usage, one.failure) for one in own]
                        shown = [one.retrieval.memories for one in own]
                    self._read(dialogue, questions, rows, shown, readings, bank)
        except RemindError as error:
            failed = {"stage": stage, "message": str(error)}
            # of all questions or of none
            rows = rows if len(rows) == len(questions) else []
        return {"failed": failed, "report": report, "rows": rows}

    def _ingest(self, bank: Bank, dialogue: Dialogue) -> None:
        """Sessions that the bank does not hold yet, and what each took, in a file beside the bank."""
        run = self._run
        if run.writing is not None:
            bank.repair()
        seconds = _seconds(bank.folder)

        def clock() -> float:
            # vectors from the cache count as if they were computed now
            return time.perf_counter() + run.encoder.saved

        def timed(name: str, start: float) -> None:
            seconds[name] = clock() - start
            write_json(_beside(bank.folder), seconds)

        with ProgressBar(f"{self.name} {dialogue.id}", len(dialogue.sessions)) as bar:
            for session in dialogue.sessions:
                start = clock()
                if session.turns and not bank.ingest(session).known:
                    timed(session.id, start)
                bar.step()
        start = clock()
        bank.finish()
        if "" not in seconds:
            timed("", start)

    def _control(self, dialogue: Dialogue, questions: Sequence[Question]) -> dict[str, Any]:
        run, rows, shown = self._run, list[dict[str, Any]](), list[tuple[Memory, ...]]()
        shows = control(self.name, dialogue, run.encoder)
        limit = run.cfg.full_tokens if self.name == "full_context" else None
        for question in questions:
            retrieve = shows(question)
            rows.append(self._row(question, retrieve))
            shown.append(retrieve(Query.of(question), budget=limit).memories)
        self._read(dialogue, questions, rows, shown)
        return {"failed": None, "report": {}, "rows": rows}

    def _row(self, question: Question, retrieve: Retrieve) -> dict[str, Any]:
        """A question and the memories that are found at every k and budget, as JSON."""
        cfg, encoder, query = self._run.cfg, self._run.encoder, Query.of(question)
        encoder.forget()
        start = time.perf_counter()
        top = retrieve(query, k=max(cfg.k, default=1))
        milliseconds = 1e3 * (time.perf_counter() - start)
        budgets = {str(budget): retrieve(query, budget=budget).memories for budget in cfg.budgets}
        return {
            "question": question.id,
            **{name: getattr(question, name) for name in ("text", "answers", "evidence")},
            "ms": milliseconds,
            "top": [_record(memory) for memory in top.memories],
            "budgets": {budget: [_record(memory) for memory in chosen] for budget, chosen in budgets.items()},
            "shown": [memory.text for memory in top.memories[: cfg.shown]],
            "trace": top.trace,
            "answer": None,
        }

    def _read(
        self,
        dialogue: Dialogue,
        questions: Sequence[Question],
        rows: list[dict[str, Any]],
        shown: Sequence[Sequence[Memory]],
        readings: Sequence[Reading] = (),
        bank: Bank | None = None,
    ) -> None:
        """Put what each question is answered from into its row, and the reader's answer."""
        run, queries = self._run, list(map(Query.of, questions))
        if run.reads and not readings:
            tasks = list(zip(queries, shown, strict=True))
            readings = run.reader.read_all(tasks, partial(run.meter.chat, self.name, _bank_name(dialogue)))
        for number, (row, query, memories) in enumerate(zip(rows, queries, shown, strict=True)):
            ordered = [memories[place] for place in in_order(memories)]
            known = [memory.sources for memory in ordered]
            sources = None if None in known else list(dict.fromkeys(turn for one in known for turn in one or ()))
            row["context"] = {"text": as_turns(ordered), "sources": sources, "tokens": sum(m.tokens for m in ordered)}
            if readings:
                one = readings[number]
                cited = None if one.cited is None else sorted(one.cited)
                used = [one.usage.prompt_tokens, one.usage.completion_tokens]
                row["answer"] = {"text": one.text, "cited": cited, "failed": one.failure, "tokens": used}
            if run.cfg.judge == "p13n":
                profile = "\n".join(map(dated, memories))
                held = profile if bank is None else "\n".join(map(dated, _nearest(bank, query, run.cfg.full_tokens)))
                row["remembered"] = [profile, held]


def control(name: str, dialogue: Dialogue, encoder: SentenceEncoder) -> Callable[[Question], Retrieve]:
    """What a control shows for each question, as much of it as fits: nothing, all turns (the newest first), or gold
    evidence alone.

    Args:
        name: one of `CONTROLS`.
    """
    if name == "gold":
        return lambda question: _first(_memories(dialogue, list(map(dialogue.turn, question.evidence)), encoder))
    whole = _first(_memories(dialogue, list(reversed(dialogue.turns)) if name == "full_context" else [], encoder))
    return lambda question: whole


def _memories(dialogue: Dialogue, turns: Sequence[Turn], encoder: SentenceEncoder) -> list[Memory]:
    tokens = encoder.count_many([turn_text(turn) for turn in turns])
    times = [turn.time or dialogue.session_of[turn.id].time for turn in turns]
    return [
        Memory(turn.id, turn_text(turn), "turn", (turn.id,), when, 0.0, count, dialogue.positions[turn.id])
        for turn, when, count in zip(turns, times, tokens, strict=True)
    ]


def _first(memories: Sequence[Memory]) -> Retrieve:
    def first(query: Query, k: int | None = None, budget: int | None = None) -> Retrieval:
        chosen: list[Memory] = []
        spent = 0
        for memory in memories[:k]:
            spent += memory.tokens
            if budget is not None and spent > budget:
                break
            chosen.append(memory)
        return Retrieval(tuple(chosen), "")

    return first


def _nearest(bank: Bank, query: Query, budget: int) -> Iterator[Memory]:
    """The memories of a bank, nearest first; before them those without vectors: a block that is always shown."""
    places = {number: place for place, (number, _) in enumerate(bank.ranker.rank(query.text, "dense"))}
    for number in sorted(bank.store.numbers(), key=lambda number: places.get(number, -1)):
        memory = bank.store.memory(number)
        budget -= memory.tokens
        if budget < 0:
            return
        yield memory


def _context(row: Mapping[str, Any]) -> Context:
    context, answer = row["context"], row["answer"]
    sources = None if context["sources"] is None else tuple(context["sources"])
    if answer is None:
        return Context(context["text"], sources)
    prompt, new = answer["tokens"]
    if answer["failed"] is not None:
        kind = answer["failed"].partition(": ")[0]
        failure: Failure = kind if kind in get_args(Failure) else "server"
        output = Generation("", prompt, new, failure=failure, message=answer["failed"])
    else:
        text = f"<answer>{answer['text']}</answer><explanation></explanation>"
        output = Generation(text, prompt, new, finished=True)
    return Context(context["text"], sources, output=output)


def _made(path: Path, key: str) -> dict[str, Any] | None:
    """A unit that is there, whole; one with a failure is made again."""
    try:
        unit: dict[str, Any] = read_json(path)
        failed = any(row["answer"] is not None and row["answer"]["failed"] for row in unit["rows"])
        return unit if unit["key"] == key and unit["failed"] is None and not failed else None
    except (DataError, KeyError, TypeError):
        return None


def _options(cfg: RunMemoryConfig, name: str) -> dict[str, Any]:
    """The options of a system; facts that are replayed come from the LoCoMo file of the input."""
    options = dict(cfg.options.get(name, {}))
    if name in SYSTEMS and SYSTEMS[name].replays:
        files = (path for path in cfg.inputs if Path(path).is_file() and format_of(path, cfg.format) == "locomo")
        options.setdefault("annotations", next(files, None))
    return options


def _bank_name(dialogue: Dialogue) -> str:
    """What a system knows a dialogue by: LongMemEval's ids end in `_abs` where the dialogue holds no answer."""
    return dialogue.id.removesuffix("_abs")


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.seconds.json")


def _seconds(folder: Path) -> dict[str, float]:
    return read_json(_beside(folder)) if _beside(folder).exists() else {}


def _record(memory: Memory) -> list[Any]:
    return [memory.id, memory.sources, memory.tokens, memory.time]
