"""Memory systems as context providers: each is given a dialogue, remembers it, and is asked for every question.

What a unit, a system with a dialogue, found and cost is one file of the run; a unit that is there is not made again.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from remind.core.errors import ConfigError, RemindError
from remind.core.files import read_json, sha256_file, sha256_json, sweep, write_json
from remind.core.run_folder import RunFolder
from remind.data.dialogue import Dialogue, Question
from remind.data.readers import format_of
from remind.evaluation.contexts import Context
from remind.evaluation.judge import TEMPLATE, role_prompts
from remind.llm.request import Stage
from remind.memory.bank import Bank
from remind.memory.base import Memory, Query, Retrieval, Services, System
from remind.memory.config import Limit, RunMemoryConfig
from remind.memory.meter import Meter
from remind.memory.readers import ChatOf, ChatReader, Reading, as_turns, in_order
from remind.memory.reranker import NAME
from remind.memory.rmm import cited, keep, learning, warning
from remind.memory.systems import SYSTEMS, make_system
from remind.models.encoder import SentenceEncoder
from remind.models.generate import Failure, Generation
from remind.states import prompts
from remind.states.pyramid import turn_lines

_FORMAT = 4
#: One of each endpoint that has a part in a unit.
_STAGES: tuple[Stage, ...] = ("extract", "answer")
#: Settings that have no part in what a unit holds.
_ELSEWHERE = (
    *("input", "out", "systems", "options", "models", "limits", "export"),
    *("format", "split", "states", "limit", "dialogues", "llm"),
)
#: Lists of texts whose vectors are kept; of a dialogue each system encodes the same ones.
_SESSIONS = 500
#: `Bank.retrieve`, or what stands in for it.
Retrieve = Callable[..., Retrieval]


class CachedEncoder(SentenceEncoder):
    """A sentence encoder that encodes the texts of a session once for all systems."""

    def __init__(self, name: str) -> None:
        super().__init__(name, load=False)
        self._once = lru_cache(_SESSIONS)(super().encode_apart)

    def encode_apart(self, texts: Sequence[str]) -> Tensor:
        return self._once(tuple(texts))


class Memories:
    """What the memory systems of a run share: encoder, chat models, reader, citer.

    Args:
        cfg: systems and settings; the input is not read here.
        out: folder that what they remember and find is kept in.
        held: holds the folder.
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
        own: Mapping[str, System] | None = None,
    ) -> None:
        self.cfg, self.out = cfg, out
        given = own or {}
        self.systems = {name: given.get(name) or self._made(name) for name in cfg.systems}
        held.enter_context(RunFolder(out).held())
        for place in [*out.glob("**/")]:
            sweep(place)
        self.encoder = CachedEncoder(cfg.encoder)
        self.meter = Meter(cfg.llm, out / "costs.jsonl", {name: cfg.llm_of(name) for name in cfg.models})
        self.services = Services(self.encoder, self.meter.chat, self.meter.client, cfg.max_failed)
        self.reader = ChatReader(cfg.reader)
        # opened before anything is done, so that a missing key is reported at once
        _, answers = (self.meter.chat("", "", stage) is not None for stage in _STAGES)
        self.reads = reads and answers
        if cfg.judge == "p13n" and self.meter.chat("", "", "judge") is None:
            raise ConfigError("judge p13n needs an endpoint; name one: --llm.judge.base_url or --llm.default.base_url")
        cites = cfg.reader == "cite" and self.reads
        # nothing can be learned from stand-ins
        self.citer = "none" if cfg.llm.dry_run or (cfg.citer == "reader" and not cites) else cfg.citer
        self.about = {name: chosen.about() for name, chosen in self.systems.items()}
        self.datasets: dict[str, str] = {}
        self.units: list[str] = []
        self.notes = list(filter(None, [warning(self.citer), *self._who()]))

    def providers(self, controls: Sequence[str] = ()) -> dict[str, SystemContexts]:
        """By name; the controls first."""
        return {name: SystemContexts(name, self) for name in (*controls, *self.systems)}

    def _made(self, name: str) -> System:
        """A system with its options; facts that are replayed come from the LoCoMo file of the input."""
        cfg, options = self.cfg, dict(self.cfg.options.get(name, {}))
        system = str(options.pop("system", name))
        found = (path for path in cfg.inputs if Path(path).is_file() and format_of(path, cfg.format) == "locomo")
        if system in SYSTEMS and SYSTEMS[system].replays:
            options = {"annotations": next(found, None), **options}
        return make_system(system, options, name)

    def writing(self, name: str) -> str | None:
        """Who writes the memories of a system; None: nobody is named."""
        one = self.cfg.llm_of(name).endpoint("extract")
        return None if one is None else one.identity

    def costs(self) -> list[dict[str, Any]]:
        """What was asked and what it cost, by system, dialogue and stage."""
        return self.meter.ledger.groups("system", "dialogue", "stage")

    def _who(self) -> Iterator[str]:
        """Who answers and who assesses, with the hashes of the prompts, a line each."""
        cfg = self.cfg
        if self.reads and (one := cfg.llm.endpoint("answer")) is not None:
            template = "answer" if cfg.reader == "x0" else "memory_read"
            yield f"Answers: {one.identity}, reader {cfg.reader}, {prompts.prompt_id(template)}."
        if cfg.judge != "offline" and (one := cfg.llm.endpoint("judge")) is not None:
            told = role_prompts().values() if cfg.judge == "longmemeval" else [prompts.prompt_id("ask_judge")]
            yield f"Verdicts: {one.identity}, {', '.join(told)}."
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
        #: Folder of the weights that the next dialogue begins with.
        self._weights: str | None = getattr(self.system, "weights", None)

    def contexts(self, questions: Sequence[Question], dialogue: Dialogue) -> list[Context]:
        """A context for each question, from the unit of this dialogue, which is made where it is not there."""
        run = self._run
        dataset = run.datasets.get(dialogue.id, "")
        said = [[s.id, s.time, [[t.id, t.speaker, turn_lines(t), t.time] for t in s.turns]] for s in dialogue.sessions]
        begins = self._weights and sha256_file(Path(self._weights) / NAME)
        settings = {k: v for k, v in asdict(run.cfg).items() if k not in _ELSEWHERE}
        models = [one and one.identity for one in map(run.cfg.llm_of(self.name).endpoint, _STAGES)]
        limit = repr(run.cfg.limits.get(self.name))
        made_by = [_FORMAT, run.about.get(self.name), models, settings, limit, run.citer, run.reads, begins]
        key = sha256_json([*made_by, dataset, dialogue.id, said, list(map(asdict, questions))])
        path = f"units/{self.name}/{key[:24]}.json"
        if (unit := _made(run.out / path, key)) is None:
            about = {
                "dataset": dataset,
                "system": self.name,
                "dialogue": dialogue.id,
                "bank": dialogue.id.removesuffix("_abs"),
            }
            unit = {"key": key, **about, "k": run.cfg.k, "notes": run.notes, **self._ask(dialogue, questions, key)}
            write_json(run.out / path, unit)
        learned = run.out / "learned" / self.name
        if (after := learned / key[:24] / NAME).is_file() and unit["failed"] is None:
            # the last ones, for runs to come
            keep(after.read_bytes(), learned)
            self._weights = str(after.parent)
        run.units.append(path)
        if unit["failed"] is not None:
            message = f"{unit['failed']['stage']}: {unit['failed']['message']}"
            return [Context("", output=Generation("", 0, failure="error", message=message))] * len(questions)
        return [_context(row) for row in unit["rows"]]

    def _ask(self, dialogue: Dialogue, questions: Sequence[Question], key: str) -> dict[str, Any]:
        """What is found for each question and read from it."""
        # LongMemEval's ids end so where the dialogue holds no answer
        run, cfg, system, name = self._run, self._run.cfg, self.system, dialogue.id.removesuffix("_abs")
        stage, report, rows = "ingest", dict[str, Any](), list[dict[str, Any]]()
        shown, readings = list[Sequence[Memory]](), list[Reading]()
        limit = cfg.limits.get(self.name) or Limit(None if cfg.budget_tokens else cfg.answer_k, cfg.budget_tokens)
        chat: ChatOf = partial(run.meter.chat, self.name, name)
        try:
            with ExitStack() as held:
                bank, taught = None, False
                if system is None:
                    shows = control(self.name, dialogue, run.encoder)
                    limit = Limit(budget=cfg.full_tokens if self.name == "full_context" else None)
                else:
                    # memories that a model writes are that model's
                    writes = self.name not in SYSTEMS or run.about[self.name]["prompt_hashes"]
                    made_by = [run.about[self.name], run.writing(self.name) if writes else None]
                    folder = run.out / "banks" / f"{self.name}-{sha256_json(made_by)[:8]}"
                    bank = held.enter_context(system.open(folder / sha256_json(dialogue.id)[:16], name, run.services))
                    self._ingest(bank, dialogue)
                    report = bank.report()
                    if taught := run.citer != "none" and bank.learns:
                        after = run.out / "learned" / self.name / key[:24]
                        bank = held.enter_context(learning(bank, run.out, self._weights, after))
                bar = held.enter_context(run.meter.bar(f"{self.name} {dialogue.id}: questions", len(questions)))
                for question in questions:
                    stage, query = "retrieve", Query.of(question)
                    retrieve = bank.retrieve if bank is not None else shows(question)
                    rows.append(self._row(question, retrieve))
                    found = retrieve(query, **asdict(limit))
                    shown.append(found.memories)
                    places = None
                    if taught and run.citer == "reader":
                        stage = "answer"
                        readings += run.reader.read_all([(query, found.memories)], chat)
                        places = readings[-1].cited
                    elif taught:
                        found = retrieve(query, cfg.answer_k)
                        places = cited(run.citer, question, found.memories)
                    if bank is not None and places is not None:
                        bank.feedback(found, places)
                    bar.step()
                stage, queries = "answer", list(map(Query.of, questions))
                if run.reads and not readings:
                    readings = run.reader.read_all(list(zip(queries, shown, strict=True)), chat)
                for row, query, memories, reading in zip_longest(rows, queries, shown, readings):
                    row.update(self._read(query, memories, reading, bank))
        except RemindError as error:
            # of all questions or of none
            whole = rows if len(rows) == len(questions) else []
            return {"failed": {"stage": stage, "message": str(error)}, "report": report, "rows": whole}
        return {"failed": None, "report": report, "rows": rows}

    def _ingest(self, bank: Bank, dialogue: Dialogue) -> None:
        """Give the bank what it does not hold yet."""
        told = [session for session in dialogue.sessions if session.turns]
        with self._run.meter.bar(f"{self.name} {dialogue.id}", len(told) + 1) as bar:
            if self._run.writing(self.name) is not None:
                bank.repair()
            for session in told:
                bank.ingest(session)
                bar.step()
            bank.finish()
            bar.step()

    def _row(self, question: Question, retrieve: Retrieve) -> dict[str, Any]:
        """A question and the memories that are found at every k and budget, as JSON."""
        cfg, query = self._run.cfg, Query.of(question)
        self._run.encoder.forget()
        start = time.perf_counter()
        top = retrieve(query, k=max(cfg.k, default=1))
        milliseconds = 1e3 * (time.perf_counter() - start)
        budgets = {str(budget): map(_record, retrieve(query, budget=budget).memories) for budget in cfg.budgets}
        return {
            "question": question.id,
            **{name: getattr(question, name) for name in ("text", "answers", "evidence")},
            "ms": milliseconds,
            "top": list(map(_record, top.memories)),
            "budgets": {budget: list(chosen) for budget, chosen in budgets.items()},
            "shown": [memory.text for memory in top.memories[: cfg.shown]],
            "trace": top.trace,
            "answer": None,
        }

    def _read(
        self, query: Query, memories: Sequence[Memory], reading: Reading | None, bank: Bank | None
    ) -> dict[str, Any]:
        """What a question is answered from as JSON, and the reader's answer."""
        cfg, ordered = self._run.cfg, [memories[place] for place in in_order(memories)]
        known = [memory.sources for memory in ordered]
        sources = None if None in known else list(dict.fromkeys(turn for one in known for turn in one or ()))
        context = {"text": as_turns(ordered), "sources": sources, "tokens": sum(one.tokens for one in ordered)}
        row: dict[str, Any] = {"context": context, "answer": None}
        if reading is not None:
            text = reading.output or f"<answer>{reading.text}</answer><explanation></explanation>"
            places = None if reading.cited is None else sorted(reading.cited)
            row["answer"] = {"text": text, "cited": places, "failed": reading.failure, "tokens": [*reading.tokens]}
        if cfg.judge == "p13n":
            whole = memories if bank is None else _nearest(bank, query, cfg.full_tokens)
            row["remembered"] = ["\n".join(one.dated for one in told) for told in (memories, whole)]
        return row


