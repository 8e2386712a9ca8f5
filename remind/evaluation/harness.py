"""Answer every question of a split under each condition, judge the answers, write the report."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import ConfigError
from remind.core.files import write_json, write_text
from remind.evaluation.answerers import Silent, model_hash
from remind.evaluation.beside import differences, reference
from remind.evaluation.config import ContextConfig, EvaluateConfig
from remind.evaluation.identity import answer_identity, machine, score_identity, states_hash, versions
from remind.evaluation.items import Item, load_items
from remind.evaluation.parts import Parts
from remind.evaluation.predictions import RunFolder
from remind.evaluation.report import table, write_report
from remind.evaluation.stages import Answers, Part, answer_stage, judge_stage, read_answers, score_stage
from remind.evaluation.verdicts import Verdicts
from remind.states import prompts
from remind.states.parquet import read_manifest

if TYPE_CHECKING:
    from remind.evaluation.answerers import Answerer
    from remind.llm.request import ChatModel
    from remind.states.auxiliary import AuxiliaryLLM

__all__ = [
    "ContextConfig",
    "EvaluateConfig",
    "Item",
    "evaluate",
    "evaluate_and_show",
    "load_items",
    "model_hash",
    "states_hash",
]


def evaluate(
    cfg: EvaluateConfig,
    judge: AuxiliaryLLM | None = None,
    llm: AuxiliaryLLM | None = None,
    chat: ChatModel | None = None,
    answerer: Answerer | None = None,
) -> dict[str, Any]:
    """Run the stages that `cfg.stage` names; see `EvaluateConfig`.

    Args:
        judge: any backend, in place of the one `cfg.judge` names.
        llm: writes the summaries of the altered order, in place of what `cfg.llm.summary` names.
        chat: answers, in place of `cfg.llm.answer`, where `cfg.answers` is server.
        answerer: answers, in place of both.

    Returns:
        What report.json holds: counts, `overall`, `by_format`, `by_dimension`, `by_category` (rows of `summarise`) of
        the first condition, the same of each under `conditions`, `differences`, identity, versions. After stage answer
        or judge alone: by condition how many questions there are, and how many failed. After a dry run: `dry_run`, what
        would have been asked.

    Raises:
        DataError, FormatError: states, dialogue files or earlier rows that cannot be used.
        ModelError: a model or judge that cannot be loaded or run, or does not generate.
        ConfigError: an unknown judge or condition, or an `out` that holds something else.
    """
    manifest = read_manifest(cfg.states)
    if cfg.llm.dry_run is not None:
        silent = Silent() if cfg.answers == "local" else None
        return _rehearse(cfg, manifest, Parts(cfg, manifest, judge, llm, chat, answerer or silent))
    return _evaluate(cfg, manifest, Parts(cfg, manifest, judge, llm, chat, answerer))


def _evaluate(cfg: EvaluateConfig, manifest: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    asked = parts.asked()
    parts.load()
    states = states_hash(cfg.states)
    runs = _claim(cfg, parts, states)

    answers: dict[str, Answers] = {}
    for name in cfg.names:
        if parts.answering:
            answers[name] = answer_stage(asked.records, asked.prompts[name], parts.answerer, runs[name])
        else:
            answers[name] = read_answers(asked.records, runs[name])
    if cfg.stage == "answer":
        return {name: _told(found) for name, found in answers.items()}
    verdicts = {name: judge_stage(asked.records, found, runs[name], parts.judge) for name, found in answers.items()}
    if cfg.stage == "judge":
        return {name: {**_told(answers[name]), **_ruled(found)} for name, found in verdicts.items()}
    scored = {
        name: score_stage(asked.records, answers[name], verdicts[name], runs[name], parts.encoder, cfg)
        for name in cfg.names
    }
    return _report(cfg, parts, manifest, runs, scored, verdicts)


def _rehearse(cfg: EvaluateConfig, manifest: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """A dry run: what would be asked is noted, and nothing that it makes stays."""
    with tempfile.TemporaryDirectory(prefix="remind-dry-") as folder:
        out = Path(folder) / "out"
        if not parts.answering and Path(cfg.out).is_dir():
            shutil.copytree(cfg.out, out)
        _evaluate(replace(cfg, out=str(out)), manifest, parts)
    assert parts.chats.dry is not None
    print(parts.chats.dry.report())
    return {"dry_run": parts.chats.dry.summary()}


def evaluate_and_show(cfg: EvaluateConfig) -> None:
    """`evaluate`, then the tables and where the results are."""
    found = evaluate(cfg)
    if "dry_run" in found:
        return
    if cfg.stage in ("answer", "judge"):
        for name, row in found.items():
            print(", ".join([name, *(f"{value} {key}" for key, value in row.items())]))
        print(f"answers: {cfg.out}" if cfg.stage == "answer" else f"verdicts: {cfg.out}")
        return
    print(table(found))
    print(f"report: {Path(cfg.out) / 'report.html'}")


def folder_of(cfg: EvaluateConfig, name: str) -> Path:
    """Where a condition's artifacts lie: in `out` itself where it is the only one."""
    return Path(cfg.out) if len(cfg.names) == 1 else Path(cfg.out) / name


