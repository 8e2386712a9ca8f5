"""Table 3: how well judges of direct answers agree with people, by dimension (Appendix D.8).

The first start writes a label sheet; once somebody has filled in its column `label`, a start with `--labels` reads it.
"""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.official.agreement import Labelled, by_group
from experiments.paper.cells import SHORT, bars
from experiments.paper.config import PaperConfig
from experiments.paper.items import Result
from experiments.paper.settings import Setting, ask, settings
from experiments.paper.systems import FileAnswers, named_paths, split_records
from remind.core.errors import ConfigError, DataError
from remind.core.files import write_text
from remind.data.dialogue import DIMENSIONS
from remind.evaluation.compare import Rows, Run, load_run
from remind.evaluation.judge import Case, judge_answers
from remind.evaluation.predictions import PREDICTIONS
from remind.evaluation.run import Models
from remind.evaluation.tables import markdown_table
from remind.evaluation.team import Team
from remind.llm.endpoints import EndpointConfig
from remind.perception.auxiliary import AuxiliaryLLM, OfflineLLM
from remind.states.records import StateRecord

SHEET = "labels.csv"
_COLUMNS = ("question_id", "dimension", "question", "references", "prediction", "label")
_LABELS = {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False}


def sample(records: Sequence[StateRecord], per_dimension: int, seed: int) -> list[StateRecord]:
    """Up to so many direct questions with gold answers of each dimension, drawn by the seed; in the order given."""
    groups: dict[str, list[StateRecord]] = {}
    for record in records:
        if record.format == "direct" and record.answers:
            groups.setdefault(record.dimension or record.category or "none", []).append(record)
    chosen = set()
    for name, members in groups.items():
        ids = sorted(record.question_id for record in members)
        rng = random.Random(f"remind-labels:{seed}:{name}")
        chosen.update(rng.sample(ids, min(per_dimension, len(ids))))
    return [record for record in records if record.question_id in chosen]


