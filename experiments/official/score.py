"""Read an official results file, score it again, and write it back as it was but for what changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.official import locomo, longmemeval
from experiments.official.files import ResultFile
from remind.core.errors import ConfigError, FormatError
from remind.core.files import sha256_file, write_json
from remind.evaluation.tables import plain
from sae.ranges import Resamples, Seed, check_ranges

SCORES = "scores.json"


@dataclass
class ScoreOfficialConfig:
    """Score a results file of LongMemEval (rows, judged or not) or LoCoMo (JSON) again."""

    results: str
    """LongMemEval: JSON lines {question_id, hypothesis}, judged ones with autoeval_label. LoCoMo: a JSON list of
    samples whose questions carry <model>_prediction. The content decides which it is."""
    out: str
    """Folder for scores.json and the results file under its own name; equal figures leave its bytes as they are."""
    references: str | None = None
    """LongMemEval: file of its questions, with types and gold answers. The labels that are there are counted."""
    model: str | None = None
    """LoCoMo: whose predictions, where the file holds those of several models."""
    bootstrap: Resamples = 1000
    """Resamples behind each interval that is not of a share."""
    seed: Seed = 0
    """Of the resampling."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


def score_official(cfg: ScoreOfficialConfig) -> dict[str, Any]:
    """Score, write, and return what scores.json holds.

    Raises:
        FormatError: a file of neither benchmark.
        DataError: a record that cannot be used.
        ConfigError: an option that the file does not go with, or an `out` that would overwrite the input.
    """
    file = ResultFile(cfg.results)
    target = Path(cfg.out) / file.path.name
    if target.resolve() == file.path.resolve():
        raise ConfigError(f"out {cfg.out} is the folder of the results file; choose another")
    before = file.dump()
    if longmemeval.is_rows(file):
        scores = _longmemeval(cfg, file)
    elif locomo.is_samples(file):
        scores = _locomo(cfg, file)
    else:
        raise FormatError("neither LongMemEval's rows nor LoCoMo's samples with qa", cfg.results)
    after = file.dump()
    inputs = {"results": cfg.results, "references": cfg.references}
    report = {
        "format": "remind-official-scores",
        "config": asdict(cfg),
        "inputs": {role: sha256_file(path) for role, path in inputs.items() if path},
        "written_back": "identical" if after == before else "changed",
        **scores,
    }
    file.write(target)
    write_json(Path(cfg.out) / SCORES, report)
    return report


def _longmemeval(cfg: ScoreOfficialConfig, file: ResultFile) -> dict[str, Any]:
    if cfg.references is None:
        raise ConfigError("LongMemEval's rows hold no question types: name the file of questions (references)")
    if cfg.model:
        raise ConfigError("model is for LoCoMo; this is a file of LongMemEval")
    longmemeval.check_rows(file)
    references = longmemeval.load_references(cfg.references)
    return {"benchmark": "LongMemEval", **longmemeval.score_rows(file.records, references)}


def _locomo(cfg: ScoreOfficialConfig, file: ResultFile) -> dict[str, Any]:
    if cfg.references:
        raise ConfigError("references are for LongMemEval; this is a file of LoCoMo")
    answered, counts = locomo.score_samples(file, cfg.model)
    return {
        "benchmark": "LoCoMo",
        "by_category": locomo.by_category(answered, cfg.bootstrap, cfg.seed),
        "counts": counts,
    }


def table(report: dict[str, Any]) -> str:
    """The scores in plain lines, percent with 95 % intervals."""
    lines = [
        f"{report['benchmark']}: "
        + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report["counts"].items())
    ]
    if report["benchmark"] == "LongMemEval":
        shown = {**report["by_type"], **{name: report[name] for name in ("overall", "answerable", "abstention")}}
        rows = [[name, _percent(row), str(row["n"] if row else 0)] for name, row in shown.items()]
        if report["task_averaged"] is not None:
            rows.append(["mean over types", f"{100 * report['task_averaged']:.2f}", ""])
        judges = ", ".join(f"{name} ({n})" for name, n in report["judges"].items())
        return "\n".join([*lines, plain(["", "accuracy", "n"], rows), f"judged by {judges or 'no judge'}"])
    rows = []
    for name, row in report["by_category"].items():
        title = f"{name} {locomo.CATEGORIES.get(int(name), '')}" if name.isdigit() else name
        rows.append([title, str(row["n"]), _percent(row["f1"]), _percent(row["recall"])])
    return "\n".join([*lines, plain(["category", "n", "F1", "recall"], rows)])


def _percent(row: dict[str, Any] | None) -> str:
    return f"{100 * row['value']:.2f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]" if row else "–"


def score_and_show(cfg: ScoreOfficialConfig) -> None:
    """`score_official`, then the table and where it is."""
    report = score_official(cfg)
    print(table(report))
    print(f"results file written back: {report['written_back']}")
    print(f"scores: {Path(cfg.out) / SCORES}")


if __name__ == "__main__":
    from remind.core.cli import main

    main(ScoreOfficialConfig, score_and_show, "Score a results file of LongMemEval or LoCoMo again and write it back.")
