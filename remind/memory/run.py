"""Running memory systems over dialogues: ingest, retrieve, answer; resumable by session and by reply."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from remind.core.errors import ConfigError, DataError, RemindError
from remind.core.files import Cache, read_json, sha256_json, sweep, write_json
from remind.core.progress import ProgressBar
from remind.core.run_folder import RunFolder
from remind.data.dialogue import Dialogue, Question, note_ids, spread
from remind.data.readers import format_of, stream
from remind.evaluation.judge import load_judge
from remind.llm.auxiliary import AuxiliaryLLM, ChatLLM
from remind.llm.request import Stage
from remind.memory.answering import put_answers, put_personalisation, who, write_answers
from remind.memory.base import Bank, Memory, MemorySystem, Query, Retrieval, Services
from remind.memory.citers import CiterName, tell, warning
from remind.memory.config import CONTROLS, RunMemoryConfig
from remind.memory.learning import courses, learning
from remind.memory.meter import Meter
from remind.memory.readers import Answers, ChatReader, Reading
from remind.memory.rows import control, row_of
from remind.memory.systems import SYSTEMS, make_system
from remind.models.encoder import SentenceEncoder
from remind.states.dataset import question_splits
from remind.states.pyramid import turn_text

MANIFEST = "manifest.json"
_FORMAT = 2
#: One of each endpoint that has a part in a unit.
_STAGES: tuple[Stage, ...] = ("extract", "answer", "judge")
#: Settings that have no part in what a unit holds.
_ELSEWHERE = ("input", "out", "systems", "options", "format", "split", "states", "limit", "dialogues", "llm")


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


def run_memory(cfg: RunMemoryConfig) -> Path:
    """Give every dialogue to every system and ask it every question about it.

    What a unit, a system with a dialogue, found and cost is one file; a unit that is there is not made again. Questions
    reach a system without their gold.

    Returns:
        The folder of the run.

    Raises:
        ConfigError: an unknown system or option, no questions, or another process at work in the folder.
        DataError: an input that cannot be used.
    """
    if cfg.llm.dry_run is not None:
        # banks would remember stand-ins
        with TemporaryDirectory() as folder:
            _measure(replace(cfg, out=folder))
        return Path(cfg.llm.dry_run)
    with RunFolder(cfg.out).held():
        for place in [*Path(cfg.out).glob("**/")]:
            sweep(place)
        _measure(cfg)
    return Path(cfg.out)


def _measure(cfg: RunMemoryConfig) -> None:
    out = Path(cfg.out)
    with ExitStack() as held:
        run = _Run(cfg, out, held)
        # before hours of work: packages that are missing
        about = {name: chosen.about() for name, chosen in run.systems.items()}
        units = [unit for dataset, dialogue, questions in _tasks(cfg) for unit in run.all(dataset, dialogue, questions)]
        if not units:
            raise ConfigError(f"{', '.join(cfg.inputs)}: holds no questions that would be asked")
        write_answers(out, units)
        spent = run.meter.ledger.groups("system", "dialogue", "stage")
        for told in (*run.notes, *([run.meter.table()] if spent else [])):
            print(told)
        manifest = {"format": _FORMAT, "config": {**asdict(cfg), "llm": None}, "systems": about}
        write_json(out / MANIFEST, {**manifest, "units": units, "costs": spent})
        for course in run.courses.values():
            course.publish()


def _tasks(cfg: RunMemoryConfig) -> Iterator[tuple[str, Dialogue, list[Question]]]:
    """Name of the dataset, dialogue and questions, one dialogue in memory at a time."""
    first: dict[tuple[str, str], str | Path] = {}
    splits = None if cfg.states is None else question_splits(cfg.states)
    for path in cfg.inputs:
        dataset, count = format_of(path, cfg.format), 0
        for piece in stream(path, cfg.format):
            note_ids(piece, path, first)
            for dialogue, every in piece.by_dialogue():
                questions = [question for question in every if _is_asked(question, cfg.split, splits)]
                if questions and count != cfg.dialogues:
                    count += 1
                    yield dataset, dialogue, spread(questions, cfg.limit)


def _is_asked(question: Question, split: str | None, splits: Mapping[str, str] | None) -> bool:
    own = question.split if splits is None else splits.get(question.id, "")
    if split is not None and own is None:
        raise ConfigError(f"split: question {question.id!r} has none; set states to a folder that defines it")
    return split in (None, own)


class _Run:
    def __init__(self, cfg: RunMemoryConfig, out: Path, held: ExitStack) -> None:
        self.cfg, self.out = cfg, out
        self.systems = {name: make_system(name, _options(cfg, name)) for name in cfg.systems}
        self.encoder = CachedEncoder(cfg.encoder, Cache(out / "cache"))
        self.meter = held.enter_context(Meter(cfg.llm, out / "costs.jsonl"))
        self._writing = cfg.llm.endpoint("extract")
        self.services = Services(self.encoder, self.meter.chat, None if self._writing is None else self.meter.url)
        self.reader = ChatReader(cfg.reader)
        # opened before anything is done, so that a missing key is reported at once
        _, self._answers = (self.meter.chat("", "", stage) is not None for stage in _STAGES[:2])
        if cfg.judge in ("llm", "p13n") and self.meter.chat("", "", "judge") is None:
            where = "name one: --llm.judge.base_url or --llm.default.base_url"
            raise ConfigError(f"judge {cfg.judge} needs an endpoint; {where}")
        reads = cfg.reader == "cite" and self._answers
        # nothing can be learned from stand-ins
        self.citer: CiterName = "none" if cfg.llm.dry_run or (cfg.citer == "reader" and not reads) else cfg.citer
        self.courses = courses(self.systems, self.citer, out / "learned", self.encoder)
        self.notes = list(filter(None, [warning(self.citer), *who(cfg)]))

    def all(self, dataset: str, dialogue: Dialogue, questions: Sequence[Question]) -> Iterator[str]:
        """Every unit of a dialogue, as the name of its file in the folder."""
        names = [*CONTROLS, *self.systems]
        with ProgressBar(f"{dataset} {dialogue.id}", len(names)) as bar:
            for name in names:
                yield self._unit(name, dataset, dialogue, questions)
                bar.step()

    def _unit(self, name: str, dataset: str, dialogue: Dialogue, questions: Sequence[Question]) -> str:
        chosen = self.systems.get(name)
        about = None if chosen is None else chosen.about()
        settings = {k: v for k, v in asdict(self.cfg).items() if k not in _ELSEWHERE} | {"citer": self.citer}
        said = [[s.id, s.time, [[t.id, t.speaker, turn_text(t), t.time] for t in s.turns]] for s in dialogue.sessions]
        models = [one and one.identity for one in map(self.cfg.llm.endpoint, _STAGES)]
        asked = [asdict(question) for question in questions]
        begins = [] if (course := self.courses.get(name)) is None else [course.begins]
        key = sha256_json([_FORMAT, about, models, settings, dataset, dialogue.id, said, asked, *begins])
        path = f"units/{name}/{key[:24]}.json"
        if not self._made(self.out / path, key):
            if chosen is None:
                measured = self._control(name, dialogue, questions)
            else:
                measured = self._ask(name, chosen, dialogue, questions, key)
            about_it = {"dataset": dataset, "system": name, "dialogue": dialogue.id, "bank": _bank_name(dialogue)}
            write_json(self.out / path, {"key": key, **about_it, "k": self.cfg.k, "notes": self.notes, **measured})
        if course is not None:
            course.advance(key)
        return path

    def _made(self, path: Path, key: str) -> bool:
        """Whether a unit is there, whole; one with a failure is made again."""
        try:
            unit = read_json(path)
            kinds = ("failed", "verdict_failed", "p13n_failed")
            failed = any(row["answer"] is not None and any(map(row["answer"].get, kinds)) for row in unit["rows"])
            return bool(unit["key"] == key and unit["failed"] is None and not failed)
        except (DataError, KeyError, TypeError):
            return False

    def _ask(
        self, name: str, chosen: MemorySystem, dialogue: Dialogue, questions: Sequence[Question], key: str
    ) -> dict[str, Any]:
        # memories that a model writes are that model's
        writer = self._writing.identity if self._writing is not None and SYSTEMS[name].stages else None
        made_by = sha256_json([chosen.about(), writer])[:8]
        folder = self.out / "banks" / f"{name}-{made_by}" / sha256_json(dialogue.id)[:16]
        stage, report, failed = "ingest", {}, None
        budget = self.cfg.budget_tokens
        k = None if budget else self.cfg.answer_k
        rows: list[dict[str, Any]] = []
        shown, readings = list[tuple[Memory, ...]](), list[Reading]()
        try:
            with chosen.open(folder, _bank_name(dialogue), self.services) as made:
                self._ingest(made, dialogue)
                report = {**made.report(), "ingest_seconds": sum(_seconds(folder).values())}
                with learning(self.citer, made, self.out, self.courses.get(name), key) as bank:
                    for question in questions:
                        stage, query = "retrieve", Query.of(question)
                        rows.append(row_of(question, bank.retrieve, self.cfg, self.encoder))
                        reads = not isinstance(bank, Answers)
                        found = bank.retrieve(query, k=k, budget=budget) if reads else Retrieval((), "")
                        shown.append(found.memories)
                        tell(self.citer, bank, question, self.cfg.answer_k)
                        if self.citer == "reader" and bank.learns:
                            stage = "answer"
                            reading = self.reader.read(query, found.memories, bank.chat)
                            readings.append(reading)
                            if reading.cited is not None:
                                bank.feedback(found.token, reading.cited)
                    stage = "answer"
                    if isinstance(bank, Answers) and self._answers:
                        own = [bank.answer(Query.of(question)) for question in questions]
                        readings = [Reading(one.text, one.cited, one.usage, one.failure) for one in own]
                        shown = [one.retrieval.memories for one in own]
                    self._read(name, dialogue, questions, rows, shown, readings, bank)
        except RemindError as error:
            failed = {"stage": stage, "message": str(error)}
            # of all questions or of none
            rows = rows if len(rows) == len(questions) else []
        return {"failed": failed, "report": report, "rows": rows}

    def _ingest(self, bank: Bank, dialogue: Dialogue) -> None:
        """Sessions that the bank does not hold yet, and what each took, in a file beside the bank."""
        if self._writing is not None:
            bank.repair()
        seconds = _seconds(bank.folder)

        def clock() -> float:
            # vectors from the cache count as if they were computed now
            return time.perf_counter() + self.encoder.saved

        for session in dialogue.sessions:
            start = clock()
            if session.turns and not bank.ingest(session).known:
                seconds[session.id] = clock() - start
                write_json(_beside(bank.folder), seconds)
        start = clock()
        bank.finish()
        if "" not in seconds:
            seconds[""] = clock() - start
            write_json(_beside(bank.folder), seconds)

    def _control(self, name: str, dialogue: Dialogue, questions: Sequence[Question]) -> dict[str, Any]:
        rows, shown = [], []
        shows = control(name, dialogue, self.encoder)
        limit = self.cfg.full_tokens if name == "full_context" else None
        for question in questions:
            retrieve = shows(question)
            rows.append(row_of(question, retrieve, self.cfg, self.encoder))
            shown.append(retrieve(Query.of(question), budget=limit).memories)
        self._read(name, dialogue, questions, rows, shown)
        return {"failed": None, "report": {}, "rows": rows}

    def _read(
        self,
        name: str,
        dialogue: Dialogue,
        questions: Sequence[Question],
        rows: list[dict[str, Any]],
        shown: Sequence[Sequence[Memory]],
        readings: Sequence[Reading] = (),
        bank: Bank | None = None,
    ) -> None:
        """Answer every question from its memories, or as was read already, and judge the answers."""
        if not self._answers:
            return
        chat = partial(self.meter.chat, name, _bank_name(dialogue))
        if not readings:
            tasks = [(Query.of(question), memories) for question, memories in zip(questions, shown, strict=True)]
            readings = self.reader.read_all(tasks, chat)
        tokens = [sum(memory.tokens for memory in memories) for memories in shown]
        put_answers(rows, questions, readings, tokens, self._judge(name, dialogue))
        if self.cfg.judge == "p13n" and (model := chat("judge")) is not None:
            put_personalisation(rows, questions, shown, bank, self.cfg.full_tokens, model)

    def _judge(self, name: str, dialogue: Dialogue) -> AuxiliaryLLM | None:
        if self.cfg.judge in ("none", "offline"):
            return None if self.cfg.judge == "none" else load_judge(self.cfg.judge)
        model = self.meter.chat(name, _bank_name(dialogue), "judge")
        assert model is not None
        return ChatLLM({"judge": model})


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
