"""Paired differences: between two evaluation runs, or between the conditions of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, sha256_json, write_json
from remind.data.dialogue import FORMATS
from remind.evaluation.config import CompareConfig
from remind.evaluation.predictions import NO_VERDICT, PREDICTIONS, parse_lines
from remind.evaluation.statistics import Difference, paired_bootstrap, several
from remind.evaluation.tables import plain

REPORT = "report.json"
#: Measures by which the conditions of one run are compared.
CONDITION_MEASURES = ("accuracy", "parse_rate", "memory_recall", "f1", "evidence_recall")
#: Counts in a report's rows, beside the measures.
_COUNTS = ("n", "failed", "no_verdict")
#: Question ids shown in a message before it says how many more there are.
_SHOWN = 3
#: Scored predictions by question id.
Rows = Mapping[str, Mapping[str, Any]]


def difference(
    first: Rows,
    second: Rows,
    measure: str,
    format: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Difference | None:
    """Second less first over the questions that both have a score for, in the first's order; None for no questions.

    Dialogues are resampled where there are several, else questions.

    Args:
        format: questions of this format alone; None: all.
    """
    scored = [
        (one, two, row.get("dialogue_id"))
        for name, row in first.items()
        if name in second
        and format in (None, row.get("format"))
        and (one := _value(row, measure)) is not None
        and (two := _value(second[name], measure)) is not None
    ]
    clusters = several([dialogue for *_, dialogue in scored])
    return paired_bootstrap([one for one, *_ in scored], [two for _, two, _ in scored], clusters, resamples, seed)


def _value(row: Mapping[str, Any], measure: str) -> float | None:
    if row.get("left_out") is not None:
        return None
    value = row.get(measure)
    return None if value is None else float(value)


def condition_differences(
    rows: Mapping[str, Rows], base: str, resamples: int, seed: int
) -> dict[str, dict[str, dict[str, Difference | None]]]:
    """For each condition but the base, by "all" and format, by measure: its mean less the base's, with interval."""
    differences: dict[str, dict[str, dict[str, Difference | None]]] = {}
    for name, own in rows.items():
        if name == base:
            continue
        formats = {row["format"] for row in own.values() if row.get("left_out") is None}
        groups: list[str | None] = [None, *(format for format in FORMATS if format in formats)] if formats else []
        differences[name] = {
            group or "all": {
                measure: difference(rows[base], own, measure, group, resamples=resamples, seed=seed)
                for measure in CONDITION_MEASURES
            }
            for group in groups
        }
    return differences


@dataclass(frozen=True)
class Run:
    """A finished run: its report and its rows by question id, in file order."""

    folder: Path
    report: Mapping[str, Any]
    rows: Rows

    @property
    def yardstick(self) -> dict[str, Any]:
        """What two runs must share for their scores to mean the same: data, split, judge and its prompts, encoder."""
        identity, states, prompts = (
            self.report["identity"],
            self.report.get("states") or {},
            self.report.get("prompts") or {},
        )
        judge = str(identity.get("judge"))
        judging = {name: value for name, value in prompts.items() if "judge" in name and "longmemeval" not in name}
        return {
            "data": states.get("inputs") or {"states": identity.get("states")},
            "split": identity.get("split"),
            "judge": judge,
            # the offline judge is a rule: its version is in its name
            "judge prompt": None if judge.startswith("offline") else identity.get("judge_prompt", judging),
            "encoder": identity.get("encoder"),
        }


def load_run(folder: str | Path) -> Run:
    """Read a run.

    Raises:
        DataError: no report or predictions, not those of an evaluation, or scored by an earlier version that left
            failures of the model out of its accuracy.
    """
    folder = Path(folder)
    report = read_json(folder / REPORT)
    if not isinstance(report, dict) or any(not isinstance(report.get(key), dict) for key in ("identity", "overall")):
        raise DataError("not the report of an evaluation (no identity or overall scores)", folder / REPORT)
    if report["overall"] and "parse_rate" not in report["overall"]:
        message = "its accuracy leaves out answers that failed; run `remind evaluate` again, which keeps the answers"
        raise DataError(message, folder / REPORT)
    path = folder / PREDICTIONS
    if not path.is_file():
        inside = [name for name in report.get("conditions") or () if (folder / name / PREDICTIONS).is_file()]
        hint = f"; the run has several conditions, name the folder of one: {', '.join(inside)}" if inside else ""
        raise DataError(f"no such file{hint}", path)
    rows: dict[str, Mapping[str, Any]] = {}
    for number, row in parse_lines(path.read_bytes().removesuffix(b"\n")):
        if row is None or ("accuracy" not in row and row.get("left_out") is None):
            message = "not a scored prediction; finish the run with `remind evaluate` first"
            raise DataError(message, path, f"line {number}")
        rows[row["question_id"]] = row
    return Run(folder, report, rows)


