"""Audited LoCoMo gold: what is corrected, what is dropped, and what matches nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from experiments.official.files import ResultFile
from experiments.official.locomo import audit_samples, load_audit, score_samples, without_remarks
from experiments.official.score import ScoreOfficialConfig, score_official, table
from remind.core.errors import DataError


def item(category: int, said: str, answer: str, question: str = "question 4?") -> dict[str, Any]:
    """A question with a prediction of the model m, which was shown D1:4."""
    given = {"m_prediction": said, "m_prediction_context": ["D1:4"]}
    return {"question": question, "answer": answer, "evidence": ["D1:3"], "category": category, **given}


def save(path: Path, items: list[dict[str, Any]]) -> ResultFile:
    path.write_text(json.dumps([{"sample_id": "conv-26", "qa": items}], indent=2))
    return ResultFile(path)


RECORD = {
    "question_id": "locomo_0_qa0",
    "question": "question 4?",
    "golden_answer": "lamp",
    "category": 4,
    "error_type": "HALLUCINATION",
    "cited_evidence": ["D1:3"],
    "correct_evidence": ["D1:3", "D1:4"],
    "correct_answer": "a candle (D1:4 says so)",
}


def audit_of(path: Path, *changes: dict[str, Any]) -> Path:
    records = [{**RECORD, "question_id": f"locomo_0_qa{n}", **change} for n, change in enumerate(changes)]
    path.write_text(json.dumps(records))
    return path


def test_audited_gold_corrects_or_drops(tmp_path: Path) -> None:
    file = save(
        tmp_path / "r.json",
        [
            item(4, "candle", "lamp"),
            item(2, "May", "May", question="when?"),
            item(4, "lamp", "lantern", question="other?"),
        ],
    )
    path = audit_of(
        tmp_path / "errors.json",
        {},
        {"question": "when?", "category": 2, "golden_answer": "May", "error_type": "WRONG_CITATION",
         "correct_answer": "May (right, but cite D1:4)", "correct_evidence": ["D1:4"]},
        {"question": "other?"},
        {"question": "who?"},
    )  # fmt: skip
    audit = load_audit(path)
    plain, _ = score_samples(file)
    assert [(row.f1, row.recall) for row in plain] == [(0.0, 0.0), (1.0, 0.0), (0.0, 0.0)]
    before = file.dump()
    answered, counts = score_samples(file, audit=audit)
    assert [(row.f1, row.recall) for row in answered] == [(1.0, 0.5), (1.0, 1.0), (0.0, 0.0)]
    assert asdict(counts["audit"]) == {
        "matched": ["locomo_0_qa0", "locomo_0_qa1"],
        "answers": ["locomo_0_qa0"],
        "evidence": ["locomo_0_qa0", "locomo_0_qa1"],
        "conflicting": ["locomo_0_qa2"],
        "absent": ["locomo_0_qa3"],
    }
    dropped, _ = score_samples(file, audit=audit, mode="drop")
    assert [row.f1 for row in dropped] == [None, 1.0, 0.0]
    # the file's figures are those of the published gold
    assert file.dump() == before
    report = score_official(
        ScoreOfficialConfig(str(file.path), str(tmp_path / "out"), audit=str(path), audit_mode="drop", bootstrap=20)
    )
    assert report["written_back"] == "identical"
    assert report["counts"]["audit"]["absent"] == ["locomo_0_qa3"]
    assert "absent 1" in table(report)


@pytest.mark.parametrize(
    ("text", "gold", "bare"),
    [
        ("2022 (but the title (a book) is made up)", "x", "2022"),
        ("Cakes (right) [D1:1], pies", "x", "Cakes, pies"),
        ("Lamp.", "lamp", "lamp"),
        ("(unknown)", "x", "(unknown)"),
        ("over 9 km", "x", "over 9 km"),
    ],
)
def test_remarks_in_brackets_are_dropped(text: str, gold: str, bare: str) -> None:
    assert without_remarks(text, gold) == bare


def test_a_bad_audit_is_told(tmp_path: Path) -> None:
    for change in ({"category": "4"}, {"correct_answer": None}, {"cited_evidence": "D1:3"}):
        with pytest.raises(DataError, match=r"record 1.*not a record of an audit"):
            load_audit(audit_of(tmp_path / "e.json", change))


def test_the_published_audit_on_the_published_gold(remind_data: Path) -> None:
    """Every record about one of the six dialogues at hand matches; the others are of dialogues that are not here."""
    audit = load_audit(remind_data / "locomo_audit" / "errors.json")
    file = ResultFile(remind_data / "locomo" / "locomo_dev.json")
    found, report = audit_samples(file.records, audit)
    assert len(audit) == 156
    assert sum(correction.doubtful for correction in audit) == 99
    # the records number the ten published dialogues; these stand at places 0, 2, 3, 5, 7 and 9
    here = [c.id for c in audit if c.id.split("_")[1] in {"0", "2", "3", "5", "7", "9"}]
    assert sorted(report.matched) == sorted(here)
    assert len(found) == len(here) == 101
    assert report.conflicting == []
    assert len(report.absent) == 55
