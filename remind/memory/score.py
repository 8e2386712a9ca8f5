"""Scores of runs of memory systems: evidence recall with its tokens, costs, and paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations
from pathlib import Path
from typing import Any

import numpy as np

from remind.core.errors import DataError
from remind.core.files import read_json, write_json
from remind.evaluation.compare import Rows
from remind.evaluation.personalisation import Used, assess, tally
from remind.evaluation.predictions import NO_VERDICT, PREDICTIONS, read_rows
from remind.evaluation.statistics import bootstrap, paired_bootstrap, several
from remind.llm.ledger import percentile
from remind.memory.config import ScoreMemoryConfig
from remind.memory.page import write_page
from remind.memory.provider import Memories


@dataclass(frozen=True)
class Found:
    """What a system retrieved for a question at one place.

    Attributes:
        recall: share of the gold evidence among the sources of what was retrieved; None: the system cannot tell
            sources.
        tokens: of the texts of the memories.
    """

    dialogue: str
    recall: float | None
    tokens: int


#: Stages of chat models that belong to a question; the others belong to ingest.
QUESTION_STAGES = ("strategy", "time_range", "note", "read", "profile", "answer")
#: ("k" or "tokens", value).
Place = tuple[str, int]
#: Score and dialogue by question.
Scored = Mapping[str, tuple[float, str]]
MANIFEST, FORMAT = "manifest.json", 3


def score_memory(cfg: ScoreMemoryConfig) -> dict[str, Any]:
    """Score every run in a folder and write the scores, as `score_units` gives them, as JSON and as a page.

    Raises:
        DataError: as `read_units`.
    """
    folder = Path(cfg.runs)
    units, spent = list(read_units(folder)), list(read_costs(folder))
    answered: dict[str, Rows] = {}
    personal: dict[str, Any] = {}
    for manifest, listed in _manifests(folder):
        personal |= listed["p13n"]
        for name in {unit["system"] for unit in units}:
            answered[name] = {**answered.get(name, {}), **read_answers(manifest.parent, name)}
    scores = score_units(units, spent, cfg.resamples, cfg.seed) | {"p13n": personal}
    write_json(cfg.out, scores)
    write_page(Path(cfg.out).with_suffix(".html"), scores, units, answered)
    return scores


def score_units(
    units: Sequence[Mapping[str, Any]],
    spent: Sequence[Mapping[str, Any]],
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Scores of what systems remembered, found and cost.

    Args:
        spent: what chat models were asked, by system, dialogue and stage.

    Returns:
        `rows`: for each dataset, system and place the mean evidence recall over questions with gold evidence, with the
        tokens it took, a 95 % interval over resampled dialogues, and the shares of questions with any and with all of
        their evidence. `paired`: the same of the differences between systems, over the questions both were asked.
        `costs`, `failures`: see `costs`. `notes`: what must be said beside the figures.
    """
    names = ("rows", "paired", "costs", "failures")
    scores: dict[str, Any] = {name: [] for name in names}
    draws = (resamples, seed)
    by_dataset = sorted(units, key=lambda unit: unit["dataset"])
    for dataset, group in groupby(by_dataset, key=lambda unit: unit["dataset"]):
        members = list(group)
        systems = list(dict.fromkeys(unit["system"] for unit in members))
        own = {name: [unit for unit in members if unit["system"] == name] for name in systems}
        found = {name: found_by(own[name]) for name in systems}
        scores["rows"] += [row for name in systems for row in _rows(dataset, name, found[name], draws)]
        recalls = {
            name: {place: _known(questions) for place, questions in places.items()} for name, places in found.items()
        }
        scores["costs"] += [costs(dataset, name, own[name], spent) for name in systems]
        for one, other in permutations(systems, 2):
            head = {"dataset": dataset, "system": one, "minus": other}
            for at, value in recalls[one]:
                if gain := _paired(recalls[one][at, value], recalls[other].get((at, value), {}), draws):
                    scores["paired"].append({**head, "at": at, "value": value, **gain})
        scores["failures"] += [
            {"dataset": dataset, "system": unit["system"], "dialogue": unit["dialogue"], **unit["failed"]}
            for unit in members
            if unit["failed"] is not None
        ]
    scores["notes"] = list(dict.fromkeys(note for unit in units for note in unit["notes"]))
    return scores