def check_comparable(first: Run, second: Run, only_common: bool = False) -> list[str]:
    """The ids of the questions to compare, in the first run's order.

    Raises:
        ConfigError: the runs differ in data, split, judge, judge prompt, encoder, gold answers, or (unless
            `only_common`) in their questions. The message names what differs, with both values.
    """
    one, two = first.yardstick, second.yardstick
    problems = [f"{key} ({_pair(one[key], two[key])})" for key in one if one[key] != two[key]]
    common = [name for name in first.rows if name in second.rows]
    missing = []
    for side, run, other in (("first", first, second), ("second", second, first)):
        if names := [name for name in run.rows if name not in other.rows]:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            missing.append(f"{len(names)} only in the {side}: {', '.join(names[:_SHOWN])}{more}")
    if missing and not only_common:
        problems.append(f"questions ({', '.join(missing)}; --only_common true compares the other {len(common)})")
    gold = [[[run.rows[name].get(key) for key in ("format", "gold")] for name in common] for run in (first, second)]
    if changed := [place for place in zip(common, *gold, strict=True) if place[1] != place[2]]:
        name, *values = changed[0]
        problems.append(f"gold answers of {len(changed)} questions ({name}: {_pair(*values)})")
    if problems:
        raise ConfigError(
            f"{first.folder} and {second.folder} cannot be compared, they differ in: {'; '.join(problems)}"
        )
    if not common:
        raise ConfigError(f"{first.folder} and {second.folder} have no question in common")
    return common


def _pair(one: Any, two: Any) -> str:
    """Both values, of objects only the entries that differ; long hashes cut to twelve digits."""
    if isinstance(one, dict) and isinstance(two, dict):
        keys = [key for key in sorted({*one, *two}) if one.get(key) != two.get(key)]
        return ", ".join(f"{key}: {_pair(one.get(key, 'absent'), two.get(key, 'absent'))}" for key in keys)
    return f"{_short(one)} and {_short(two)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) == 64 and not text.strip("0123456789abcdef"):
        return text[:12]
    return text if len(text) <= 120 else f"{text[:100]}… ({sha256_json(value)[:8]})"


def compare(cfg: CompareConfig) -> dict[str, Any]:
    """See `CompareConfig`.

    Returns:
        `n`, `dropped` (questions of only one run), `left_out`, `failed` (counted as wrong) and `no_verdict` by side,
        `differing` (identity entries that differ, with both values), `differences`: format or "all" → measure →
        `Difference`.

    Raises:
        ConfigError: runs that cannot be compared.
        DataError: a folder without a finished run.
    """
    runs = first, second = load_run(cfg.first), load_run(cfg.second)
    common = check_comparable(first, second, cfg.only_common)
    sides = [[run.rows[name] for name in common] for run in runs]
    formats = {row.get("format") for row in sides[0]}
    groups: list[str | None] = [*(format for format in FORMATS if format in formats), None]
    differences = {
        group or "all": {
            measure: change
            for measure in first.report["overall"]
            if measure not in _COUNTS
            and (change := difference(first.rows, second.rows, measure, group, cfg.resamples, cfg.seed))
        }
        for group in groups
    }
    one, two = first.report["identity"], second.report["identity"]
    keys = [key for key in sorted({*one, *two}) if one.get(key) != two.get(key)]
    failures = [[row.get("score_failure") for row in rows if row.get("score_failure")] for rows in sides]
    result = {
        "format": "remind-comparison",
        "first": str(first.folder),
        "second": str(second.folder),
        "n": len(common),
        "only_common": cfg.only_common,
        "dropped": [len(run.rows) - len(common) for run in runs],
        "left_out": [sum(row.get("left_out") is not None for row in rows) for rows in sides],
        "failed": [sum(kind not in NO_VERDICT for kind in kinds) for kinds in failures],
        "no_verdict": [sum(kind in NO_VERDICT for kind in kinds) for kinds in failures],
        "differing": {key: [one.get(key), two.get(key)] for key in keys},
        "yardstick": first.yardstick,
        "resampled": "dialogues" if several([row.get("dialogue_id") for row in sides[0]]) else "questions",
        "resamples": cfg.resamples,
        "differences": differences,
    }
    if cfg.out is not None:
        write_json(cfg.out, result)
    return result


def table(result: Mapping[str, Any]) -> str:
    """The comparison in plain lines; shares in percent."""
    lines = [f"first: {result['first']}", f"second: {result['second']}", f"questions compared: {result['n']}"]
    if any(result["dropped"]):
        one, two = result["dropped"]
        lines.append(
            f"only_common: {one} questions of the first and {two} of the second run left out, the other lacks them"
        )
    for key in ("left_out", *_COUNTS[1:]):
        if any(result[key]):
            one, two = result[key]
            lines.append(f"{key.replace('_', ' ')}: {one} in the first, {two} in the second")
    lines += [f"differs: {key}: {_pair(one, two)}" for key, (one, two) in result["differing"].items()]
    rows = []
    for name, measures in result["differences"].items():
        for measure, row in measures.items():
            spread, p = "one unit: no interval", ""
            if row["p"] is not None:
                spread, p = f"[{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]", f"{row['p']:.4f}"
            values = [f"{100 * row['first']:.1f}", f"{100 * row['second']:.1f}", f"{100 * row['value']:+.1f}"]
            rows.append([f"{name} {measure.replace('_', ' ')}", str(row["n"]), *values, spread, p])
    lines += ["", plain(["", "n", "first", "second", "change", "95 % interval", "p"], rows)]
    lines.append(
        f"paired bootstrap over {result['resampled']}, {result['resamples']} resamples; p two-sided, each by itself"
    )
    return "\n".join(lines)


def compare_and_show(cfg: CompareConfig) -> None:
    """`compare`, then the table and where it is."""
    print(table(compare(cfg)))
    if cfg.out is not None:
        print(f"comparison: {cfg.out}")
