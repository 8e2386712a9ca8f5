"""What the answers show: scores by arm and category, paired differences clustered by dialogue, tables and plots."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.chain.arms import ARMS, PROBES, RIVALS
from experiments.chain.config import ChainConfig
from experiments.proof.statistics import estimate
from remind.alignment.metrics import METRICS, read_metrics
from remind.core.errors import ConfigError
from remind.core.files import write_json, write_rows, write_text
from remind.evaluation.intervals import Estimate
from remind.evaluation.tables import percent
from remind.states.records import StateRecord
from sae.figures import COLOURS, Picture, new_figure

Row = Mapping[str, Any]
#: Arm, variant, level, cap of retrieval.
Cell = tuple[str, str, str, int | None]
_KEPT = ("locomo_f1", "f1", "accuracy", "memory_recall_text", "evidence_recall", "finished", "failure")
_KEPT += ("score_failure", "prompt_tokens", "new_tokens")


def value_of(row: Row) -> float | None:
    """The score of an answer: LoCoMo's F1 where the question has a category, F1 of other free answers, accuracy of
    options; None where there is none."""
    options = row.get("accuracy") if row.get("f1") is None else None
    return next((row[name] for name in ("locomo_f1", "f1") if row.get(name) is not None), options)


def outcome(row: Row, record: StateRecord) -> dict[str, Any]:
    """What runs.jsonl keeps of an answer: numbers, and no words of the dialogue.

    Args:
        row: of predictions.jsonl.
        record: the question that was asked.
    """
    held = {line for turn, line in zip(record.evidence, record.evidence_lines, strict=False)
            if turn in row["evidence_shown"]}  # fmt: skip
    said, shown = row.get("evidence", []), {line.strip() for line in record.x0.text.splitlines()}
    return {
        "question_id": record.question_id,
        "dialogue_id": record.dialogue_id,
        "category": record.category,
        "format": record.format,
        "score": value_of(row),
        **{name: row.get(name) for name in _KEPT},
        # of the gold lines in the prompt, and of the lines that the answer quotes
        "quoted": len(held & set(said)) / len(held) if held and not record.visual else None,
        "invented": sum(line not in shown | held for line in said) / len(said) if said else None,
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
            cell = (row["arm"], row["variant"], row["level"], row["cap"])
            self.cells[cell][row["seed"]][row["question_id"]] = row

    def mean(self, cell: Cell, name: str = "score", which: Callable[[Row], bool] | None = None) -> Estimate | None:
        """Mean of a measure over questions, seeds and dialogues together; None where nothing takes part."""
        return self._estimate([cell], name, lambda values: values[0], which)

    def difference(self, cell: Cell, rival: Cell, name: str = "score") -> Estimate | None:
        """Mean of cell less rival, on the questions and seeds that both have."""
        return self._estimate([cell, rival], name, lambda values: values[0] - values[1], None)

    def rows(self, cell: Cell) -> list[Row]:
        return [row for answers in self.cells.get(cell, {}).values() for row in answers.values()]

    def _estimate(
        self, cells: Sequence[Cell], name: str, combine: Callable[[Any], Any], which: Callable[[Row], bool] | None
    ) -> Estimate | None:
        runs = [self.cells.get(cell, {}) for cell in cells]
        seeded = [{seed for seed in run if seed is not None} for run in runs]
        # the untrained model has no seed: it stands beside each
        seeds = sorted(set.intersection(*(some for some in seeded if some)) if any(seeded) else ()) or [None]
        answers = [[run.get(seed, run.get(None, {})) for seed in seeds] for run in runs]
        common = set.intersection(*(
            {key for key, row in one.items() if row[name] is not None and (which is None or which(row))}
            for run in answers for one in run
        ))  # fmt: skip
        if not common:
            return None
        questions = sorted(common)
        values = [np.array([[float(one[key][name]) for key in questions] for one in run]) for run in answers]
        return estimate(combine(values), [answers[0][0][key]["dialogue_id"] for key in questions], self.resamples)


def read_runs(out: Path) -> list[Row]:
    """The answers of all runs that are there."""
    paths = sorted(out.glob("fold-*/*/*/answers/*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def report(cfg: ChainConfig) -> list[Path]:
    """Write runs.jsonl, result.json, table.md and the plots, of all answers there are in the folder.

    Raises:
        ConfigError: there are none yet.
    """
    out = Path(cfg.out)
    rows = read_runs(out)
    if not rows:
        raise ConfigError(f"{out} holds no answers yet: run with --stage run first")
    result = summarise(Comparison(rows, cfg.resamples)) | {"traces": traces(out)}
    paths = [out / name for name in ("runs.jsonl", "result.json", "table.md", "steps.png", "contexts.png")]
    write_rows(paths[0], rows)
    write_json(paths[1], result)
    write_text(paths[2], render(result))
    _plot_steps(result).save(paths[3])
    _plot_contexts(result).save(paths[4])
    return paths


def summarise(answers: Comparison) -> dict[str, Any]:
    """The figures by arm under x0, by higher state of the arms that were asked for it, and by cap of retrieval."""
    arms = [arm for arm in ARMS if (arm, "built", "x0", None) in answers.cells]
    result: dict[str, Any] = {"arms": {}, "probes": {}, "contexts": []}
    for arm in arms:
        cell = (arm, "built", "x0", None)
        rows = answers.rows(cell)
        categories = sorted({row["category"] for row in rows if row["category"] is not None})
        result["arms"][arm] = {
            "questions": len({row["question_id"] for row in rows}),
            "dialogues": len({row["dialogue_id"] for row in rows}),
            "seeds": sorted({row["seed"] for row in rows} - {None}),
            "score": answers.mean(cell),
            **{name: answers.mean(cell, name) for name in ("locomo_f1", "accuracy", "quoted", "invented")},
            "by_category": {
                name: answers.mean(cell, "locomo_f1", lambda row, name=name: row["category"] == name)  # type: ignore[misc]
                for name in categories
            },
            "answers": len(rows),
            "cut_off": sum(not row["finished"] for row in rows),
            "malformed": sum(row["malformed"] for row in rows),
            "failures": dict(Counter(row["failure"] or row["score_failure"] for row in rows
                                     if row["failure"] or row["score_failure"])),
            "against": {rival: answers.difference(cell, (rival, "built", "x0", None))
                        for rival in RIVALS if rival in arms and rival != arm},
        }  # fmt: skip
        asked = [("built", "oracle"), *((variant, level) for variant, levels in PROBES.items() for level in levels)]
        result["probes"][arm] = {
            f"{variant} {level}": {
                "score": answers.mean((arm, variant, level, None)),
                "gain": answers.difference((arm, variant, level, None), cell),
                # where x0 holds no gold evidence no mark can help
                "held": answers.mean((arm, variant, level, None), "score", lambda row: bool(row["evidence_recall"])),
            }
            for variant, level in asked
            if (arm, variant, level, None) in answers.cells
        }
    for arm, variant, level, cap in answers.cells:
        if level == "x0" and variant == "built":
            cell = (arm, variant, level, cap)
            tokens = np.mean([row["prompt_tokens"] for row in answers.rows(cell)])
            result["contexts"].append({"arm": arm, "cap": cap, "tokens": float(tokens), "score": answers.mean(cell)})
    return result


def traces(out: Path) -> dict[str, list[list[float]]]:
    """Steps and mean score of dev questions by arm, over folds and seeds."""
    found: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for path in sorted(out.glob(f"fold-*/seed-*/*/train/{METRICS}")):
        # a run that was resumed may have measured a step twice
        own = {row["step"]: row["score"] for row in read_metrics(path.parent) if row["kind"] == "answers"}
        for step, value in own.items():
            if value is not None:
                found[path.parents[1].name].setdefault(step, []).append(value)
    return {arm: [[step, float(np.mean(some))] for step, some in sorted(steps.items())] for arm, steps in found.items()}


def render(result: Mapping[str, Any]) -> str:
    """The text of table.md."""
    arms = result["arms"]
    first = next(iter(arms.values()))
    rivals = [rival for rival in RIVALS if any(rival in row["against"] for row in arms.values())]
    categories = sorted({name for row in arms.values() for name in row["by_category"]})
    heads = ["arm", "seeds", "score", *(f"F1 cat. {name}" for name in categories), "accuracy", "quoted", "invented"]
    lines = []
    for arm, row in arms.items():
        figures = [percent(row["by_category"].get(name)) for name in categories]
        figures += [percent(row[name]) for name in ("accuracy", "quoted", "invented")]
        counts = [f"{row[name]} of {row['answers']}" for name in ("cut_off", "malformed")]
        failed = str(sum(row["failures"].values()))
        seeds = str(len(row["seeds"]) or "–")
        lines.append([ARMS[arm].title, seeds, percent(row["score"], interval=True), *figures, *counts, failed])
    differences = [
        [ARMS[arm].title, *(percent(row["against"].get(rival), interval=True, signed=True) for rival in rivals)]
        for arm, row in arms.items()
        if ARMS[arm].trained
    ]
    probes = [
        [ARMS[arm].title, "gold evidence alone" if name.endswith("oracle") else name,
         percent(row["score"], interval=True), percent(row["gain"], interval=True, signed=True), percent(row["held"])]
        for arm, probed in result["probes"].items()
        for name, row in probed.items()
    ]  # fmt: skip
    parts = [
        "# The chain on real dialogues",
        f"{first['questions']} questions of {first['dialogues']} dialogues that no arm was trained on; in %. "
        "Brackets: 95 % intervals over seeds and dialogues together. Score: LoCoMo's F1, or accuracy where there are "
        "options. quoted: share of the gold lines in the prompt that the answer quotes; invented: share of its quotes "
        "that are no line of the prompt.",
        "## From x0",
        _markdown([*heads, "cut off", "malformed", "failed"], lines),
        "## Paired differences, in points",
        _markdown(["arm", *(f"− {rival}" for rival in rivals)], differences),
    ]
    if probes:
        heads = ["model", "state", "score", "− x0", "where x0 holds evidence"]
        parts += ["## What the higher states give", _markdown(heads, probes)]
    return "\n\n".join(parts) + "\n"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)])


def _plot_steps(result: Mapping[str, Any]) -> Picture:
    """Score on dev questions over steps; arms that start from SFT begin where it ends."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    ends = {arm: points[-1][0] for arm, points in result["traces"].items()}
    for number, (arm, points) in enumerate(
        sorted(result["traces"].items(), key=lambda item: list(ARMS).index(item[0]))
    ):
        before = ends.get(ARMS[arm].start or "", 0)
        steps, values = [before + step for step, _ in points], [100 * value for _, value in points]
        axes.plot(steps, values, marker="o", markersize=3, color=COLOURS[number % len(COLOURS)], label=ARMS[arm].title)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("score on dev questions from x0, %")
    _finish(axes)
    return Picture(figure)


def _plot_contexts(result: Mapping[str, Any]) -> Picture:
    """Score on test questions against the mean length of the prompt, with 95 % intervals."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for number, arm in enumerate(arm for arm in ARMS if arm in result["arms"]):
        points = sorted((p for p in result["contexts"] if p["arm"] == arm and p["score"]), key=lambda p: p["tokens"])
        middle, low, high = ([100 * p["score"][name] for p in points] for name in ("value", "low", "high"))
        errors = [np.subtract(middle, low), np.subtract(high, middle)]
        tokens = [p["tokens"] + 4 * number for p in points]  # so that intervals do not hide one another
        axes.errorbar(tokens, middle, yerr=errors, marker="o", capsize=2, color=COLOURS[number % len(COLOURS)],
                      label=ARMS[arm].title)  # fmt: skip
    axes.set_xlabel("tokens of the prompt (mean)")
    axes.set_ylabel("score on test questions from x0, %")
    _finish(axes)
    return Picture(figure)


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
