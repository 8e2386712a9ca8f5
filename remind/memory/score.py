"""Scores of runs of memory systems: evidence recall with its tokens, costs, and paired differences; and their page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from remind.core.errors import DataError
from remind.core.files import read_json, write_json, write_text
from remind.evaluation.compare import Rows
from remind.evaluation.judge import BUCKETS, LABELS, Used, assess, tally
from remind.evaluation.predictions import NO_VERDICT, PREDICTIONS, read_rows
from remind.evaluation.statistics import bootstrap, paired_bootstrap, several
from remind.evaluation.tables import markdown_table
from remind.llm.ledger import percentile
from remind.memory.base import QUESTION_STAGES
from remind.memory.config import ScoreMemoryConfig
from remind.memory.provider import Memories
from remind.memory.systems import COLUMNS, ROWS, TABLE_1, title
from sae import pages
from sae.figures import COLOURS, Picture, new_figure


class Found(NamedTuple):
    """What a system retrieved for a question at one place.

    Attributes:
        recall: share of the gold evidence among the sources of what was retrieved; None: the system cannot tell
            sources.
        tokens: of the texts of the memories.
    """

    dialogue: str
    recall: float | None
    tokens: int


#: ("k" or "tokens", value).
Place = tuple[str, int]
MANIFEST, FORMAT = "manifest.json", 3
#: Questions that the page shows.
_SHOWN = 30


def score_memory(cfg: ScoreMemoryConfig) -> dict[str, Any]:
    """Score every run in a folder and write the scores, as `score_units` gives them, as JSON and as a page.

    Raises:
        DataError: as `read_units`.
    """
    folder = Path(cfg.runs)
    taken, spent = list(_units(folder)), list[Any]()
    units = [unit for _, unit in taken]
    datasets = {(manifest, unit["system"], unit["bank"]): unit["dataset"] for manifest, unit in taken}
    answered, personal = dict[str, Rows](), dict[str, Any]()
    for manifest, listed in _manifests(folder):
        personal |= listed["p13n"]
        # of units that several runs have, those of one
        whose = ((row, (manifest, row["system"], row["dialogue"])) for row in listed["costs"])
        spent += [{**row, "dataset": datasets[key]} for row, key in whose if key in datasets]
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
    draws, scores = (resamples, seed), dict[str, Any](rows=[], paired=[], costs=[], failures=[])
    own: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for unit in sorted(units, key=lambda unit: str(unit["dataset"])):
        own.setdefault((unit["dataset"], unit["system"]), []).append(unit)
        if unit["failed"] is not None:
            where = {name: unit[name] for name in ("dataset", "system", "dialogue")}
            scores["failures"].append({**where, **unit["failed"]})
    found = {named: found_by(members) for named, members in own.items()}
    for (dataset, name), places in found.items():
        scores["rows"] += [_row(dataset, name, place, one, draws) for place, one in places.items()]
        scores["costs"].append(costs(dataset, name, own[dataset, name], spent))
    for one, other in permutations(found, 2):
        for (at, value), questions in found[one].items() if one[0] == other[0] else ():
            if gain := _paired(questions, found[other].get((at, value), {}), draws):
                head = {"dataset": one[0], "system": one[1], "minus": other[1], "at": at, "value": value}
                scores["paired"].append({**head, **gain})
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
        with run.meter.bar(f"{unit['system']} {unit['dialogue']}: personalisation", len(cases)) as bar:
            assessed = assess(model, cases, ids)
            bar.step(len(cases))
        for used, said in zip(cases, assessed, strict=True):
            label = {"p13n": said.label, "bucket": said.bucket, "verdict": not used.wrong}
            labelled.setdefault(unit["system"], []).append((unit["dialogue"], label))
    return {name: tally(rows, seed=seed) for name, rows in labelled.items()}


def score_and_show(cfg: ScoreMemoryConfig) -> None:
    """Score, and print a table for each dataset."""
    scores = score_memory(cfg)
    for dataset, rows in groupby(scores["rows"], key=lambda row: row["dataset"]):
        by_system: dict[str, list[str]] = {}
        heads: dict[str, None] = {}
        for row in rows:
            heads[f"@{row['value']}" if row["at"] == "k" else f"{row['value']} tokens"] = None
            text = "-" if row["recall"] is None else "{recall:.3f} ({tokens:.0f})".format(**row)
            by_system.setdefault(title(row["system"]), []).append(text)
        print(f"{dataset}: evidence recall (tokens)")
        print(markdown_table(["system", *heads], [[name, *texts] for name, texts in by_system.items()]))
    for failure in scores["failures"]:
        print(f"failed: {failure['system']} {failure['dialogue']}, {failure['stage']}: {failure['message']}")
    print(f"scores are in {cfg.out}, the page in {Path(cfg.out).with_suffix('.html')}")


def read_units(folder: Path) -> Iterator[dict[str, Any]]:
    """The units of the run in a folder, or of all runs below it; one that several runs have is given once.

    Raises:
        DataError: no finished run, or a system that two runs gave the same dialogue under other settings.
    """
    return (unit for _, unit in _units(folder))


def _units(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """`read_units` with the manifest of each."""
    keys: dict[tuple[str, str, str], str] = {}
    for manifest, listed in _manifests(folder):
        for name in listed["units"]:
            unit = read_json(manifest.parent / name)
            what = (unit["dataset"], unit["system"], unit["dialogue"])
            if what not in keys:
                yield manifest, unit
            if keys.setdefault(what, unit["key"]) != unit["key"]:
                message = f"another run below {folder} gave {what[1]} the same dialogue under other settings"
                raise DataError(f"{message}; score them separately", manifest.parent, what[2])


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
    """What a system found, by place and question; those without gold evidence take no part, nor LongMemEval's
    abstentions, as in its own retrieval scores."""
    found: dict[Place, dict[str, Found]] = {}
    for unit in units:
        for row in unit["rows"]:
            shown: dict[Place, Sequence[Any]] = {("k", k): row["top"][:k] for k in unit["k"]}
            shown |= {("tokens", int(budget)): memories for budget, memories in row["budgets"].items()}
            for place, memories in shown.items() if row["evidence"] and not row["question"].endswith("_abs") else ():
                recall = evidence_recall(row["evidence"], memories)
                one = Found(unit["dialogue"], recall, sum(tokens for _, _, tokens, _ in memories))
                found.setdefault(place, {})[row["question"]] = one
    return found


def evidence_recall(gold: Sequence[str], memories: Sequence[Sequence[Any]]) -> float | None:
    """Share of the gold turns among the sources of the memories; None where a memory's sources are not known."""
    if any(sources is None for _, sources, *_ in memories):
        return None
    sources = {turn for _, turns, *_ in memories for turn in turns}
    return len(sources & {*gold}) / len({*gold})