def read_answers(folder: Path, name: str) -> Rows:
    """The predictions of a system by question; none where nothing was answered."""
    rows = read_rows(folder / name / PREDICTIONS, "an output")
    return {row["question_id"]: row for _, row in rows if row.get("failure") not in NO_VERDICT}


def personalisation(
    run: Memories, units: Sequence[Mapping[str, Any]], answered: Mapping[str, Rows], seed: int = 0
) -> dict[str, Any]:
    """How direct answers use what is remembered, by system, as `tally` says; empty where no judge is asked that.

    Args:
        answered: rows of predictions by system and question.
    """
    labelled: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for unit in units if run.cfg.judge == "p13n" and not run.cfg.llm.dry_run else ():
        cases, ids = [], []
        for row in unit["rows"]:
            one = answered[unit["system"]].get(row["question"])
            if one is not None and one["format"] == "direct" and row["answers"]:
                wrong, (profile, held) = one["accuracy"] == 0.0, row["remembered"]
                cases.append(Used(row["text"], tuple(row["answers"]), one["answer"], profile, held, wrong))
                ids.append(row["question"])
        model = run.meter.chat(unit["system"], unit["bank"], "judge")
        assert model is not None
        for used, said in zip(cases, assess(model, cases, ids), strict=True):
            label = {"p13n": said.label, "bucket": said.bucket, "verdict": not used.wrong}
            labelled.setdefault(unit["system"], []).append((unit["dialogue"], label))
    return {name: tally(rows, seed=seed) for name, rows in labelled.items()}


def score_and_show(cfg: ScoreMemoryConfig) -> None:
    """Score, and print a table for each dataset."""
    scores = score_memory(cfg)
    for dataset, rows in groupby(scores["rows"], key=lambda row: row["dataset"]):
        by_system = {name: list(group) for name, group in groupby(rows, key=lambda row: row["system"])}
        places = [(row["at"], row["value"]) for row in next(iter(by_system.values()))]
        heads = "".join(f"{f'@{value}' if at == 'k' else f'{value} tokens':>19}" for at, value in places)
        print(f"{dataset}: evidence recall (tokens)\n{'':<16}{heads}")
        for name, cells in by_system.items():
            texts = ["-" if row["recall"] is None else "{recall:.3f} ({tokens:.0f})".format(**row) for row in cells]
            print(f"{name:<16}" + "".join(f"{text:>19}" for text in texts))
    for failure in scores["failures"]:
        print(f"failed: {failure['system']} {failure['dialogue']}, {failure['stage']}: {failure['message']}")
    print(f"scores are in {cfg.out}, the page in {Path(cfg.out).with_suffix('.html')}")


def read_units(folder: Path) -> Iterator[dict[str, Any]]:
    """The units of the run in a folder, or of all runs below it; one that several runs have is given once.

    Raises:
        DataError: no finished run, or a system that two runs gave the same dialogue under other settings.
    """
    keys: dict[tuple[str, str, str], str] = {}
    for manifest, listed in _manifests(folder):
        for name in listed["units"]:
            unit = read_json(manifest.parent / name)
            what = (unit["dataset"], unit["system"], unit["dialogue"])
            if what not in keys:
                yield unit
            if keys.setdefault(what, unit["key"]) != unit["key"]:
                message = f"another run below {folder} gave {what[1]} the same dialogue under other settings"
                raise DataError(f"{message}; score them separately", manifest.parent, what[2])


def read_costs(folder: Path) -> Iterator[dict[str, Any]]:
    """What chat models were asked in those runs and what it cost, by system, dialogue and stage."""
    for _, listed in _manifests(folder):
        yield from listed["costs"]