def _claim(cfg: EvaluateConfig, parts: Parts, states: str) -> dict[str, RunFolder]:
    """The folder of every condition, checked before anything is written to any of them."""
    if len(cfg.names) > 1:
        shared = {"states": states, "split": cfg.split, "limit": cfg.limit, "conditions": "a folder each"}
        if parts.answering:
            RunFolder(cfg.out, shared, cfg.overwrite)
        else:
            RunFolder.reopen(cfg.out, shared)
    runs = {}
    for name in cfg.names:
        identity = answer_identity(cfg, name, states, parts.known)
        if parts.answering:
            runs[name] = RunFolder(folder_of(cfg, name), identity, cfg.overwrite)
        else:
            runs[name] = RunFolder.reopen(folder_of(cfg, name), identity)
    import yaml

    write_text(Path(cfg.out) / "config.yaml", yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True))
    return runs


def _told(answers: Answers) -> dict[str, int]:
    left_out = sum(item.left_out is not None for item in answers.predictions)
    failed = sum(item.output.failure is not None for item in answers.predictions)
    return {"questions": len(answers.predictions), "left out": left_out, "failed": failed, "resumed": answers.resumed}


def _ruled(verdicts: Verdicts) -> dict[str, int]:
    judged = [ruling for ruling in verdicts.rulings if ruling is not None]
    return {"judged": len(judged), "without a verdict": sum(ruling.value is None for ruling in judged)}


def _report(
    cfg: EvaluateConfig,
    parts: Parts,
    manifest: Mapping[str, Any],
    runs: Mapping[str, RunFolder],
    scored: Mapping[str, Part],
    verdicts: Mapping[str, Verdicts],
) -> dict[str, Any]:
    started = time.perf_counter()
    judges = {name: found.judge for name, found in verdicts.items()}
    if len(named := {judge for judge in judges.values() if judge != "none"}) > 1:
        raise ConfigError(f"the conditions were judged by {', '.join(sorted(named))}; run stage judge for all of them")
    judged = named.pop() if named else (parts.judge.name if parts.judge is not None else "none")
    base = reference(cfg.names)
    about = {
        "format": "remind-evaluation-report",
        "config": asdict(cfg),
        "model": parts.about(),
        "states": {
            key: manifest.get(key) for key in ("inputs", "config_hash", "prompts", "llm", "grounding_tokenizer")
        },
        "prompts": prompts.fingerprints(),
        "machine": machine(cfg.device),
        "versions": versions(),
        "costs": parts.costs(),
        "stood_in": parts.stood_in(),
    }
    single = {
        name: {
            **about,
            "identity": score_identity(cfg, runs[name].identity, judged),
            "config": {**asdict(cfg), "level": name},
            **part.section,
        }
        for name, part in scored.items()
    }
    if len(scored) > 1:
        for name in scored:
            write_json(runs[name].folder / "report.json", single[name])
    report = {
        **single[base],
        "reference": base,
        "conditions": {name: part.section for name, part in scored.items()},
        "differences": differences({name: part.scores for name, part in scored.items()}, base, cfg.bootstrap, cfg.seed),
    }
    report["seconds"] = {**report["seconds"], "comparing": time.perf_counter() - started}
    write_report(cfg.out, report, scored[base].scores, failed={name: part.scores for name, part in scored.items()})
    return report