def _row(dataset: str, name: str, place: Place, found: Mapping[str, Found], draws: tuple[int, int]) -> dict[str, Any]:
    known = {question: one for question, one in found.items() if one.recall is not None}
    recalls = [one.recall or 0.0 for one in known.values()]
    estimate = bootstrap(recalls, *draws, several([one.dialogue for one in known.values()]))
    return {
        "dataset": dataset,
        "system": name,
        "at": place[0],
        "value": place[1],
        "tokens": float(np.mean([one.tokens for one in found.values()])),
        "recall": estimate and estimate["value"],
        "low": estimate and estimate["low"],
        "high": estimate and estimate["high"],
        "any": float(np.mean([one > 0 for one in recalls])) if recalls else None,
        "all": float(np.mean([one == 1 for one in recalls])) if recalls else None,
        "n": len(recalls),
    }


def _paired(one: Mapping[str, Found], other: Mapping[str, Found], draws: tuple[int, int]) -> dict[str, Any] | None:
    """Mean of one less mean of the other over the questions that both have a recall for; None: there are none."""
    pairs = [(own, other[name]) for name, own in one.items() if name in other]
    both = [(b.recall, a.recall, a.dialogue) for a, b in pairs if a.recall is not None and b.recall is not None]
    first, second, dialogues = ([pair[place] for pair in both] for place in range(3))
    gain = paired_bootstrap(first, second, several(dialogues), *draws)  # type: ignore[arg-type]
    return gain and {"difference": gain["value"], "low": gain["low"], "high": gain["high"]}


