"""What the answers show: scores by arm and category, paired differences clustered by dialogue, tables and plots."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.chain.config import ARMS, PROBES, RIVALS, ChainConfig
from experiments.proof.statistics import estimate
from remind.alignment.metrics import METRICS, read_metrics
from remind.core.errors import ConfigError
from remind.core.files import write_json, write_rows, write_text
from remind.evaluation.statistics import Estimate
from remind.evaluation.tables import markdown_table, percent
from remind.states.records import StateRecord
from sae.figures import COLOURS, Picture, new_figure

Row = Mapping[str, Any]
#: Arm, variant, level.
Cell = tuple[str, str, str]
#: What arms are compared by: value_of, and how probable the gold answer was.
_MEASURES = ("score", "log_probability")
#: Taken from predictions.jsonl as they are.
_KEPT = (
    *("locomo_f1", "memory_recall_text", "evidence_recall"),
    *("finished", "failure", "score_failure", "prompt_tokens", "new_tokens"),
)


def value_of(row: Row) -> float | None:
    """The score of an answer: LoCoMo's F1 where the question has a category, F1 of other free answers, accuracy of
    options (Eq. 8: an answer that names none is wrong). None for questions that were never answered."""
    measures = ("locomo_f1", "f1") if row.get("f1") is not None else ("accuracy",)
    return next((row[name] for name in measures if row.get(name) is not None), None)


def outcome(row: Row, record: StateRecord) -> dict[str, Any]:
    """What runs.jsonl keeps of an answer: numbers, and no words of the dialogue.

    Args:
        row: of predictions.jsonl.
        record: the question that was asked.
    """
    lines = zip(record.evidence, record.evidence_lines, strict=False)
    held = {line for turn, line in lines if turn in row["evidence_shown"]}
    return {
        "question_id": record.question_id,
        "dialogue_id": record.dialogue_id,
        "category": record.category,
        "score": value_of(row),
        **{name: row.get(name) for name in _KEPT},
        # that of free answers is the judge's
        "accuracy": row.get("accuracy") if record.options else None,
        # share of the gold lines in the prompt
        "quoted": len(held & set(row.get("evidence", []))) / len(held) if held and not record.visual else None,
        "malformed": bool(row.get("problems")),
    }


class Comparison:
    """Answers of all arms, paired by question and seed.

    Args:
        rows: of runs.jsonl.
    """

    def __init__(self, rows: Iterable[Row], resamples: int) -> None:
        self.resamples = resamples
        self.cells: dict[Cell, dict[int | None, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
        for row in rows:
            cell = (row["arm"], row["variant"], row["level"])
            self.cells[cell][row["seed"]][row["question_id"]] = row

    def rows(self, cell: Cell) -> list[Row]:
        return [row for answers in self.cells[cell].values() for row in answers.values()]

    def mean(
        self,
        cell: Cell,
        name: str = "score",
        which: Callable[[Row], bool] = lambda _: True,
        less: Cell | None = None,
    ) -> Estimate | None:
        """Mean of a measure over questions, with its interval over seeds and dialogues together.

        Args:
            which: the rows that take part.
            less: the cell whose measure is subtracted, on the questions and seeds that both have.

        Returns:
            None where nothing takes part.
        """
        runs = [self.cells[one] for one in (cell, less) if one is not None]
        # the untrained model has no seed: it stands beside each
        seeded = [run.keys() for run in runs if None not in run]
        seeds = list(set.intersection(*map(set, seeded))) if seeded else [None]
        # a seed of which folds are missing would take them from all others
        most = [max(map(len, run.values())) for run in runs]
        seeds = [
            s for s in seeds if all(len(run.get(s, run.get(None, ()))) == n for run, n in zip(runs, most, strict=True))
        ] or seeds
        answers = [[run[None] if None in run else run[seed] for seed in seeds] for run in runs]
        taking = [
            {key for key, row in one.items() if row.get(name) is not None and which(row)}
            for run in answers
            for one in run
        ]
        questions = sorted(set.intersection(*taking)) if taking else []
        if not questions:
            return None
        values = [np.array([[float(one[key][name]) for key in questions] for one in run]) for run in answers]
        dialogues = [answers[0][0][key]["dialogue_id"] for key in questions]
        return estimate(values[0] - values[1] if less else values[0], dialogues, self.resamples)


def report(cfg: ChainConfig) -> list[Path]:
    """Write runs.jsonl, result.json, table.md and the plots, of all answers there are in the folder.

    Raises:
        ConfigError: there are none yet.
    """
    out = Path(cfg.out)
    files = sorted(out.glob("fold-*/*/*/answers/*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    if not rows:
        raise ConfigError(f"{out} holds no answers yet: run with --stage run first")
    result = summarise(Comparison(rows, cfg.resamples)) | {"traces": traces(out, cfg)}
    paths = [out / name for name in ("runs.jsonl", "result.json", "table.md", "steps.png")]
    write_rows(paths[0], rows)
    write_json(paths[1], result)
    write_text(paths[2], render(result))
    _plot(result["traces"]).save(paths[3])
    return paths


def summarise(answers: Comparison) -> dict[str, Any]:
    """The figures by arm under x0, and of higher states."""
    arms = {arm: cell for arm in ARMS if (cell := (arm, "built", "x0")) in answers.cells}
    probes = [("built", "oracle"), *((variant, level) for variant, levels in PROBES.items() for level in levels)]
    result: dict[str, Any] = {"arms": {}, "probes": []}
    for arm, cell in arms.items():
        rows = answers.rows(cell)
        result["arms"][arm] = {
            "questions": len({row["question_id"] for row in rows}),
            "dialogues": len({row["dialogue_id"] for row in rows}),
            "seeds": sorted({row["seed"] for row in rows} - {None}),
            **{name: answers.mean(cell, name) for name in (*_MEASURES, "locomo_f1", "accuracy", "quoted")},
            "by_category": {
                name: answers.mean(cell, "locomo_f1", lambda row, name=name: row["category"] == name)  # type: ignore[misc]
                for name in sorted({row["category"] for row in rows} - {None})
            },
            "answers": len(rows),
            "cut off": sum(not row["finished"] for row in rows),
            "malformed": sum(row["malformed"] for row in rows),
            "failed": sum(row["failure"] is not None for row in rows),
            "against": {
                rival: {name: answers.mean(cell, name, less=arms[rival]) for name in _MEASURES}
                for rival in RIVALS
                if rival in arms.keys() - {arm}
            },
        }
        for variant, level in probes:
            if (probe := (arm, variant, level)) in answers.cells:
                about = {"arm": arm, "state": "gold evidence alone" if level == "oracle" else f"{variant} {level}"}
                figures = {"score": answers.mean(probe), "gain": answers.mean(probe, less=cell)}
                figures["log_probability"] = answers.mean(probe, "log_probability", less=cell)
                # where x0 holds no gold evidence, no mark can help
                held = answers.mean(probe, which=lambda row: bool(row["evidence_recall"]), less=cell)
                result["probes"].append({**about, **figures, "gain_held": held})
    return result


def traces(out: Path, cfg: ChainConfig) -> dict[str, list[list[float]]]:
    """Steps and mean log p of the gold answers to dev questions by arm, over folds and seeds.

    What starts from SFT begins where it ends.
    """
    found: dict[str, dict[int, list[float]]] = {arm: defaultdict(list) for arm in ARMS}
    for path in sorted(out.glob(f"fold-*/seed-*/*/train/{METRICS}")):
        for row in read_metrics(path.parent):
            if row["kind"] == "probe":
                found[path.parents[1].name][row["step"]].append(row["log_probability"])
    ends = {arm: max(steps, default=0) for arm, steps in found.items()}
    begins = {arm: ends.get(cfg.begins(arm) or "", 0) for arm in found}
    return {
        arm: [[begins[arm] + step, float(np.mean(some))] for step, some in sorted(steps.items())]
        for arm, steps in found.items()
        if steps
    }


def render(result: Mapping[str, Any]) -> str:
    """The text of table.md."""
    arms = result["arms"]
    first = next(iter(arms.values()))
    rivals = [rival for rival in RIVALS if rival in arms]
    categories = sorted({name for row in arms.values() for name in row["by_category"]})
    figures, differences = [], []
    for arm, row in arms.items():
        means = [row["by_category"].get(name) for name in categories] + [row["accuracy"], row["quoted"]]
        counts = [row[name] for name in ("answers", "cut off", "malformed", "failed")]
        likely = _nats(row["log_probability"], signed=False)
        figures.append([ARMS[arm].title, percent(row["score"], interval=True), likely, *map(percent, means), *counts])
        compared = [row["against"].get(rival, {}) for rival in rivals]
        points = [percent(one.get("score"), interval=True, signed=True) for one in compared]
        differences.append([ARMS[arm].title, *points, *(_nats(one.get("log_probability")) for one in compared)])
    probes = [
        [ARMS[row["arm"]].title, row["state"], percent(row["score"], interval=True)]
        + [percent(row[name], interval=True, signed=True) for name in ("gain", "gain_held")]
        + [_nats(row["log_probability"])]
        for row in result["probes"]
    ]
    heads = ["arm", "score", "log p", *(f"F1 cat. {name}" for name in categories), "accuracy", "evidence quoted"]
    parts = [
        "# The chain on real dialogues",
        f"{first['questions']} questions of {first['dialogues']} dialogues that no arm was trained on; in %, seeds: "
        f"{max(len(row['seeds']) for row in arms.values())}. Brackets: 95 % intervals over seeds and dialogues. Score: "
        "LoCoMo's F1, or accuracy where there are options. Log p: of the gold answer's tokens, mean in nats.",
        "## From x0",
        markdown_table([*heads, "answers", "cut off", "malformed", "failed"], figures),
        "## Paired differences, in points and in nats",
        markdown_table(
            ["arm", *(f"− {rival}" for rival in rivals), *(f"log p − {rival}" for rival in rivals)], differences
        ),
        "## What the higher states give",
        markdown_table(["model", "state", "score", "− x0", "− x0 where it holds evidence", "log p − x0"], probes),
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _nats(estimate: Mapping[str, Any] | None, signed: bool = True) -> str:
    if estimate is None:
        return "–"
    sign = "+" if signed else ""
    text = f"{estimate['value']:{sign}.3f}"
    return f"{text} [{estimate['low']:{sign}.3f}, {estimate['high']:{sign}.3f}]" if signed else text


def _plot(curves: Mapping[str, Sequence[Sequence[float]]]) -> Picture:
    """A curve for each arm, of points (steps, log p)."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for number, (arm, points) in enumerate(curves.items()):
        steps, values = zip(*points, strict=True)
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(steps, values, "o-", color=colour, markersize=4, label=ARMS[arm].title)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("log p of the gold answer from x0, nats a token")
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(frameon=False, fontsize=8)
    return Picture(figure)