def write_sheet(path: Path, records: Sequence[StateRecord], rows: Rows) -> None:
    """A CSV file to label in a spreadsheet."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS)
    writer.writeheader()
    for record in records:
        cells: dict[str, str] = {
            "question_id": record.question_id,
            "dimension": record.dimension or record.category or "none",
            "question": record.question,
            "references": " | ".join(record.answers),
            "prediction": rows[record.question_id]["answer"],
        }
        writer.writerow(cells)
    write_text(path, text.getvalue())


def read_sheet(path: str | Path, ids: Sequence[str]) -> dict[str, bool]:
    """Labels by question id.

    Raises:
        DataError: no such file or columns, a label that is none, an id twice, ids that were not asked for, or answers
            without a label; of the last two the first and the number.
    """
    labels: dict[str, bool] = {}
    empty: list[str] = []
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", path) from None
    reader = csv.DictReader(io.StringIO(content, newline=""))
    if missing := [name for name in ("question_id", "label") if name not in (reader.fieldnames or ())]:
        raise DataError(f"has no column {', '.join(missing)}", path)
    for row in reader:
        name, label = str(row["question_id"] or ""), str(row["label"] or "").strip().casefold()
        if name in labels or name in empty:
            raise DataError(f"question {name!r} is labelled twice", path, f"line {reader.line_num}")
        if not label:
            empty.append(name)
        elif label not in _LABELS:
            raise DataError(f"{label!r} is no label: 1 or 0, yes or no", path, f"line {reader.line_num}")
        else:
            labels[name] = _LABELS[label]
    unknown = [name for name in labels if name not in set(ids)]
    bare = [name for name in ids if name not in labels]
    for found, what in ((unknown, "labels of questions that are not in the sample"), (bare, "answers without a label")):
        if found:
            raise DataError(f"{len(found)} {what} (first: {found[0]!r})", path)
    return labels


def table3(cfg: PaperConfig) -> Result:
    """Sample, write the sheet, and where labels are given compare the judges with them. Raises as `evaluate` does."""
    assert cfg.out is not None
    setting = settings(cfg)[0]
    run = _answers(cfg, setting)
    records = sample(split_records(setting)[0], cfg.per_dimension, cfg.seeds[0])
    if not records:
        raise ConfigError("the split has no direct questions with gold answers")
    # as the columns of the paper
    records.sort(key=lambda record: (*DIMENSIONS, record.dimension).index(record.dimension))
    ids = [record.question_id for record in records]
    sheet = Path(cfg.out) / SHEET
    # somebody may be filling it in
    if not sheet.exists():
        write_sheet(sheet, records, run.rows)
    data: dict[str, Any] = {"sheet": str(sheet), "sampled": len(ids)}
    if cfg.labels is None and not cfg.small:
        waiting = f"{len(ids)} answers to label: fill in the column `label` of {sheet}, and start again with --labels."
        return Result({**data, "labels": None}, waiting, None)
    if cfg.labels is not None:
        labels, whose = read_sheet(cfg.labels, ids), "the label sheet"
    else:
        # the world knows its answers word for word; nobody has judged these
        labels, whose = {record.question_id: _exact(record, run.rows) for record in records}, "exact matches"
    labelled = [
        Labelled(r.question_id, labels[r.question_id], r.dimension or r.category or "none", None) for r in records
    ]
    judges = {run.report["identity"]["judge"]: [_verdict(run.rows[name]) for name in ids]}
    cases = [Case(r.question, r.answers, run.rows[r.question_id]["answer"]) for r in records]
    for judge in (*(_judge(setting, endpoint) for endpoint in cfg.judges), OfflineLLM()):
        if judge.name not in judges:
            judges[judge.name] = [ruling.value for ruling in judge_answers(judge, cases, samples=ids)]
    agreements = {name: by_group(verdicts, labelled) for name, verdicts in judges.items()}
    note = f"Labels: {whose}; {sum(labels.values())} of {len(labels)} answers are right.\n"
    panels = {
        name.split(" judge=")[-1]: {k.replace("_", " "): v["accuracy"] for k, v in one["groups"].items()}
        for name, one in agreements.items()
    }
    data |= {"labels": whose, "right": sum(labels.values()), "judges": agreements}
    return Result(data, f"{_table(agreements)}\n{note}", bars(panels, "Agreement of the judge with the labels, %"))


def _answers(cfg: PaperConfig, setting: Setting) -> Run:
    """The run of which answers are sampled: the one that is named, or one made here."""
    if not cfg.systems:
        return ask(setting, Path(str(cfg.out)) / "answers", ["x0"])["x0"]
    (name, folder), *more = named_paths(cfg.systems).items()
    if more or not folder.is_dir():
        raise ConfigError("table3 takes the answers of one finished run of remind evaluate, as NAME=FOLDER")
    asked, known = split_records(setting)
    FileAnswers(name, folder / PREDICTIONS, known, [record.question_id for record in asked])
    return load_run(folder)


def _judge(setting: Setting, endpoint: EndpointConfig) -> AuxiliaryLLM:
    """Its replies are kept in the cache of the config."""
    asked = setting.evaluate
    return Models(replace(asked, judge="llm", llm=replace(asked.llm, judge=endpoint)), Team()).judge


def _exact(record: StateRecord, rows: Rows) -> bool:
    return str(rows[record.question_id]["answer"]).strip().casefold() in {a.casefold() for a in record.answers}


def _verdict(row: Mapping[str, Any]) -> bool | None:
    """The run's own verdict on a direct answer; None where the judge gave none."""
    return None if row["accuracy"] is None else bool(row["accuracy"])


def _table(agreements: Mapping[str, Mapping[str, Any]]) -> str:
    groups = list(dict.fromkeys(name for one in agreements.values() for name in one["groups"]))

    def share(row: Mapping[str, Any] | None) -> str:
        accuracy = row and row["accuracy"]
        return f"{accuracy['value']:.2f} ({row['agree']}/{accuracy['n']})" if row and accuracy else "–"

    body = []
    for name, one in agreements.items():
        mean, kappa = one["mean_accuracy"], one["all"]["kappa"]
        figures = ["–" if value is None else f"{value:.2f}" for value in (mean, kappa)]
        body.append([name, *(share(one["groups"].get(group)) for group in groups), *figures, str(one["all"]["failed"])])
    heads = ["Judge", *(SHORT.get(group, group) for group in groups), "Avg", "Cohen's κ", "no verdict"]
    return markdown_table(heads, body)