def costs(
    dataset: str, name: str, units: Sequence[Mapping[str, Any]], spent: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a system took: sessions, memories, bytes on disk, milliseconds of a retrieval, and what
    chat models were asked: in all for ingest, and per question."""
    times = sorted(row["ms"] for unit in units for row in unit["rows"])
    reports, dialogues = [unit["report"] for unit in units if unit["report"]], {unit["bank"] for unit in units}
    # judging is the benchmark's cost
    own = [row for row in spent if row["system"] == name and row["dialogue"] in dialogues and row["stage"] != "judge"]
    own = [row for row in own if row.get("dataset", dataset) == dataset]
    asking, taking = ([row for row in own if (row["stage"] in QUESTION_STAGES) == of] for of in (True, False))
    fields = ("sessions", "turns", "memories", "bytes")
    return {
        "dataset": dataset,
        "system": name,
        "dialogues": len(units),
        "questions": len(times),
        **{field: sum(report[field] for report in reports) for field in fields},
        "ingest": _spent(taking, 1),
        "question": _spent(asking, max(1, len(times))),
        **{f"p{share}_ms": percentile(times, share) for share in (50, 95)},
        "failed": sum(unit["failed"] is not None for unit in units),
    }


def _spent(rows: Sequence[Mapping[str, Any]], among: int) -> dict[str, float]:
    """Calls, tokens and USD, each divided: also of replies that another system of the run had paid for."""
    names = ("calls", "prompt_tokens", "completion_tokens", "cost_usd")
    sums = {name: sum(row[name] for row in rows) for name in names}
    sums["tokens"], sums["usd"] = sums["prompt_tokens"] + sums["completion_tokens"], sums.pop("cost_usd")
    return {name: value / among for name, value in sums.items()}


def write_page(
    path: str | Path, scores: Mapping[str, Any], units: Sequence[Mapping[str, Any]], answered: Mapping[str, Rows]
) -> None:
    """Write the scores of several runs as a page; arguments as of `section`."""
    body = section(scores, units, answered)
    write_text(path, pages.page("sae.pages", "base.html.j2", title="Memory systems", body=body))


def section(scores: Mapping[str, Any], units: Sequence[Mapping[str, Any]], answered: Mapping[str, Rows]) -> Markup:
    """What an evaluation's page shows of memory systems, as HTML.

    Args:
        scores: as `score_units` returns them.
        units: of the runs, for the questions side by side.
        answered: rows of predictions by system and question.
    """
    sections = []
    for dataset in dict.fromkeys(row["dataset"] for row in scores["rows"]):
        rows = [row for row in scores["rows"] if row["dataset"] == dataset]
        places = list(dict.fromkeys((row["at"], row["value"]) for row in rows))
        systems = list(dict.fromkeys(row["system"] for row in rows))
        at = {(row["system"], row["at"], row["value"]): row for row in rows}
        printed = [(name, row, TABLE_1[row]) for name in map(title, systems) if (row := ROWS.get(name)) is not None]
        sections.append(
            {
                "dataset": dataset,
                "heads": [f"{value:,} tokens" if kind == "tokens" else f"@{value}" for kind, value in places],
                "table": [(title(name), [at.get((name, *place)) for place in places]) for name in systems],
                "drawn": _recall(rows, systems),
                "costs": [{**r, "system": title(r["system"])} for r in scores["costs"] if r["dataset"] == dataset],
                "columns": COLUMNS,
                "paper": printed,
                "questions": _side_by_side([unit for unit in units if unit["dataset"] == dataset], answered),
            }
        )
    return pages.section(
        "remind.memory",
        "report.html.j2",
        sections=sections,
        personal=("p13n", *LABELS),
        stages=BUCKETS,
        **{key: scores[key] for key in ("p13n", "failures", "notes")},
    )


def _recall(rows: Sequence[Mapping[str, Any]], systems: Sequence[str]) -> Markup:
    """The recall of each system with its interval over the tokens that it took, as a plot."""
    figure = new_figure(4.8, 4.6)
    axes = figure.subplots()
    for number, name in enumerate(systems):
        known = [row for row in rows if row["system"] == name and row["recall"] is not None]
        if points := sorted((row["tokens"], row["recall"], row["low"], row["high"]) for row in known):
            tokens, recall, low, high = zip(*points, strict=True)
            # seven colours that show on light and on dark, then another marker
            colour, marker = COLOURS[number % 7], "osv^Dx"[number // 7 % 6]
            axes.plot(tokens, recall, color=colour, marker=marker, markersize=4, linewidth=1.2, label=title(name))
            axes.vlines(tokens, low, high, color=colour, linewidth=0.6)
    axes.set_xscale("log", subs=(2, 5))
    axes.xaxis.set(major_formatter="{x:,.0f}", minor_formatter="{x:,.0f}")
    axes.set(ylim=(0, 1.02), xlabel="tokens of what was retrieved", ylabel="evidence recall")
    figure.legend(frameon=False, fontsize=8, ncols=3, loc="outside lower left")
    return Markup(Picture(figure).svg())


def _side_by_side(units: Sequence[Mapping[str, Any]], answered: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """Questions with what each system showed first; those come first on which the systems differ most."""
    by_question: dict[str, dict[str, Any]] = {}
    for unit in units:
        for row in unit["rows"]:
            entry = by_question.setdefault(row["question"], {"row": row, "dialogue": unit["dialogue"], "systems": []})
            answer = answered.get(unit["system"], {}).get(row["question"])
            if not row["shown"] and answer is None:
                continue
            memories = [
                {"text": text, "gold": bool({*row["evidence"]} & {*(sources or ())}), "time": when}
                for text, (_, sources, _, when) in zip(row["shown"], row["top"], strict=False)
            ]
            hits = sum(memory["gold"] for memory in memories)
            entry["systems"].append({"name": unit["system"], "memories": memories, "hits": hits, "answer": answer})
    return sorted(by_question.values(), key=lambda one: -len({system["hits"] for system in one["systems"]}))[:_SHOWN]