def _manifests(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    paths = [folder / MANIFEST] if (folder / MANIFEST).is_file() else sorted(folder.glob(f"*/{MANIFEST}"))
    if not paths:
        raise DataError("holds no finished run of memory systems; run `remind run-memory` to its end", folder)
    for path in paths:
        listed = read_json(path)
        if not isinstance(listed, dict) or listed.get("format") != FORMAT:
            raise DataError("is no manifest of memory systems, or of another version; run `remind run-memory`", path)
        yield path, listed


def found_by(units: Sequence[Mapping[str, Any]]) -> dict[Place, dict[str, Found]]:
    """What a system found, by place and question; questions without gold evidence take no part."""
    found: dict[Place, dict[str, Found]] = {}
    for unit in units:
        for row in unit["rows"]:
            if not row["evidence"]:
                continue
            ks = unit["k"]
            places: Iterable[tuple[Place, Sequence[Any]]] = [(("k", k), row["top"][:k]) for k in ks]
            places = [*places, *((("tokens", int(budget)), shown) for budget, shown in row["budgets"].items())]
            for place, memories in places:
                result = Found(
                    unit["dialogue"], evidence_recall(row["evidence"], memories), sum(m[2] for m in memories)
                )
                found.setdefault(place, {})[row["question"]] = result
    return found


def evidence_recall(gold: Sequence[str], memories: Sequence[Sequence[Any]]) -> float | None:
    """Share of the gold turns among the sources of the memories; None where a memory's sources are not known."""
    if any(sources is None for _, sources, *_ in memories):
        return None
    sources = {turn for _, turns, *_ in memories for turn in turns}
    return len(sources & {*gold}) / len({*gold})


def _rows(dataset: str, name: str, found: Mapping[Place, Mapping[str, Found]], draws: tuple[int, int]) -> Iterator[Any]:
    for (at, value), questions in found.items():
        known = [one.recall for one in questions.values() if one.recall is not None]
        clusters = several([one.dialogue for one in questions.values() if one.recall is not None])
        estimate = bootstrap(known, *draws, clusters)
        yield {
            "dataset": dataset,
            "system": name,
            "at": at,
            "value": value,
            "tokens": float(np.mean([one.tokens for one in questions.values()])),
            "recall": estimate and estimate["value"],
            "low": estimate and estimate["low"],
            "high": estimate and estimate["high"],
            "any": float(np.mean([one > 0 for one in known])) if known else None,
            "all": float(np.mean([one == 1 for one in known])) if known else None,
            "n": len(known),
        }


def _paired(one: Scored, other: Scored, draws: tuple[int, int]) -> dict[str, Any] | None:
    """Mean of one less mean of the other over the questions that both have a score for; None: there are none."""
    both = [name for name in one if name in other]
    clusters = several([one[name][1] for name in both])
    first, second = [other[name][0] for name in both], [one[name][0] for name in both]
    gain = paired_bootstrap(first, second, clusters, *draws)
    return gain and {"difference": gain["value"], "low": gain["low"], "high": gain["high"]}


def _known(questions: Mapping[str, Found]) -> Scored:
    return {name: (one.recall, one.dialogue) for name, one in questions.items() if one.recall is not None}


def costs(
    dataset: str, name: str, units: Sequence[Mapping[str, Any]], spent: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a system took: sessions, memories, bytes on disk, seconds of ingest, milliseconds of a retrieval, and what
    chat models were asked: in all for ingest, and per question."""
    times = sorted(row["ms"] for unit in units for row in unit["rows"])
    reports = [unit["report"] for unit in units if unit["report"]]
    fields = ("sessions", "turns", "memories", "bytes", "ingest_seconds")
    sums = {field: sum(report[field] for report in reports) for field in fields}
    dialogues = {unit["bank"] for unit in units}
    # judging is the benchmark's cost
    own = [row for row in spent if row["system"] == name and row["dialogue"] in dialogues and row["stage"] != "judge"]
    asking = [row for row in own if row["stage"] in QUESTION_STAGES]
    return {
        "dataset": dataset,
        "system": name,
        "dialogues": len(units),
        "questions": len(times),
        **sums,
        "ingest": _spent([row for row in own if row["stage"] not in QUESTION_STAGES], 1),
        "question": _spent(asking, max(1, len(times))),
        "p50_ms": percentile(times, 50),
        "p95_ms": percentile(times, 95),
        "failed": sum(unit["failed"] is not None for unit in units),
    }


def _spent(rows: Sequence[Mapping[str, Any]], among: int) -> dict[str, float]:
    """Calls, tokens and USD, each divided: also of replies that another system of the run had paid for."""
    names = ("calls", "prompt_tokens", "completion_tokens", "cost_usd")
    sums = {name: sum(row[name] for row in rows) for name in names}
    sums["tokens"], sums["usd"] = sums["prompt_tokens"] + sums["completion_tokens"], sums.pop("cost_usd")
    return {name: value / among for name, value in sums.items()}
