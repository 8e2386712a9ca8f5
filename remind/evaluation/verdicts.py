"""Verdicts on disk: one JSON line per question, each with the judge that gave it and the hash of what was judged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import DataError
from remind.core.files import write_rows
from remind.evaluation.jsonl import bad_row, put_row, read_rows
from remind.evaluation.judge import Case, Ruling, rule
from remind.evaluation.parse import ParsedAnswer, parse_answer
from remind.models.generate import Generation
from remind.states.parquet import StateRecord

if TYPE_CHECKING:
    from remind.states.auxiliary import AuxiliaryLLM

#: Stands for the judge of questions with options: their letters are compared.
LETTERS_RULE = "letters"


@dataclass(frozen=True)
class Verdicts:
    """The rulings on a run's answers.

    Attributes:
        judge: who judged the direct ones.
        rulings: one per question; None where there was nothing to judge: options, no gold answer, no output.
        resumed: how many were known from before.
    """

    judge: str
    rulings: list[Ruling | None]
    resumed: int = 0


def parse_all(records: Sequence[StateRecord], outputs: Sequence[Generation]) -> list[ParsedAnswer]:
    """What each output says."""
    return [
        parse_answer(output.text, record.format, record.options, record.visual)
        for record, output in zip(records, outputs, strict=True)
    ]


def to_judge(record: StateRecord, output: Generation) -> bool:
    """Whether a judge has to say if the answer is right."""
    return record.format == "direct" and bool(record.answers) and output.failure is None


def case_of(record: StateRecord, parsed: ParsedAnswer) -> Case:
    return Case(record.question, record.answers, parsed.answer)


def case_hash(case: Case) -> str:
    """Sixteen hex digits of a SHA-256 over everything the judge sees."""
    return hashlib.sha256(json.dumps(list(case)).encode()).hexdigest()[:16]


def judge_run(
    judge: AuxiliaryLLM,
    records: Sequence[StateRecord],
    outputs: Sequence[Generation],
    parsed: Sequence[ParsedAnswer],
    path: Path,
) -> Verdicts:
    """Judge the direct answers, and write a row per question. Verdicts that stand there already are not asked again.

    Raises:
        DataError: rows at `path` that are no verdicts.
        ModelError: a judge that cannot be used at all.
    """
    asked = [n for n, (record, output) in enumerate(zip(records, outputs, strict=True)) if to_judge(record, output)]
    cases = [case_of(records[n], parsed[n]) for n in asked]
    there = _stored(path)
    hashes = [case_hash(case) for case in cases]
    known = {
        case: Ruling(there[key])
        for case, digest in zip(cases, hashes, strict=True)
        if (key := (judge.name, digest)) in there
    }
    with path.open("a", encoding="utf-8") as file:

        def keep(index: int, ruling: Ruling) -> None:
            put_row(file, _judged(records[asked[index]], judge.name, hashes[index], ruling))

        given = rule(judge, cases, known, keep, [records[n].question_id for n in asked])
    rulings: list[Ruling | None] = [None] * len(records)
    for n, ruling in zip(asked, given, strict=True):
        rulings[n] = ruling
    digest_of = dict(zip(asked, hashes, strict=True))
    rows = []
    for n, (record, output, own) in enumerate(zip(records, outputs, rulings, strict=True)):
        if own is not None:
            rows.append(_judged(record, judge.name, digest_of[n], own))
        else:
            rows.append(_by_letters(record, output, parsed[n]))
    write_rows(path, rows)
    return Verdicts(judge.name, rulings, sum(case in known for case in cases))


def read_verdicts(
    records: Sequence[StateRecord], outputs: Sequence[Generation], parsed: Sequence[ParsedAnswer], path: Path
) -> Verdicts:
    """The rulings that an earlier stage wrote.

    Raises:
        DataError: an answer without a verdict, or verdicts of several judges.
    """
    rows = {row["question_id"]: row for _, row in read_rows(path, "a verdict")}
    judges: set[str] = set()
    rulings: list[Ruling | None] = []
    for record, output, answer in zip(records, outputs, parsed, strict=True):
        if not to_judge(record, output):
            rulings.append(None)
            continue
        row = rows.get(record.question_id)
        if row is None or row.get("case") != case_hash(case_of(record, answer)):
            raise DataError("its answer has no verdict yet; run stage judge", path, record.question_id)
        judges.add(str(row.get("judge")))
        rulings.append(Ruling(row.get("verdict"), str(row.get("why", "")), str(row.get("message", ""))))
    if len(judges) > 1:
        raise DataError(f"verdicts of several judges ({', '.join(sorted(judges))}); run stage judge", path)
    return Verdicts(judges.pop() if judges else "none", rulings, len(rulings))


def _stored(path: Path) -> dict[tuple[str, str], bool]:
    """Verdicts by judge and case; failures are left out, so that they are asked again."""
    found: dict[tuple[str, str], bool] = {}
    for number, row in read_rows(path, "a verdict"):
        verdict, judge, case = row.get("verdict"), row.get("judge"), row.get("case")
        if not isinstance(verdict, bool | None) or not isinstance(judge, str) or not isinstance(case, str):
            raise bad_row(path, number, "a verdict")
        if verdict is not None and judge != LETTERS_RULE:
            found[judge, case] = verdict
    return found


def _judged(record: StateRecord, judge: str, case: str, ruling: Ruling) -> dict[str, Any]:
    return {
        "question_id": record.question_id,
        "judge": judge,
        "case": case,
        "verdict": ruling.value,
        "why": ruling.why,
        "message": ruling.message,
    }


def _by_letters(record: StateRecord, output: Generation, parsed: ParsedAnswer) -> dict[str, Any]:
    verdict: bool | None = None
    why = ""
    if output.failure is not None:
        why = output.failure
    elif not record.answers:
        why = "no gold answer"
    elif not parsed.readable:
        why = "unparsable"
    else:
        verdict = set(parsed.letters) == set(record.answers)
    return _judged(record, LETTERS_RULE, "", Ruling(verdict, why))
