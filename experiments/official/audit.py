"""Known errors in LoCoMo's gold (`errors.json`), put right or left out.

A record names a question, its gold answer and cited evidence as the dataset has them, what is wrong, and both put
right. Where only the citation is wrong the answer stays. Corrected answers carry remarks in brackets, meant for
readers; they are dropped, since no prediction can be expected to repeat them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.official.files import ResultFile
from remind.core.errors import DataError
from remind.data.dialogue import Corpus
from remind.data.readers.evidence import EvidenceIndex

#: The kind of error that leaves the answer right.
CITATION = "WRONG_CITATION"
_FIELDS = ("question_id", "question", "golden_answer", "error_type", "correct_answer")
_REMARK = re.compile(r"\s*[(\[][^()\[\]]*[)\]]")


@dataclass(frozen=True)
class Correction:
    """One record. Answers as text; evidence as the annotators wrote it."""

    id: str
    question: str
    category: int
    kind: str
    gold: str
    answer: str
    cited: tuple[str, ...]
    evidence: tuple[str, ...]

    @property
    def changes_answer(self) -> bool:
        return self.answer != self.gold

    @property
    def doubtful(self) -> bool:
        """Whether the dataset's answer is itself in doubt, not just where it stands."""
        return self.kind != CITATION


@dataclass
class AuditReport:
    """What came of an audit, by id of its records.

    Attributes:
        matched: records whose question is in the data with the gold answer (and citation) they speak of.
        answers, evidence: those of them that change the answer, the evidence.
        conflicting: the question is there, but with other gold: left as it is.
        absent: no such question.
    """

    matched: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    conflicting: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def line(self) -> str:
        """In one line, for a console."""
        return (
            f"audit: {len(self.matched)} records match, {len(self.answers)} change an answer, {len(self.evidence)} "
            f"change evidence; {len(self.conflicting)} speak of other gold than the file has, {len(self.absent)} of "
            "questions it has not"
        )

    def note(self, correction: Correction) -> None:
        """Count a record that matches."""
        self.matched.append(correction.id)
        if correction.changes_answer:
            self.answers.append(correction.id)
        if set(correction.evidence) != set(correction.cited):
            self.evidence.append(correction.id)


class Audit:
    """Corrections by question."""

    def __init__(self, corrections: Sequence[Correction]) -> None:
        self.corrections = tuple(corrections)
        self._by_question: dict[tuple[str, int], list[Correction]] = {}
        for correction in corrections:
            self._by_question.setdefault((correction.question, correction.category), []).append(correction)

    def candidates(self, question: str, category: object) -> list[Correction]:
        """Corrections of questions of that text and category."""
        return self._by_question.get((question.strip(), category), []) if isinstance(category, int) else []


def load_audit(path: str | Path) -> Audit:
    """Read `errors.json`.

    Raises:
        DataError: a record that lacks what it needs.
    """
    file = ResultFile(path)
    corrections = []
    for index, record in enumerate(file.records):
        category = record.get("category")
        evidence = [record.get(name) for name in ("cited_evidence", "correct_evidence")]
        if (
            any(not isinstance(record.get(name), str) for name in _FIELDS)
            or not isinstance(category, int)
            or any(not isinstance(e, list) or any(not isinstance(x, str) for x in e) for e in evidence)
        ):
            message = f"not a record of an audit: it needs {', '.join(_FIELDS)}, category, cited_ and correct_evidence"
            raise DataError(message, path, file.place(index))
        cited, right = (tuple(e) for e in evidence if isinstance(e, list))
        gold = record["golden_answer"]
        correct = gold if record["error_type"] == CITATION else without_remarks(record["correct_answer"], gold)
        corrections.append(
            Correction(
                record["question_id"],
                record["question"].strip(),
                category,
                record["error_type"],
                gold,
                correct,
                cited,
                right,
            )
        )
    return Audit(corrections)


def without_remarks(text: str, gold: str) -> str:
    """The text without what stands in brackets; the gold answer itself where only case and full stop differ."""
    bare = text
    while (shorter := _REMARK.sub("", bare)) != bare:
        bare = shorter
    bare = bare.strip() or text.strip()
    return gold if bare.rstrip(".").casefold() == gold.strip().rstrip(".").casefold() else bare


def audit_samples(
    samples: Sequence[dict[str, Any]], audit: Audit
) -> tuple[dict[tuple[int, int], Correction], AuditReport]:
    """Corrections of LoCoMo's own records, by position of sample and question; the records stay as they are."""
    report, found = AuditReport(), {}
    seen: set[str] = set()
    for number, sample in enumerate(samples):
        for place, item in enumerate(sample.get("qa", [])):
            question, category = str(item.get("question", "")), item.get("category")
            seen.update(correction.id for correction in audit.candidates(question, category))
            stated = str(item.get("answer")), tuple(item.get("evidence") or [])
            for correction in audit.candidates(question, category):
                if stated == (correction.gold, correction.cited):
                    found[number, place] = correction
                    report.note(correction)
    _rest(report, audit, seen)
    return found, report


def audit_corpus(corpus: Corpus, audit: Audit) -> tuple[Corpus, AuditReport]:
    """The corpus that LoCoMo's reader gave with answers and evidence put right.

    A corrected reference that names no turn is left out of the evidence; `report.evidence` counts it all the same.
    """
    report, questions = AuditReport(), []
    seen: set[str] = set()
    for question in corpus.questions:
        candidates = audit.candidates(question.text, question.category)
        seen.update(correction.id for correction in candidates)
        if candidates:
            index = EvidenceIndex([turn.id for turn in corpus.dialogue(question.dialogue_id).turns])
        for correction in candidates:
            cited = index.resolve(list(correction.cited)).turn_ids
            if question.answers == (correction.gold,) and set(question.evidence) == set(cited):
                report.note(correction)
                right = index.resolve(list(correction.evidence)).turn_ids
                question = replace(question, answers=(correction.answer,), evidence=right)
                break
        questions.append(question)
    _rest(report, audit, seen)
    return replace(corpus, questions=tuple(questions)), report


def _rest(report: AuditReport, audit: Audit, seen: set[str]) -> None:
    matched = set(report.matched)
    report.conflicting = [c.id for c in audit.corrections if c.id in seen and c.id not in matched]
    report.absent = [c.id for c in audit.corrections if c.id not in seen]
