"""A run of ours in the formats of LongMemEval and LoCoMo, for their scorers and for others to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.official.files import ResultFile
from experiments.official.locomo import PREDICTION, is_samples, score_samples
from remind.core.errors import ConfigError, DataError
from remind.core.files import write_text
from remind.evaluation.compare import load_run
from remind.memory.run import hypotheses


@dataclass
class ExportOfficialConfig:
    """Write the answers of a run of `remind evaluate` as a results file of LongMemEval or LoCoMo."""

    run: str
    """Folder of the run (report.json, predictions.jsonl)."""
    out: str
    """File to write."""
    benchmark: Literal["longmemeval", "locomo"]
    """longmemeval: JSON lines {question_id, hypothesis}. locomo: the samples' questions with <name>_prediction, and
    <name>_f1 by its scorer's rules."""
    data: str | None = None
    """locomo: the dataset file whose questions were asked."""
    name: str = "remind"
    """locomo: what the predictions are called."""


def samples_of(file: ResultFile, rows: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """The samples of a LoCoMo file with predictions: `sample_id` and `qa`, those without any prediction left out.

    Raises:
        DataError: not a LoCoMo file, or a row whose question it does not have.
    """
    if not is_samples(file):
        raise DataError("not a LoCoMo file (a list of samples with qa)", file.path)
    answers = {row["question_id"]: row for row in rows}
    samples, placed = [], set()
    for sample in file.records:
        items = []
        for number, item in enumerate(sample["qa"]):
            row = answers.get(f"{sample.get('sample_id')}-q{number:03d}")
            if row is not None:
                placed.add(row["question_id"])
            items.append({**item, name + PREDICTION: row["answer"]} if row is not None and not _failed(row) else item)
        if any(name + PREDICTION in item for item in items):
            samples.append({"sample_id": sample.get("sample_id"), "qa": items})
    unknown = [question for question in answers if question not in placed]
    if unknown:
        raise DataError(f"{len(unknown)} answers are to questions this file has not", file.path, unknown[0])
    return samples


def _failed(row: Mapping[str, Any]) -> bool:
    return row.get("failure") is not None or row.get("left_out") is not None


def export_official(cfg: ExportOfficialConfig) -> int:
    """Write the file; how many answers it holds.

    Raises:
        DataError: files that cannot be used, or do not belong together.
        ConfigError: locomo without its dataset file, or an `out` that is that file.
    """
    rows = list(load_run(cfg.run).rows.values())
    if cfg.benchmark == "longmemeval":
        written = hypotheses(rows)
        # as its own scripts write them: one JSON object a line, other than ASCII escaped
        write_text(cfg.out, "".join(json.dumps(row) + "\n" for row in written))
        return len(written)
    if cfg.data is None:
        raise ConfigError("locomo: name the dataset file whose questions were asked (data)")
    if Path(cfg.data).resolve() == Path(cfg.out).resolve():
        raise ConfigError(f"out {cfg.out} is the dataset file; choose another")
    samples = samples_of(ResultFile(cfg.data), rows, cfg.name)
    if not samples:
        raise ConfigError(f"{cfg.run} holds no answer to a question of {cfg.data}")
    # as the benchmark's own scripts write it
    write_text(cfg.out, json.dumps(samples, indent=2))
    file = ResultFile(cfg.out)
    _, counts = score_samples(file, cfg.name)
    file.write(cfg.out)
    return int(counts["answered"])


def export_and_show(cfg: ExportOfficialConfig) -> None:
    """`export_official`, then where it is."""
    print(f"{export_official(cfg)} answers: {cfg.out}")


if __name__ == "__main__":
    from remind.core.cli import main

    main(
        ExportOfficialConfig, export_and_show, "Write the answers of a run as a results file of LongMemEval or LoCoMo."
    )
