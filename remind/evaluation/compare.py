"""Paired differences: between two evaluation runs, or between the conditions of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError, DataError, shown
from remind.core.files import read_json, write_json
from remind.core.run_folder import REPORT, flatten
from remind.data.dialogue import FORMATS
from remind.evaluation.config import CompareConfig
from remind.evaluation.predictions import NO_VERDICT, PREDICTIONS, read_rows
from remind.evaluation.statistics import Difference, paired_bootstrap, several
from remind.evaluation.tables import HEADS, plain

#: Scored predictions by question id.
Rows = Mapping[str, Mapping[str, Any]]


def differences(
    first: Rows, second: Rows, measures: Iterable[str] = tuple(HEADS), resamples: int = 2000, seed: int = 0
) -> dict[str, dict[str, Difference]]:
    """By format and "all", by measure: second less first over the questions that both have a score for, if any.

    Dialogues are resampled where there are several, else questions.
    """
    pairs = [(row, second[name]) for name, row in first.items() if name in second]
    formats = {row["format"] for row, _ in pairs}
    found: dict[str, dict[str, Difference]] = {name: {} for name in (*FORMATS, "all") if name in (*formats, "all")}
    for name, by_measure in found.items():
        for measure in measures:
            scored = [
                (float(one[measure]), float(two[measure]), one["dialogue_id"])
                for one, two in pairs
                if name in (one["format"], "all") and None not in (one.get(measure), two.get(measure))
            ]
            if scored:
                ones, twos, dialogues = zip(*scored, strict=True)
                change = paired_bootstrap(ones, twos, several(dialogues), resamples, seed)
                assert change is not None
                by_measure[measure] = change
    return found


@dataclass(frozen=True)
class Run:
    """A finished run: its report and its rows by question id, in file order."""

    folder: Path
    report: Mapping[str, Any]
    rows: Rows

    @property
    def yardstick(self) -> dict[str, Any]:
        """What two runs must share for their scores to mean the same."""
        identity = self.report["identity"]
        data = (self.report.get("states") or {}).get("inputs") or {"states": identity.get("states")}
        # what the offline judge goes by is in its name
        shared = ("split", "judge", "judge_prompt", "encoder")
        return {"data": data, **{name: identity.get(name) for name in shared}}


def load_run(folder: str | Path) -> Run:
    """Read a run.

    Raises:
        DataError: no report or predictions, or not those of a finished evaluation of this version.
    """
    folder = Path(folder)
    report = read_json(folder / REPORT)
    # reports without a parse rate leave failures of the model out of accuracy
    if not isinstance(report, dict) or "identity" not in report or "parse_rate" not in report.get("overall", ()):
        what = "not the report of an evaluation, or that of an earlier version"
        raise DataError(f"{what}: run `remind evaluate` again, which keeps the answers", folder / REPORT)
    path = folder / PREDICTIONS
    if not path.is_file():
        inside = ", ".join(report.get("conditions", ()))
        raise DataError(f"no such file; of a run with several conditions name the folder of one: {inside}", path)
    rows = {row["question_id"]: row for _, row in read_rows(path, "a prediction")}
    for name, row in rows.items():
        if "accuracy" not in row and row.get("left_out") is None:
            raise DataError("not a scored prediction; finish the run with `remind evaluate` first", path, name)
    return Run(folder, report, rows)


def _differing(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Both values of the entries that differ; the names of nested ones have dots."""
    before, after = flatten(dict(one)), flatten(dict(two))
    keys = sorted({*before, *after})
    return {key: [before.get(key), after.get(key)] for key in keys if before.get(key) != after.get(key)}


def _check(first: Run, second: Run) -> None:
    """Raise ConfigError where runs differ in data, split, judge, judge prompt, encoder, questions or gold answers; it
    names what differs, with both values."""
    pairs = _differing(first.yardstick, second.yardstick).items()
    problems = [f"{key} ({shown(one)} and {shown(two)})" for key, (one, two) in pairs]
    common = [name for name in first.rows if name in second.rows]
    if any(alone := [len(run.rows) - len(common) for run in (first, second)]):
        problems.append(f"questions ({alone[0]} only in the first, {alone[1]} only in the second)")
    gold = [{name: [row.get("format"), row.get("gold")] for name, row in run.rows.items()} for run in (first, second)]
    if changed := [name for name in common if gold[0][name] != gold[1][name]]:
        one, two = (shown(side[changed[0]]) for side in gold)
        problems.append(f"gold answers of {len(changed)} questions ({changed[0]}: {one} and {two})")
    if problems:
        both = f"{first.folder} and {second.folder}"
        raise ConfigError(f"{both} cannot be compared, they differ in: {'; '.join(problems)}")


def compare(cfg: CompareConfig) -> dict[str, Any]:
    """See `CompareConfig`.

    Returns:
        `n`, `left_out`, `failed` (counted as wrong) and `no_verdict` by side,
        `differing` (identity entries that differ, with both values), `other_prompts` (questions that the two models
        read in other words, for example since a chat template prints the date), `differences` (see there).

    Raises:
        ConfigError: runs that cannot be compared.
        DataError: a folder without a finished run.
    """
    runs = first, second = load_run(cfg.first), load_run(cfg.second)
    _check(first, second)
    sides = [[run.rows[name] for name in first.rows] for run in runs]
    failures = [[kind for row in rows if (kind := row.get("score_failure"))] for rows in sides]
    result = {
        "format": "remind-comparison",
        "first": str(first.folder),
        "second": str(second.folder),
        "n": len(first.rows),
        "left_out": [sum(row.get("left_out") is not None for row in rows) for rows in sides],
        "failed": [sum(kind not in NO_VERDICT for kind in kinds) for kinds in failures],
        "no_verdict": [sum(kind in NO_VERDICT for kind in kinds) for kinds in failures],
        "differing": _differing(first.report["identity"], second.report["identity"]),
        "other_prompts": sum(one.get("prompt") != two.get("prompt") for one, two in zip(*sides, strict=True)),
        "resampled": "dialogues" if several([row["dialogue_id"] for row in sides[0]]) else "questions",
        "resamples": cfg.resamples,
        "differences": differences(first.rows, second.rows, resamples=cfg.resamples, seed=cfg.seed),
    }
    if cfg.out is not None:
        write_json(cfg.out, result)
    return result


def table(result: Mapping[str, Any]) -> str:
    """The comparison in plain lines; shares in percent."""
    lines = [f"first: {result['first']}", f"second: {result['second']}", f"questions compared: {result['n']}"]
    for key in ("left_out", "failed", "no_verdict"):
        if any(result[key]):
            one, two = result[key]
            lines.append(f"{key.replace('_', ' ')}: {one} in the first, {two} in the second")
    lines += [f"differs: {key}: {shown(one)} and {shown(two)}" for key, (one, two) in result["differing"].items()]
    if result["other_prompts"]:
        lines.append(f"differs: the prompts, chat template included, of {result['other_prompts']} questions")
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
