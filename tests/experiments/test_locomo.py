"""LoCoMo's result JSON: figures by category against hand-computed ones, and our answers in its format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.official.export import ExportOfficialConfig, export_official, hypotheses
from experiments.official.files import ResultFile
from experiments.official.locomo import by_category, models_of, recall_of, score_samples
from experiments.official.score import ScoreOfficialConfig, score_official
from remind.core.errors import ConfigError, DataError


def item(category: int, said: str | None, answer: Any = None, **more: Any) -> dict[str, Any]:
    """A question with a prediction of the model m."""
    gold = {} if answer is None else {"answer": answer}
    given = {} if said is None else {"m_prediction": said}
    return {"question": f"question {category}?", **gold, "evidence": ["D1:3"], "category": category, **given, **more}


def save(path: Path, *samples: list[dict[str, Any]]) -> ResultFile:
    value = [{"sample_id": f"conv-{n}", "qa": items} for n, items in enumerate(samples, start=26)]
    path.write_text(json.dumps(value, indent=2))
    return ResultFile(path)


def test_figures_by_hand_and_as_the_scorer_writes_them(tmp_path: Path) -> None:
    file = save(
        tmp_path / "r.json",
        [
            item(1, "camping, running", "painting, camps"),  # 1 of 2 parts
            item(2, "7 May, 2023", "7 May 2023"),
            item(3, "she hikes", "hiking; for fun"),  # 2 * 1/2 * 1 / (1/2 + 1)
            item(4, "2022", 2022),
            item(4, "nothing alike", "lamp"),
            item(5, "No information available.", adversarial_answer="a lamp"),
            item(5, "It is a lamp", adversarial_answer="a lamp"),
            item(5, "that was NOT MENTIONED"),
            item(1, "x", "y, z"),
            item(4, None, "lamp"),
            item(4, "lamp"),
        ],
    )
    answered, counts = score_samples(file)
    values = [1 / 2, 1.0, 2 / 3, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, None]
    assert [row.f1 for row in answered] == [None if v is None else pytest.approx(v) for v in values]
    assert counts == {
        "model": "m",
        "questions": 11,
        "answered": 10,
        "unanswered": 1,
        "without_gold_answer": 1,
        "changed": 0,
    }
    written = [question.get("m_f1", "none") for question in file.records[0]["qa"]]
    # whole numbers where the scorer has them: nothing in common outside category 1, and all of category 5
    assert json.dumps(written) == '[0.5, 1.0, 0.667, 1.0, 0, 1, 0, 1, 0.0, "none", "none"]'
    found = by_category(answered, resamples=50)
    assert {name: (row["n"], row["f1"]["value"]) for name, row in found.items()} == {
        "1": (2, 0.25),
        "2": (1, 1.0),
        "3": (1, pytest.approx(2 / 3)),
        "4": (3, 0.5),
        "5": (3, pytest.approx(2 / 3)),
        "1-4": (7, pytest.approx((0.5 + 1 + 2 / 3 + 1 + 0 + 0) / 6)),
        "all": (10, pytest.approx((0.5 + 1 + 2 / 3 + 1 + 0 + 1 + 0 + 1 + 0) / 9)),
    }


def test_a_category_without_a_scorer_and_odd_values_are_told(tmp_path: Path) -> None:
    for bad, message in (
        (item(6, "x", "y"), "category should be 1 to 5"),
        (item(True, "x", "y"), "category should be 1 to 5"),
        (item(4, "x", "y", m_prediction=["x"]), "should be text"),
        (item(4, "x", "y", m_prediction_context="D1:3"), "list of ids"),
    ):
        with pytest.raises(DataError, match=rf"conv-26-q000\]: .*{message}"):
            score_samples(save(tmp_path / "r.json", [bad]))


def test_recall() -> None:
    assert recall_of(["D1:3", "D2:4"], ["D2:4", "D9:9"]) == 0.5
    assert recall_of(["D1:3", "D2:4", "D2:5"], ["S2", "S7"]) == pytest.approx(2 / 3)
    assert recall_of(["D12:1"], ["S1", "S2"]) == 0.0
    assert recall_of([], ["D1:1"]) is None
    assert recall_of(["D1:1"], []) == 0.0


def test_recall_is_written_where_a_context_is(tmp_path: Path) -> None:
    file = save(
        tmp_path / "r.json",
        [
            item(4, "x", "x", m_prediction_context=["D1:3"]),
            item(4, "x", "x", m_prediction_context=["D1:4"]),
            item(4, "x", "x", evidence=[], m_prediction_context=["D1:4"]),
            item(4, "x", "x"),
        ],
    )
    answered, _ = score_samples(file)
    assert [row.recall for row in answered] == [1.0, 0.0, None, None]
    assert [question.get("m_recall") for question in file.records[0]["qa"]] == [1.0, 0.0, 1, None]
    assert by_category(answered)["4"]["recall"]["n"] == 2


def test_figures_that_are_right_leave_the_bytes_alone_and_wrong_ones_are_counted(tmp_path: Path) -> None:
    file = save(tmp_path / "r.json", [item(1, "a1, b1", "b1, c1"), item(4, "x é", "x é")], [item(5, "y")])
    score_samples(file)
    file.write(tmp_path / "scored.json")
    again = ResultFile(tmp_path / "scored.json")
    _, counts = score_samples(again)
    assert (again.dump(), counts["changed"]) == (file.dump(), 0)
    again.records[0]["qa"][1]["m_f1"] = 0.25
    assert score_samples(again)[1]["changed"] == 1
    assert again.dump() == file.dump()


def test_a_model_must_be_named_where_there_are_several(tmp_path: Path) -> None:
    file = save(tmp_path / "r.json", [item(4, "x", "x", gpt_top_5_prediction="y")])
    assert models_of(file) == ["m", "gpt_top_5"]
    with pytest.raises(ConfigError, match="m, gpt_top_5: name one"):
        score_samples(file)
    assert score_samples(file, "gpt_top_5")[0][0].f1 == 0.0
    with pytest.raises(ConfigError, match="no predictions of 'other'"):
        score_samples(file, "other")
    with pytest.raises(ConfigError, match="no predictions"):
        score_samples(save(tmp_path / "r.json", [item(4, None, "x")]))


def run_folder(folder: Path, rows: list[dict[str, Any]]) -> str:
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps({"identity": {"split": "test"}, "overall": {"parse_rate": None}}))
    (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def ours(name: str, answer: str, failure: str | None = None) -> dict[str, Any]:
    return {"question_id": name, "answer": answer, "failure": failure, "accuracy": None}


def test_our_answers_in_both_formats(tmp_path: Path) -> None:
    data = tmp_path / "locomo.json"
    save(data, [item(4, None, "lamp"), item(5, None), item(2, None, "May")], [item(4, None, "x")])
    rows = [ours("conv-26-q000", "a lamp"), ours("conv-26-q001", "lamp"), ours("conv-26-q002", "", "error")]
    run = run_folder(tmp_path / "run", rows)
    out = tmp_path / "out.json"
    assert export_official(ExportOfficialConfig(run, str(out), "locomo", str(data), "m")) == 2
    (sample,) = json.loads(out.read_text())
    assert sample["sample_id"] == "conv-26"
    figures = [(question.get("m_prediction"), question.get("m_f1")) for question in sample["qa"]]
    assert figures == [("a lamp", 1.0), ("lamp", 0), (None, None)]
    assert out.read_text() == json.dumps(json.loads(out.read_text()), indent=2)
    # it goes in again as it came out
    report = score_official(ScoreOfficialConfig(str(out), str(tmp_path / "again")))
    assert (report["written_back"], report["counts"]["unanswered"]) == ("identical", 1)

    lines = tmp_path / "out.jsonl"
    assert export_official(ExportOfficialConfig(run, str(lines), "longmemeval")) == 2
    assert [json.loads(line) for line in lines.read_text().splitlines()] == hypotheses(rows)
    assert list(hypotheses(rows)[0]) == ["question_id", "hypothesis"]


def test_export_refusals(tmp_path: Path) -> None:
    data = tmp_path / "locomo.json"
    save(data, [item(4, None, "lamp")])
    run = run_folder(tmp_path / "run", [ours("conv-99-q000", "x")])
    with pytest.raises(ConfigError, match="dataset file"):
        export_official(ExportOfficialConfig(run, str(tmp_path / "o.json"), "locomo"))
    with pytest.raises(DataError, match=r"conv-99-q000\]: 1 answers are to questions"):
        export_official(ExportOfficialConfig(run, str(tmp_path / "o.json"), "locomo", str(data)))
    with pytest.raises(ConfigError, match="choose another"):
        export_official(ExportOfficialConfig(run, str(data), "locomo", str(data)))
    assert not (tmp_path / "o.json").exists()
