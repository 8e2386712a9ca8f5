"""Two evaluation runs, question by question: differences with intervals, or a refusal that says why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, sha256_json, write_json
from remind.data.dialogue import FORMATS
from remind.evaluation.paired import Difference, paired_bootstrap

REPORT, PREDICTIONS = "report.json", "predictions.jsonl"
#: Accuracy with failures of a question that has a gold answer as wrong: leaving questions out cannot raise it.
WITH_FAILURES = "accuracy_failures_wrong"
#: Entries of a report's rows that are no measures.
_COUNTS = ("n", "failed")
#: Differences shown in a message before it says how many more there are.
_SHOWN = 3
_Pair = tuple[Mapping[str, Any], Mapping[str, Any]]


@dataclass
class CompareConfig:
    """Compare two runs of evaluate.py on the same questions: second less first."""

    first: str
    """Folder of a run (report.json, predictions.jsonl); may also be given as the first plain argument."""
    second: str
    """Folder of the other run; may also be given as the second plain argument."""
    out: str | None = None
    """JSON file for the differences; None: they are only printed."""
    only_common: bool = False
    """Compare what both runs asked where their questions differ, instead of refusing; printed in the result."""
    by_dialogue: bool = False
    """Resample whole dialogues instead of questions: wider intervals, right where few dialogues have many questions."""
    resamples: int = 2000
    """Bootstrap resamples behind each interval and p-value."""
    seed: int = 0
    """Of the resampling."""

    def __post_init__(self) -> None:
        if self.resamples < 1:
            raise ConfigError(f"resamples must be at least 1, not {self.resamples}")


@dataclass(frozen=True)
class Run:
    """A finished run: its report and its rows by question id, in file order."""

    folder: Path
    report: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def identity(self) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self.report["identity"]
        return value

    @property
    def measures(self) -> list[str]:
        """Names of the scores, in the report's order."""
        return [name for name in self.report["overall"] if name not in _COUNTS]

    @property
    def yardstick(self) -> dict[str, Any]:
        """What two runs must share for their scores to mean the same: data, split, judge and its prompts, encoder."""
        states = self.report.get("states") or {}
        judge = str(self.identity.get("judge"))
        prompts = self.report.get("prompts") or {}
        judging = {name: value for name, value in prompts.items() if "judge" in name and "longmemeval" not in name}
        return {
            "data": states.get("inputs") or {"states": self.identity.get("states")},
            "split": self.identity.get("split"),
            "judge": judge,
            # the offline judge is a rule: its version is in its name
            "judge prompt": None if judge.startswith("offline") else self.identity.get("judge_prompt", judging),
            "encoder": self.identity.get("encoder"),
        }


def load_run(folder: str | Path) -> Run:
    """Read a run.

    Raises:
        DataError: no report or predictions, or not those of an evaluation.
    """
    folder = Path(folder)
    report = read_json(folder / REPORT)
    if not isinstance(report, dict) or any(not isinstance(report.get(key), dict) for key in ("identity", "overall")):
        raise DataError("not the report of an evaluation (no identity or overall scores)", folder / REPORT)
    rows: dict[str, Mapping[str, Any]] = {}
    path = folder / PREDICTIONS
    if not path.is_file():
        inside = [name for name in report.get("conditions") or () if (folder / name / PREDICTIONS).is_file()]
        hint = f"; the run has several conditions, name the folder of one: {', '.join(inside)}" if inside else ""
        raise DataError(f"no such file{hint}", path)
    # at line feeds only: a line of a dialogue may hold other characters that end lines in Python
    for number, line in enumerate(path.read_bytes().removesuffix(b"\n").split(b"\n"), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("question_id"), str) or not _scored(row):
            message = "not a scored prediction; finish the run with evaluate.py first"
            raise DataError(message, path, f"line {number}")
        rows[row["question_id"]] = row
    return Run(folder, report, rows)


def _scored(row: Mapping[str, Any]) -> bool:
    return "accuracy" in row or row.get("left_out") is not None


def check_comparable(first: Run, second: Run, only_common: bool = False) -> list[str]:
    """The ids of the questions to compare, in the first run's order.

    Raises:
        ConfigError: the runs differ in data, split, judge, judge prompt, encoder, gold answers, or (unless
            `only_common`) in their questions. The message names what differs, with both values.
    """
    one, two = first.yardstick, second.yardstick
    problems = [f"{key} ({_pair(one[key], two[key])})" for key in one if one[key] != two[key]]
    common = [name for name in first.rows if name in second.rows]
    alone = [name for name in first.rows if name not in second.rows]
    strange = [name for name in second.rows if name not in first.rows]
    if (alone or strange) and not only_common:
        told = [
            f"{len(names)} only in the {which}{_some(names)}"
            for names, which in ((alone, "first"), (strange, "second"))
            if names
        ]
        problems.append(f"questions ({', '.join(told)}; --only_common true compares the other {len(common)})")
    moved = [name for name in common if _gold(first.rows[name]) != _gold(second.rows[name])]
    if moved:
        name = moved[0]
        values = _pair(_gold(first.rows[name]), _gold(second.rows[name]))
        problems.append(f"gold answers of {len(moved)} questions ({name}: {values})")
    if problems:
        raise ConfigError(
            f"{first.folder} and {second.folder} cannot be compared, they differ in: {'; '.join(problems)}"
        )
    if not common:
        raise ConfigError(f"{first.folder} and {second.folder} have no question in common")
    return common


