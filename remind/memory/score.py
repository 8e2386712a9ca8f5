"""Scores of runs of memory systems: evidence recall with its tokens, answers, costs, and paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations
from pathlib import Path
from typing import Any

import numpy as np

from remind.core.errors import DataError
from remind.core.files import read_json, write_json
from remind.evaluation import metrics
from remind.evaluation.intervals import bootstrap, paired_bootstrap, several
from remind.evaluation.personalisation import tally
from remind.llm.ledger import percentile
from remind.memory.config import ScoreMemoryConfig
from remind.memory.page import write_page
from remind.memory.run import MANIFEST


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
#: Of answers.
MEASURES = ("f1", "accuracy")


def score_memory(cfg: ScoreMemoryConfig) -> dict[str, Any]:
    """Score every run in a folder and write the scores as JSON and as a page.

    `rows`: for each dataset, system and place the mean evidence recall over questions with gold evidence, with the
    tokens it took, a 95 % interval over resampled dialogues, and the shares of questions with any and with all of their
    evidence. `paired`: the same of the differences between systems, over the questions both were asked. `answers`,
    `paired_answers`: F1 and accuracy. `costs`, `failures`: see `costs`. `notes`: what must be said beside the figures.

    Raises:
        DataError: as `read_units`.
    """
    units = list(read_units(Path(cfg.runs)))
    spent = list(read_costs(Path(cfg.runs)))
    names = ("rows", "paired", "answers", "paired_answers", "costs", "failures")
    scores: dict[str, Any] = {name: [] for name in names}
    by_dataset = sorted(units, key=lambda unit: unit["dataset"])
    for dataset, group in groupby(by_dataset, key=lambda unit: unit["dataset"]):
        members = list(group)
        systems = list(dict.fromkeys(unit["system"] for unit in members))
        found = {name: found_by([unit for unit in members if unit["system"] == name]) for name in systems}
        scores["rows"] += [row for name in systems for row in _rows(dataset, name, found[name], cfg)]
        recalls = {
            name: {place: _known(questions) for place, questions in places.items()} for name, places in found.items()
        }
        answered = {}
        for name in systems:
            own = [unit for unit in members if unit["system"] == name]
            scores["answers"] += answers(dataset, name, own, cfg)
            scores["costs"].append(costs(dataset, name, own, spent))
            answered[name] = {measure: _answered(own, measure) for measure in MEASURES}
        for one, other in permutations(systems, 2):
            head = {"dataset": dataset, "system": one, "minus": other}
            for at, value in recalls[one]:
                if gain := _paired(recalls[one][at, value], recalls[other].get((at, value), {}), cfg):
                    scores["paired"].append({**head, "at": at, "value": value, **gain})
            for measure in MEASURES:
                if gain := _paired(answered[one][measure], answered[other][measure], cfg):
                    scores["paired_answers"].append({**head, "measure": measure, **gain})
        scores["failures"] += [
            {"dataset": dataset, "system": unit["system"], "dialogue": unit["dialogue"], **unit["failed"]}
            for unit in members
            if unit["failed"] is not None
        ]
    scores["notes"] = list(dict.fromkeys(note for unit in units for note in unit["notes"]))
    write_json(cfg.out, scores)
    write_page(Path(cfg.out).with_suffix(".html"), scores, units)
    return scores


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
        if not isinstance(listed, dict) or not {"units", "costs"} <= listed.keys():
            raise DataError("is not a manifest of memory systems", path)
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


def _rows(dataset: str, name: str, found: Mapping[Place, Mapping[str, Found]], cfg: ScoreMemoryConfig) -> Iterator[Any]:
    for (at, value), questions in found.items():
        known = [one.recall for one in questions.values() if one.recall is not None]
        clusters = several([one.dialogue for one in questions.values() if one.recall is not None])
        estimate = bootstrap(known, cfg.resamples, cfg.seed, clusters)
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


def _paired(one: Scored, other: Scored, cfg: ScoreMemoryConfig) -> dict[str, Any] | None:
    """Mean of one less mean of the other over the questions that both have a score for; None: there are none."""
    both = [name for name in one if name in other]
    clusters = several([one[name][1] for name in both])
    first, second = [other[name][0] for name in both], [one[name][0] for name in both]
    gain = paired_bootstrap(first, second, clusters, cfg.resamples, cfg.seed)
    return gain and {"difference": gain["value"], "low": gain["low"], "high": gain["high"]}


def answers(
    dataset: str, name: str, units: Sequence[Mapping[str, Any]], cfg: ScoreMemoryConfig
) -> Iterator[dict[str, Any]]:
    """Scores of a system's answers over all questions, then by category; nothing where none were asked for.

    An answer that did not come takes no part; `failed` counts those.
    """
    asked = [(unit["dialogue"], row) for unit in units for row in unit["rows"] if row["answer"] is not None]
    for category in [None, *sorted({str(row["category"]) for _, row in asked if row["category"] is not None})]:
        chosen = [(d, row) for d, row in asked if category in (None, str(row["category"]))]
        came = [(d, row) for d, row in chosen if row["answer"]["failed"] is None]
        if not came:
            continue
        scored = [(dialogue, answer_scores(row)) for dialogue, row in came]
        measures = {}
        for measure in MEASURES:
            values = [(value, dialogue) for dialogue, one in scored if (value := one[measure]) is not None]
            clusters = several([dialogue for _, dialogue in values])
            measures[measure] = bootstrap([value for value, _ in values], cfg.resamples, cfg.seed, clusters)
        yield {
            "dataset": dataset,
            "system": name,
            "category": category,
            "n": len(came),
            "failed": len(chosen) - len(came),
            "tokens": float(np.mean([row["answer"]["tokens"] for _, row in came])),
            "measures": measures,
            "p13n": tally([(dialogue, row["answer"]) for dialogue, row in came], cfg.resamples, cfg.seed),
        }


def _answered(units: Sequence[Mapping[str, Any]], measure: str) -> Scored:
    """Scores of the answers that came."""
    return {
        row["question"]: (score, unit["dialogue"])
        for unit in units
        for row in unit["rows"]
        if row["answer"] is not None and row["answer"]["failed"] is None
        if (score := answer_scores(row)[measure]) is not None
    }


def _known(questions: Mapping[str, Found]) -> Scored:
    return {name: (one.recall, one.dialogue) for name, one in questions.items() if one.recall is not None}


def answer_scores(row: Mapping[str, Any]) -> dict[str, float | None]:
    """F1 of a direct answer, LoCoMo's own where the question has a category of LoCoMo's, and accuracy (Eq. 9): the
    judge's verdict, or whether exactly the right options were chosen."""
    said, gold = row["answer"], row["answers"]
    if row["format"] != "direct":
        return {"f1": None, "accuracy": metrics.accuracy({*said["letters"]}, {*gold}) if gold else None}
    f1 = None
    if gold and row["dimension"] is None and str(row["category"]) in {"1", "2", "3", "4", "5"}:
        f1 = max(metrics.locomo_f1(said["text"], one, int(row["category"])) for one in gold)
    elif gold:
        f1 = metrics.token_f1(said["text"], gold)
    return {"f1": f1, "accuracy": None if said["verdict"] is None else float(said["verdict"])}


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
