"""How well a judge agrees with people's labels (Appendix D.8, Table 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sklearn.metrics import cohen_kappa_score

from experiments.official.files import ResultFile
from experiments.official.longmemeval import Reference, load_references, verdict_of
from remind.core.errors import DataError
from remind.core.files import sha256_file, write_json
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.judge import Case, judge_answers
from remind.evaluation.run import Models
from remind.evaluation.statistics import wilson
from remind.evaluation.tables import plain
from remind.evaluation.team import Team
from remind.llm.endpoints import LLMConfig
from remind.perception.auxiliary import AuxiliaryLLM

_UNGROUPED = "none"


@dataclass
class AgreementConfig:
    """Compare a judge's verdicts with labels that stand in a file."""

    labels: str
    """JSON lines or a JSON list: question_id, label (true: the answer is right), question, references, prediction, and
    what groups them (dimension). LongMemEval's judged rows do too, together with questions."""
    judge: Literal["offline", "llm"] = "offline"
    """Judge to ask: offline, a rule; llm: the endpoint llm.judge."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Endpoint of the judge (judge llm)."""
    questions: str | None = None
    """LongMemEval's file of questions, for labels in judged rows; they are grouped by question type."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""


@dataclass(frozen=True)
class Labelled:
    """One labelled answer. `case`: what a judge is shown, where the file has it."""

    question_id: str
    label: bool
    group: str
    case: Case | None


def agreement(verdicts: Sequence[bool | None], labels: Sequence[bool]) -> dict[str, Any]:
    """Agreement of verdicts [n] with labels [n].

    Returns:
        n, failed (no verdict, in no other figure), agree, `accuracy` (`Estimate` with Wilson's interval), precision,
        recall and f1 of the answers that the judge accepts, and Cohen's `kappa`. None: undefined (nothing accepted,
        nothing to accept, or both sides always say the same one thing).
    """
    pairs = [(verdict, label) for verdict, label in zip(verdicts, labels, strict=True) if verdict is not None]
    first, second = [verdict for verdict, _ in pairs], [label for _, label in pairs]
    accepted, right = sum(v for v, _ in pairs), sum(t for _, t in pairs)
    both, agree = sum(v and t for v, t in pairs), sum(v == t for v, t in pairs)
    return {
        "n": len(labels),
        "failed": len(labels) - len(pairs),
        "agree": agree,
        "accuracy": wilson([float(v == t) for v, t in pairs]),
        "precision": both / accepted if accepted else None,
        "recall": both / right if right else None,
        "f1": 2 * both / (accepted + right) if accepted + right else None,
        "kappa": float(cohen_kappa_score(first, second)) if len({*first, *second}) > 1 else None,
    }


def by_group(verdicts: Sequence[bool | None], labelled: Sequence[Labelled]) -> dict[str, Any]:
    """`groups` → `agreement`, `all`, and `mean_accuracy`: the mean of the groups' accuracies (Avg in Table 3)."""
    groups = {}
    for name in dict.fromkeys(item.group for item in labelled):
        places = [n for n, item in enumerate(labelled) if item.group == name]
        groups[name] = agreement([verdicts[n] for n in places], [labelled[n].label for n in places])
    values = [row["accuracy"]["value"] for row in groups.values() if row["accuracy"]]
    return {
        "groups": groups,
        "all": agreement(verdicts, [item.label for item in labelled]),
        "mean_accuracy": sum(values) / len(values) if values else None,
    }


def load_labels(path: str | Path, questions: Mapping[str, Reference] | None = None) -> list[Labelled]:
    """The labelled answers of a file.

    Raises:
        DataError: a record without id or label, an id twice, a file without records.
    """
    file = ResultFile(path)
    labelled: dict[str, Labelled] = {}
    for index, record in enumerate(file.records):
        name, label = record.get("question_id"), record.get("label", verdict_of(record))
        if not isinstance(name, str) or not isinstance(label, bool):
            raise DataError("needs question_id and a label that is true or false", path, file.place(index))
        if name in labelled:
            raise DataError(f"question {name!r} is labelled twice", path, file.place(index))
        reference = questions.get(name) if questions else None
        group = reference.type if reference else record.get("dimension") or record.get("group") or _UNGROUPED
        labelled[name] = Labelled(name, label, str(group), _case(record, reference))
    if not labelled:
        raise DataError("holds no labels", path)
    return list(labelled.values())


def _case(record: Mapping[str, Any], reference: Reference | None) -> Case | None:
    prediction = record.get("prediction", record.get("hypothesis"))
    question = reference.question if reference else record.get("question")
    gold = [reference.answer] if reference else record.get("references")
    gold = [gold] if isinstance(gold, str) else gold
    if not isinstance(gold, list) or not gold or any(not isinstance(t, str) for t in (prediction, question, *gold)):
        return None
    return Case(str(question), tuple(gold), str(prediction))


def ask(judge: AuxiliaryLLM, labelled: Sequence[Labelled], path: str | Path) -> list[bool | None]:
    """The judge's verdicts on what the label file shows.

    Raises:
        DataError: an answer without question, references or prediction.
    """
    for item in labelled:
        if item.case is None:
            message = "to ask a judge, each label needs question, references and prediction as text"
            raise DataError(message, path, item.question_id)
    return [ruling.value for ruling in judge_answers(judge, [item.case for item in labelled if item.case])]


def judge_agreement(cfg: AgreementConfig) -> dict[str, Any]:
    """See `AgreementConfig`.

    Raises:
        DataError: files that cannot be used.
        ConfigError, ModelError: a judge that cannot be asked.
    """
    questions = load_references(cfg.questions) if cfg.questions else None
    labelled = load_labels(cfg.labels, questions)
    judge = Models(EvaluateConfig("", "", "", judge=cfg.judge, llm=cfg.llm), Team()).judge
    verdicts = ask(judge, labelled, cfg.labels)
    inputs = {"labels": cfg.labels, "questions": cfg.questions}
    result = {
        "format": "remind-judge-agreement",
        "judge": judge.name,
        "inputs": {role: sha256_file(path) for role, path in inputs.items() if path},
        **by_group(verdicts, labelled),
    }
    if cfg.out is not None:
        write_json(cfg.out, result)
    return result


def table(result: Mapping[str, Any]) -> str:
    """The figures in plain lines; accuracy as in Table 3, with its 95 % interval."""

    def figure(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    rows = []
    for name, row in {**result["groups"], "all": result["all"]}.items():
        cell, accuracy = "–", row["accuracy"]
        if accuracy is not None:
            share = f"{accuracy['value']:.2f} ({row['agree']}/{accuracy['n']})"
            cell = f"{share} [{accuracy['low']:.2f}, {accuracy['high']:.2f}]"
        figures = [figure(row[key]) for key in ("precision", "recall", "f1", "kappa")]
        rows.append([name, str(row["n"]), str(row["failed"]), cell, *figures])
    heads = ["", "n", "failed", "accuracy", "precision", "recall", "F1", "kappa"]
    mean = f"mean over groups: {figure(result['mean_accuracy'])}"
    return "\n".join([f"judge: {result['judge']}", plain(heads, rows), mean])


if __name__ == "__main__":
    from remind.core.cli import main

    main(
        AgreementConfig,
        lambda cfg: print(table(judge_agreement(cfg))),
        "Compare a judge's verdicts with labels in a file, by dimension.",
    )