def _gold(row: Mapping[str, Any]) -> Any:
    return [row.get("format"), row.get("gold")]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f": {', '.join(names[:_SHOWN])}{more}"


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
        `n`, `dropped` (questions of only one run), `left_out` and `failed` by side, `differing` (identity entries that
        differ, with both values), `differences`: format or "all" → measure → `Difference`.

    Raises:
        ConfigError: runs that cannot be compared.
        DataError: a folder without a finished run.
    """
    first, second = load_run(cfg.first), load_run(cfg.second)
    common = check_comparable(first, second, cfg.only_common)
    pairs = [(first.rows[name], second.rows[name]) for name in common]
    groups: dict[str, list[_Pair]] = {name: [p for p in pairs if p[0].get("format") == name] for name in FORMATS}
    groups["all"] = pairs
    differences = {
        name: {measure: found for measure in first.measures if (found := _difference(rows, measure, cfg))}
        for name, rows in groups.items()
        if rows
    }
    one, two = first.identity, second.identity
    keys = [key for key in sorted({*one, *two}) if one.get(key) != two.get(key)]
    result = {
        "format": "remind-comparison",
        "first": str(first.folder),
        "second": str(second.folder),
        "n": len(common),
        "only_common": cfg.only_common,
        "dropped": [len(run.rows) - len(common) for run in (first, second)],
        "left_out": [sum(pair[side].get("left_out") is not None for pair in pairs) for side in (0, 1)],
        "failed": [sum(_failed(pair[side]) for pair in pairs) for side in (0, 1)],
        "differing": {key: [one.get(key), two.get(key)] for key in keys},
        "yardstick": first.yardstick,
        "resampled": "dialogues" if cfg.by_dialogue else "questions",
        "resamples": cfg.resamples,
        "differences": differences,
    }
    if cfg.out is not None:
        write_json(cfg.out, result)
    return result


def _failed(row: Mapping[str, Any]) -> bool:
    return (row.get("score_failure") or row.get("failure")) is not None


def _value(row: Mapping[str, Any], measure: str) -> float | None:
    if row.get("left_out") is not None:
        return None
    if measure == WITH_FAILURES:
        return float(row.get("accuracy") or 0.0) if row.get("gold") else None
    value = row.get(measure)
    return None if value is None else float(value)


def _difference(pairs: Sequence[_Pair], measure: str, cfg: CompareConfig) -> Difference | None:
    """Over the questions that both runs have a score for."""
    scored = [
        (one, two, row.get("dialogue_id"))
        for row, other in pairs
        if (one := _value(row, measure)) is not None and (two := _value(other, measure)) is not None
    ]
    clusters = [dialogue for *_, dialogue in scored] if cfg.by_dialogue else None
    return paired_bootstrap(
        [one for one, *_ in scored], [two for _, two, _ in scored], clusters, cfg.resamples, cfg.seed
    )


def table(result: Mapping[str, Any]) -> str:
    """The comparison in plain lines; shares in percent."""
    lines = [f"first: {result['first']}", f"second: {result['second']}", f"questions compared: {result['n']}"]
    if any(result["dropped"]):
        one, two = result["dropped"]
        lines.append(
            f"only_common: {one} questions of the first and {two} of the second run left out, the other lacks them"
        )
    for key in ("left_out", "failed"):
        if any(result[key]):
            one, two = result[key]
            lines.append(f"{key.replace('_', ' ')}: {one} in the first, {two} in the second")
    for key, (one, two) in result["differing"].items():
        lines.append(f"differs: {key}: {_pair(one, two)}")
    lines.append(f"\n{'':<8}{'':<24}{'n':>6}{'first':>8}{'second':>8}{'change':>8}  95 % interval     p")
    for name, measures in result["differences"].items():
        for measure, row in measures.items():
            values = "".join(f"{100 * row[key]:>8.1f}" for key in ("first", "second"))
            spread = "one unit: no interval"
            if row["p"] is not None:
                spread = f"[{100 * row['low']:+6.1f}, {100 * row['high']:+6.1f}]  {row['p']:.4f}"
            lines.append(
                f"{name:<8}{measure.replace('_', ' '):<24}{row['n']:>6}{values}{100 * row['value']:>+8.1f}  {spread}"
            )
    lines.append(
        f"paired bootstrap over {result['resampled']}, {result['resamples']} resamples; p two-sided, each by itself"
    )
    return "\n".join(lines)


def compare_and_show(cfg: CompareConfig) -> None:
    """`compare`, then the table and where it is."""
    print(table(compare(cfg)))
    if cfg.out is not None:
        print(f"comparison: {cfg.out}")
