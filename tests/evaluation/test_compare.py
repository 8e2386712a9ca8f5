"""Comparing two runs: differences, refusals that say why, the script, and runs that evaluate really made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.official.export import ExportOfficialConfig, export_official
from remind.core.errors import ConfigError, DataError
from remind.evaluation.compare import compare, load_run, table
from remind.evaluation.config import CompareConfig, EvaluateConfig
from remind.evaluation.run import run_evaluation
from remind.evaluation.statistics import paired_bootstrap
from remind.states.records import StateRecord

ROOT = Path(__file__).parents[2]


IDENTITY = {"states": "1" * 64, "level": "x0", "split": "test", "judge": "offline-1", "encoder": "minilm", "model": "a"}


def question(name: str, accuracy: float | None, **more: Any) -> dict[str, Any]:
    row = {"question_id": name, "dialogue_id": "d", "format": "direct", "gold": ["x"], "failure": None}
    return {**row, "score_failure": None, "accuracy": accuracy, "f1": accuracy, **more}


def run(folder: Path, rows: list[dict[str, Any]], report: dict[str, Any] | None = None, **identity: Any) -> Path:
    folder.mkdir()
    base = {
        "identity": {**IDENTITY, **identity},
        "overall": {"n": len(rows), "failed": 0, "no_verdict": 0, "accuracy": None, "parse_rate": None, "f1": None},
        "states": {"inputs": {"talk.json": "2" * 64}},
        "prompts": {},
    }
    (folder / "report.json").write_text(json.dumps({**base, **(report or {})}))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "predictions.jsonl").write_text(text, encoding="utf-8")
    return folder


FIRST = [question(f"q{n}", float(n % 2), dialogue_id=f"d{n // 4}") for n in range(8)]
SECOND = [question(f"q{n}", float(n % 4 != 0), dialogue_id=f"d{n // 4}") for n in range(8)]


CHAT = {"judge": "chat-1 judge=m@server"}


def test_differences_by_format_and_measure(tmp_path: Path) -> None:
    options = [question("o1", 1.0, format="single", gold=["A"], f1=None)]
    others = [question("o1", 0.0, format="single", gold=["A"], f1=None, score_failure="unparsable")]
    unjudged = [question("j1", 1.0, format="multi"), question("j1", None, format="multi", f1=None)]
    unjudged[1]["score_failure"] = "judge"
    one = run(tmp_path / "one", FIRST + options + unjudged[:1])
    two = run(tmp_path / "two", [*reversed(SECOND), *others, unjudged[1]], level="x1", model="b")
    out = tmp_path / "c.json"
    result = compare(CompareConfig(str(one), str(two), str(out), resamples=200))
    direct = result["differences"]["direct"]
    assert (direct["accuracy"]["first"], direct["accuracy"]["second"]) == (0.5, 0.75)
    dialogues = [r["dialogue_id"] for r in FIRST]
    expected = paired_bootstrap(
        [r["accuracy"] for r in FIRST], [r["accuracy"] for r in SECOND], dialogues, resamples=200
    )
    assert direct["accuracy"] == direct["f1"] == expected
    # the model's failure is wrong; without a verdict there is no pair
    assert list(result["differences"]["single"]) == ["accuracy"]
    assert result["differences"]["single"]["accuracy"]["value"] == -1.0
    assert result["differences"]["multi"] == {}
    assert (result["differences"]["all"]["accuracy"]["n"], result["differences"]["all"]["f1"]["n"]) == (9, 8)
    assert (result["n"], result["dropped"], result["failed"], result["no_verdict"]) == (10, [0, 0], [0, 1], [0, 1])
    assert result["differing"] == {"level": ["x0", "x1"], "model": ["a", "b"]}
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    shown = table(result)
    assert "differs: level: 'x0' and 'x1'" in shown
    assert "only_common" not in shown
    assert direct["accuracy"]["units"] == 2
    assert "over dialogues" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "dev"}, r"they differ in: split \('test' and 'dev'\)$"),
        ({"judge": "offline-2"}, r"judge \('offline-1' and 'offline-2'\)"),
        ({"encoder": "other"}, r"encoder \('minilm' and 'other'\)"),
        (
            {"report": {"states": {"inputs": {"talk.json": "3" * 64, "more.json": "4" * 64}}}},
            r"data.more.json \(None and '4{64}'\); data.talk.json \('2{64}' and '3{64}'\)",
        ),
        ({"split": "dev", "judge": "x"}, r"judge \('offline-1' and 'x'\); split \('test' and 'dev'\)"),
        ({**CHAT, "judge_prompt": "bbbb"}, r"judge_prompt \('aaaa' and 'bbbb'\)"),
    ],
)
def test_refuses_runs_of_another_yardstick(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    same = {**CHAT, "judge_prompt": "aaaa"} if "prompt" in message else {}
    one, two = run(tmp_path / "one", FIRST, **same), run(tmp_path / "two", SECOND, **changes)
    for only_common in (False, True):
        with pytest.raises(ConfigError, match=message):
            compare(CompareConfig(str(one), str(two), only_common=only_common))


def test_refuses_other_questions_unless_told_and_then_says_so(tmp_path: Path) -> None:
    one, two = run(tmp_path / "one", FIRST), run(tmp_path / "two", [*SECOND[3:], question("new", 1.0)])
    with pytest.raises(ConfigError, match=r"3 only in the first: q0, q1, q2, 1 only in the second: new; .*other 5"):
        compare(CompareConfig(str(one), str(two)))
    result = compare(CompareConfig(str(one), str(two), only_common=True, resamples=50))
    assert (result["n"], result["dropped"], result["only_common"]) == (5, [3, 1], True)
    assert "dropped: 3 in the first, 1 in the second" in table(result)
    three = run(tmp_path / "three", [question("alone", 1.0)])
    with pytest.raises(ConfigError, match="no question in common"):
        compare(CompareConfig(str(one), str(three), only_common=True))
    four = run(tmp_path / "four", [{**SECOND[0], "gold": ["y"]}, *SECOND[1:]])
    with pytest.raises(ConfigError, match=r"gold answers of 1 questions \(q0: .*'x'.* and .*'y'"):
        compare(CompareConfig(str(one), str(four), only_common=True))


def test_questions_that_took_no_part_are_neither_right_nor_wrong(tmp_path: Path) -> None:
    absent = {**SECOND[1], "left_out": "no gold evidence"}
    absent = {key: value for key, value in absent.items() if key not in ("accuracy", "f1", "score_failure")}
    one, two = run(tmp_path / "one", FIRST), run(tmp_path / "two", [SECOND[0], absent, *SECOND[2:]])
    result = compare(CompareConfig(str(one), str(two), resamples=5))
    assert {name: row["n"] for name, row in result["differences"]["all"].items()} == {
        "accuracy": 7,
        "f1": 7,
    }
    assert (result["n"], result["left_out"], result["failed"]) == (8, [0, 1], [0, 0])
    assert "left out: 0 in the first, 1 in the second" in table(result)


def test_reading_runs_and_folders_without_one(tmp_path: Path) -> None:
    # lines end at line feeds only
    lines = run(tmp_path / "lines", [question("q", 1.0, text="a\u2028b\x0bc\u0085d"), question("p\u2028", 0.0)])
    assert list(load_run(lines).rows) == ["q", "p\u2028"]
    one = run(tmp_path / "one", FIRST)
    with pytest.raises(DataError, match=r"report\.json: no such file"):
        load_run(tmp_path / "none")
    report = json.loads((one / "report.json").read_text())
    earlier = {name: value for name, value in report["overall"].items() if name != "parse_rate"}
    for other in ([], {}, {**report, "overall": earlier}):
        (one / "report.json").write_text(json.dumps(other))
        with pytest.raises(DataError, match=r"report\.json: not the report .* run `remind evaluate` again"):
            load_run(one)
    (one / "report.json").write_text(json.dumps({**report, "conditions": {"x1": {}}}))
    (one / "predictions.jsonl").write_text(json.dumps({"question_id": "q", "text": "unscored"}) + "\n")
    with pytest.raises(DataError, match=r"\[q\]: not a scored prediction"):
        load_run(one)
    (one / "predictions.jsonl").unlink()
    with pytest.raises(DataError, match=r"predictions\.jsonl: no such file; .*name the folder of one: x1$"):
        load_run(one)


def test_two_levels_of_the_same_states(
    tmp_path: Path, six: list[StateRecord], write_states: Callable[..., Path]
) -> None:
    cfg = EvaluateConfig(
        states=str(write_states(*six)),
        model="nano-untrained",
        out=str(tmp_path / "x0"),
        max_new_tokens=2,
        bootstrap=10,
    )
    reports = [run_evaluation(cfg), run_evaluation(replace(cfg, level="x1", out=str(tmp_path / "x1")))]
    result = compare(CompareConfig(str(tmp_path / "x0"), str(tmp_path / "x1"), resamples=50))
    assert result["differing"] == {"level": ["x0", "x1"]}
    assert result["n"] == 6
    for name in ("evidence_recall", "accuracy", "parse_rate", "bleu1"):
        row = result["differences"]["all"][name]
        assert (row["first"], row["second"]) == pytest.approx(
            tuple(report["overall"][name]["value"] for report in reports)
        )
        assert row["n"] == reports[0]["overall"][name]["n"]

    path = tmp_path / "x1" / "predictions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    with pytest.raises(ConfigError, match=r"questions \(2 only in the first: d2, m2"):
        compare(CompareConfig(str(tmp_path / "x0"), str(tmp_path / "x1")))

    out = tmp_path / "rows.jsonl"
    rows = [json.loads(line) for line in (tmp_path / "x0" / "predictions.jsonl").read_text().split("\n") if line]
    answered = [row for row in rows if row["failure"] is None]
    assert export_official(ExportOfficialConfig(str(tmp_path / "x0"), str(out), "longmemeval")) == len(answered) == 6
    assert [json.loads(line)["question_id"] for line in out.read_text().splitlines()] == [
        r["question_id"] for r in rows
    ]
