"""Memory systems in evaluations: `evaluate`, its command, and `run-memory`, which measures recall and costs besides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from remind.core.errors import ConfigError
from remind.core.files import input_hashes, read_json, sha256_json, write_json, write_rows
from remind.data.dialogue import Corpus, note_ids, spread
from remind.data.readers import format_of, read, stream
from remind.evaluation.answerers import answerer_of
from remind.evaluation.compare import load_run
from remind.evaluation.config import CONDITIONS, SETS, EvaluateConfig
from remind.evaluation.contexts import Asked, Stream, asked_of, provider_name
from remind.evaluation.predictions import MEMORY
from remind.evaluation.run import Result, run_evaluation
from remind.evaluation.tables import table
from remind.llm.endpoints import LLMConfig
from remind.memory.config import CONTROLS, RunMemoryConfig
from remind.memory.provider import Memories
from remind.memory.score import FORMAT, MANIFEST, personalisation, read_answers, score_units, section
from remind.memory.systems import SYSTEMS
from remind.perception.auxiliary import AuxiliaryLLM
from remind.states.dataset import States, question_splits

#: LongMemEval's file of a system's answers.
HYPOTHESES = "hypotheses.jsonl"


def evaluate(
    answerer: Any,
    data: States | Corpus,
    contexts: Sequence[Any] = ("x0",),
    judge: AuxiliaryLLM | None = None,
    *,
    out: str | Path | None = None,
    corpus: Corpus | str | Path | None = None,
    processing_class: Any = None,
    **settings: Any,
) -> Result:
    """Answer questions from contexts, judge the answers, and report.

    Args:
        answerer: a model's name, folder (with adapters or without) or hub id; a Hugging Face model; a chat model; any
            `Answerer`. None: nobody answers, so that contexts alone are measured.
        data: a states folder or dataset, filtered and mapped as one likes; or dialogues with questions.
        contexts: names of conditions and memory systems, memory systems of one's own, and other providers: objects with
            a method `context(question, dialogue)` that returns a `remind.evaluation.contexts.Context`.
        judge: of direct answers; None: as the setting `judge` says, by default a rule.
        out: folder of the run, in which it can be resumed; None: a temporary one.
        corpus: the dialogues of the states, or their file, for contexts that are made from these.
        processing_class: tokenizer or processor of a model that is given itself.
        settings: further fields of `EvaluateConfig`.

    Returns:
        The report, `table()` and `save(folder)`.

    Raises:
        As `run_evaluation`, and ConfigError for an unknown setting or context.
    """
    known = {one.name for one in fields(EvaluateConfig)} - {"states", "model", "out", "conditions", "level", "corpus"}
    if unknown := sorted(set(settings) - known):
        raise ConfigError(f"evaluate has no setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    own = {provider_name(one): one for one in contexts if not isinstance(one, str)}
    if answerer is None:
        settings["answers"] = "none"
    held = None if out is not None else TemporaryDirectory(prefix="remind-evaluation-")
    cfg = EvaluateConfig(
        states=str(data) if isinstance(data, str | Path) else "",
        model=str(answerer) if isinstance(answerer, str | Path) else "none",
        out=str(out) if held is None else str(Path(held.name) / "run"),
        conditions=[one if isinstance(one, str) else provider_name(one) for one in contexts],
        **settings,
    )
    if isinstance(corpus, str | Path):
        corpus = read(corpus, cfg.corpus_format)
    answers = answerer_of(answerer, processing_class, cfg)
    if answers is not None:
        cfg.model = str(answers.about["name"])
    given = None if cfg.states else data
    report = _evaluate(cfg, own, judge=judge, answerer=answers, data=given, corpus=corpus)
    return Result(report, Path(cfg.out), held)


def _evaluate(cfg: EvaluateConfig, own: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """An evaluation in which conditions may be memory systems; what these found stands in the report, too."""
    systems = {name: one for name, one in own.items() if hasattr(one, "open")}
    names = [name for name in cfg.names if name in systems or (name in SYSTEMS and name not in (*CONDITIONS, *own))]
    if unknown := [name for name in cfg.names if name not in (*CONDITIONS, *SYSTEMS, *own)]:
        there = ", ".join((*CONDITIONS, *SETS, *SYSTEMS))
        raise ConfigError(f"no context {unknown[0]!r}; there are {there}")
    if not names:
        return run_evaluation(cfg, providers=own, **given)
    context = cfg.context
    settings = RunMemoryConfig(
        list(cfg.corpus),
        cfg.out,
        names,
        cfg.options,
        k=[context.memories],
        budgets=[] if context.memory_tokens is None else [context.memory_tokens],
        answer_k=context.memories,
        budget_tokens=context.memory_tokens,
        encoder=cfg.encoder,
        llm=cfg.llm,
    )
    with ExitStack() as held:
        run = Memories(settings, Path(cfg.out) / MEMORY, held, reads=False, own=systems)
        return run_evaluation(cfg, providers={**own, **run.providers()}, more=_adding(run), **given)


def evaluate_and_show(cfg: EvaluateConfig) -> None:
    """Evaluate, then the tables and where the results are."""
    report = _evaluate(cfg, {})
    if report and "dry_run" not in report:
        print(table(report))
        print(f"report: {Path(cfg.out) / 'report.html'}")


def _adding(run: Memories) -> Callable[[dict[str, Any]], str]:
    """What adds the recall and costs of memory systems to a report, and their section to its page."""

    def more(report: dict[str, Any]) -> str:
        units = [read_json(run.out / path) for path in dict.fromkeys(run.units)]
        answered = {name: read_answers(run.out.parent, name) for name in {unit["system"] for unit in units}}
        seed = report["config"]["seed"]
        personal = personalisation(run, units, answered, seed)
        report["memory"] = score_units(units, run.costs(), seed=seed) | {"p13n": personal}
        return section(report["memory"], units, answered)

    return more


def run_memory(cfg: RunMemoryConfig) -> Path:
    """Give every dialogue to every system and ask it every question about it; see `RunMemoryConfig`.

    Questions reach a system without their gold.

    Returns:
        The folder of the run.

    Raises:
        ConfigError: an unknown system or option, no questions, or another process at work in the folder.
        DataError: an input that cannot be used.
    """
    if cfg.llm.dry_run is not None:
        # banks would remember stand-ins
        with TemporaryDirectory() as folder:
            _measure(replace(cfg, out=str(Path(folder) / "out")))
        return Path(cfg.llm.dry_run)
    _measure(cfg)
    return Path(cfg.out)


def hypotheses(rows: Iterable[Mapping[str, Any]], judge: str | None = None) -> list[dict[str, Any]]:
    """LongMemEval's rows `{question_id, hypothesis}`; failed questions have none, since saying nothing is no answer.

    Args:
        judge: whose verdicts the rows have, which then stand under `autoeval_label`.
    """
    written = []
    for row in rows:
        if row.get("failure") is None and row.get("left_out") is None:
            said = None if row["accuracy"] is None else bool(row["accuracy"])
            label = {} if judge is None else {"autoeval_label": {"model": judge, "label": said}}
            written.append({"question_id": row["question_id"], "hypothesis": row["answer"], **label})
    return written


def _measure(cfg: RunMemoryConfig) -> None:
    out = Path(cfg.out)
    if cfg.export == "official" and (
        other := [one for one in cfg.inputs if format_of(one, cfg.format) != "longmemeval"]
    ):
        raise ConfigError(f"export official writes LongMemEval's file; {other[0]} is in another format")
    with ExitStack() as held:
        run = Memories(cfg, out / MEMORY, held)
        reader = cfg.llm.endpoint("answer")
        judge = "offline" if cfg.llm.dry_run else "llm" if cfg.judge == "p13n" else cfg.judge
        asked = EvaluateConfig(
            states="",
            model=reader.identity if run.reads and reader is not None else "none",
            out=cfg.out,
            conditions=[*CONTROLS, *cfg.systems],
            answers="none",
            judge=judge,
            llm=LLMConfig() if judge == "offline" else replace(cfg.llm, dry_run=None),
            encoder=cfg.encoder,
        )
        key = sha256_json([input_hashes(cfg.inputs), cfg.split, cfg.limit])
        total = sum(len(one.records) for one in _tasks(cfg, {}))
        data = Stream(lambda: _tasks(cfg, run.datasets), key, total)
        report = run_evaluation(asked, data=data, providers=run.providers(CONTROLS), more=_adding(run))
        for told in (*run.notes, *([run.meter.table()] if run.costs() else [])):
            print(told)
        listed = {
            "units": [f"{MEMORY}/{path}" for path in dict.fromkeys(run.units)],
            "costs": run.costs(),
            "notes": run.notes,
        }
        for name in asked.names if cfg.export == "official" else ():
            by = report["identity"]["judge"] if judge == "longmemeval" else None
            write_rows(out / name / HYPOTHESES, hypotheses(load_run(out / name).rows.values(), by))
        about = {"format": FORMAT, "config": {**asdict(cfg), "llm": None}, "systems": run.about}
        write_json(out / MANIFEST, {**about, **listed, "p13n": report["memory"]["p13n"]})


def _tasks(cfg: RunMemoryConfig, datasets: dict[str, str]) -> Iterator[Asked]:
    """Dialogues with their questions, one in memory at a time; notes the dataset of each."""
    first: dict[tuple[str, str], str | Path] = {}
    splits = None if cfg.states is None else question_splits(cfg.states)
    for path in cfg.inputs:
        dataset, count = format_of(path, cfg.format), 0
        for piece in stream(path, cfg.format):
            note_ids(piece, path, first)
            for dialogue, every in piece.by_dialogue():
                own = {one.id: one.split if splits is None else splits.get(one.id, "") for one in every}
                if cfg.split is not None and None in own.values():
                    raise ConfigError(
                        f"split: a question of {dialogue.id!r} has none; set states to a folder that defines it"
                    )
                questions = [one for one in every if cfg.split in (None, own[one.id])]
                if questions and count != cfg.dialogues:
                    count += 1
                    datasets[dialogue.id] = dataset
                    yield asked_of(dialogue, spread(questions, cfg.limit))