def control(name: str, dialogue: Dialogue, encoder: SentenceEncoder) -> Callable[[Question], Retrieve]:
    """What a control shows for each question, as much of it as fits: nothing, all turns (the newest first), or gold
    evidence alone.

    Args:
        name: one of `CONTROLS`.
    """
    texts = [turn_lines(turn) for turn in dialogue.turns]
    every = list[Memory]()
    for turn, text, tokens in zip(dialogue.turns, texts, encoder.count_many(texts), strict=True):
        when = turn.time or dialogue.session_of[turn.id].time
        every.append(Memory(turn.id, text, "turn", (turn.id,), when, 0.0, tokens, len(every)))

    def shows(question: Question) -> Retrieve:
        gold = [every[dialogue.positions[turn]] for turn in question.evidence]
        chosen = {"gold": gold, "full_context": every[::-1]}.get(name, [])

        def first(query: Query, k: int | None = None, budget: int | None = None) -> Retrieval:
            spent = list(accumulate(memory.tokens for memory in chosen[:k]))
            return Retrieval(query, tuple(chosen[: len(spent) if budget is None else bisect_right(spent, budget)]))

        return first

    return shows


def _nearest(bank: Bank, query: Query, budget: int) -> Iterator[Memory]:
    """The memories of a bank, nearest first; before them those without vectors: a block that is always shown."""
    places = {number: place for place, (number, _) in enumerate(bank.store.rank(query.text, "dense"))}
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
        output = Generation(answer["text"], prompt, new, finished=True)
    return Context(context["text"], sources, output=output)


def _made(path: Path, key: str) -> dict[str, Any] | None:
    """A unit that is there; one with a failure is made again."""
    if not path.is_file():
        return None
    unit: dict[str, Any] = read_json(path)
    failed = unit["failed"] or any(row["answer"] is not None and row["answer"]["failed"] for row in unit["rows"])
    return None if failed or unit["key"] != key else unit


def _record(memory: Memory) -> list[Any]:
    return [memory.id, memory.sources, memory.tokens, memory.time]
