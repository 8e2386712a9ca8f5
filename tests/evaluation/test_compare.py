"""Comparing two runs: differences, and refusals that say why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remind.core.errors import ConfigError, DataError
from remind.evaluation.compare import compare, load_run, table
from remind.evaluation.config import CompareConfig
from remind.evaluation.statistics import paired_bootstrap

IDENTITY = {"states": "1" * 64, "level": "x0", "split": "test", "judge": "chat-1 judge=m", "judge_prompt": "aaaa"}
IDENTITY |= {"encoder": "minilm", "model": "a"}


def question(name: str, accuracy: float | None, **more: Any) -> dict[str, Any]:
    row = {"question_id": name, "dialogue_id": "d", "format": "direct", "gold": ["x"], "failure": None}
    return {**row, "score_failure": None, "accuracy": accuracy, "f1": accuracy, **more}


def run(folder: Path, rows: list[dict[str, Any]], inputs: Any = None, **identity: Any) -> str:
    folder.mkdir()
    overall = {"n": len(rows), "failed": 0, "no_verdict": 0, "accuracy": None, "parse_rate": None, "f1": None}
    report = {"identity": IDENTITY | identity, "overall": overall, "prompts": {}}
    report["states"] = {"inputs": inputs or {"talk.json": "2" * 64}}
    (folder / "report.json").write_text(json.dumps(report))
    # lines end at line feeds only
    text = "".join(json.dumps({**row, "text": "a\u2028b"}, ensure_ascii=False) + "\n" for row in rows)
    (folder / "predictions.jsonl").write_text(text, encoding="utf-8")
    return str(folder)


FIRST = [question(f"q{n}", float(n % 2), dialogue_id=f"d{n // 4}") for n in range(8)]
SECOND = [question(f"q{n}", float(n % 4 != 0), dialogue_id=f"d{n // 4}") for n in range(8)]


def test_differences_by_format_and_measure(tmp_path: Path) -> None:
    more = [question("o1", 1.0, format="single", f1=None), question("j1", 1.0, format="multi")]
    more.append(question("l1", 1.0, prompt="told the date"))
    other = [question("o1", 0.0, format="single", f1=None, score_failure="unparsable")]
    other.append(question("j1", None, format="multi", f1=None, score_failure="judge"))
    absent = {"question_id": "l1", "dialogue_id": "d", "format": "direct", "gold": ["x"], "left_out": "no evidence"}
    one = run(tmp_path / "one", FIRST + more)
    two = run(tmp_path / "two", [*reversed(SECOND), *other, absent], level="x1", model="b")
    result = compare(CompareConfig(one, two, str(tmp_path / "c.json"), resamples=200))
    direct, every = result["differences"]["direct"], result["differences"]["all"]
    dialogues = [r["dialogue_id"] for r in FIRST]
    ones, twos = ([r["accuracy"] for r in rows] for rows in (FIRST, SECOND))
    assert direct["accuracy"] == direct["f1"] == paired_bootstrap(ones, twos, dialogues, resamples=200)
    # the model's failure is wrong; without a verdict, and where a question took no part, there is no pair
    assert {name: row["value"] for name, row in result["differences"]["single"].items()} == {"accuracy": -1.0}
    assert result["differences"]["multi"] == {}
    assert (every["accuracy"]["n"], every["f1"]["n"]) == (9, 8)
    told = [result[name] for name in ("n", "failed", "no_verdict", "left_out")]
    assert told == [11, [0, 1], [0, 1], [0, 1]]
    assert result["differing"] == {"level": ["x0", "x1"], "model": ["a", "b"]}
    assert json.loads((tmp_path / "c.json").read_text()) == json.loads(json.dumps(result))
    for words in ("differs: level: 'x0' and 'x1'", "left out: 0 in the first, 1 in the second", "of 1 questions"):
        assert words in table(result)


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (
            SECOND,
            {"split": "dev", "judge": "x", "inputs": {"talk.json": "3" * 64, "b.json": "4"}},
            r"differ in: data.b.json \(None and '4'\); data.talk.json .*; judge .*; split \('test' and 'dev'\)$",
        ),
        ([*SECOND[3:], question("new", 1.0)], {}, r"questions \(3 only in the first, 1 only in the second\)"),
        ([{**SECOND[0], "gold": ["y"]}, *SECOND[1:]], {}, r"gold answers of 1 questions \(q0: .*'x'.* and .*'y'"),
    ],
)
def test_refuses_runs_that_differ_in_what_is_not_compared(
    tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    one, two = run(tmp_path / "one", FIRST), run(tmp_path / "two", rows, **changes)
    with pytest.raises(ConfigError, match=message):
        compare(CompareConfig(one, two))


def test_folders_without_a_finished_run(tmp_path: Path) -> None:
    one = Path(run(tmp_path / "one", FIRST))
    with pytest.raises(DataError, match=r"report\.json: no such file"):
        load_run(tmp_path / "none")
    (one / "predictions.jsonl").write_text(json.dumps({"question_id": "q", "text": "unscored"}) + "\n")
    with pytest.raises(DataError, match=r"\[q\]: not a scored prediction"):
        load_run(one)
    (one / "report.json").write_text("{}")
    with pytest.raises(DataError, match=r"report\.json: not the report .* run `remind evaluate` again"):
        load_run(one)
