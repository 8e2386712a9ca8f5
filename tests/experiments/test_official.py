"""Official result files: bytes that stay, edits that keep the file's style, the script that scores again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import run_module

from experiments.official.files import ResultFile
from experiments.official.score import ScoreOfficialConfig, score_official, table
from remind.core.errors import ConfigError, DataError, FormatError

ROWS = [
    {"question_id": "a", "hypothesis": "größer 東京 \u2028 😀", "n": 1.0, "m": 1e22, "t": True},
    {"question_id": "b", "hypothesis": "x\n\t\"'</script>", "deep": {"list": [1, 2.50, None]}},
    {"question_id": "c", "hypothesis": ""},
]


def save(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("escape", [True, False])
@pytest.mark.parametrize("marks", [(", ", ": "), (",", ":")])
@pytest.mark.parametrize(("end", "last"), [("\n", True), ("\r\n", False)])
def test_lines_stay_and_one_edit_changes_one_line(
    tmp_path: Path, escape: bool, marks: tuple[str, str], end: str, last: bool
) -> None:
    lines = [json.dumps(row, ensure_ascii=escape, separators=marks) for row in ROWS]
    raw = ("\ufeff" + lines[0] + end + end + end.join(lines[1:]) + (end if last else "")).encode()
    path = save(tmp_path / "r.jsonl", raw)
    file = ResultFile(path)
    assert file.dump() == raw
    file.records[1]["label"] = {"model": "jüdge", "label": None}
    changed = json.dumps(file.records[1], ensure_ascii=escape, separators=marks)
    assert file.dump() == raw.replace(lines[1].encode(), changed.encode())


def test_oddities_a_parser_would_lose_stay(tmp_path: Path) -> None:
    raw = b'  {"a": 1, "a": 2,   "f": 1.50, "e": 1E5, "u": "\\u00e9\\/"}  \n\n{"x": NaN}'
    file = ResultFile(save(tmp_path / "r.jsonl", raw))
    assert file.dump() == raw
    assert file.records[0]["a"] == 2
    # true and 1 are different
    file = ResultFile(save(tmp_path / "r.jsonl", b'{"label": 1}\n'))
    file.records[0]["label"] = True
    assert file.dump() == b'{"label": true}\n'


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2"),
        (b'{"a": 1}\n[1]\n', r"line 2\]: should be an object"),
        (b"[1, {}]", r"record 1\]: should be an object"),
        (b'[{"a": 1}', "not JSON"),
        (b'{"a": "\xff"}\n', r"line 1\]: not UTF-8 \(byte 7\)"),
        (b'{"a": ' + b"[" * 100_000 + b"}\n", "line 1"),
    ],
)
def test_bad_files_are_told_by_line(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ResultFile(save(tmp_path / "r.jsonl", raw))
    for path, problem in ((tmp_path / "none.jsonl", "no such file"), (tmp_path, "is a folder, a file was expected")):
        with pytest.raises(DataError, match=problem):
            ResultFile(path)


@pytest.fixture
def judged(tmp_path: Path) -> tuple[Path, Path]:
    """Three judged rows and their questions."""
    rows, questions = [], []
    for name, said, label, gold, kind in (
        ("q1", "7 May", True, "7 May", "temporal-reasoning"),
        ("q2_abs", "Paris", False, "not told", "multi-session"),
        ("q3", "dogs", False, "cats", "multi-session"),
    ):
        rows.append({"question_id": name, "hypothesis": said, "autoeval_label": {"model": "j", "label": label}})
        questions.append({"question_id": name, "question": "which?", "answer": gold, "question_type": kind})
    folder = tmp_path / "in"
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return save(folder / "rows.jsonl", lines), save(folder / "questions.json", json.dumps(questions).encode())


def test_scores_again_and_writes_back(tmp_path: Path, judged: tuple[Path, Path]) -> None:
    rows, questions = judged
    report = score_official(ScoreOfficialConfig(str(rows), str(tmp_path / "out"), str(questions)))
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == rows.read_bytes()
    assert report["written_back"] == "identical"
    assert json.loads((tmp_path / "out" / "scores.json").read_text()) == json.loads(json.dumps(report))
    assert (report["overall"]["value"], report["abstention"]["value"]) == (pytest.approx(1 / 3), 0.0)
    assert "multi-session" in table(report)
    paths = {"results": rows, "references": questions}
    assert report["inputs"] == {role: hashlib.sha256(path.read_bytes()).hexdigest() for role, path in paths.items()}


def test_another_judge_sets_the_labels_anew(tmp_path: Path, judged: tuple[Path, Path]) -> None:
    rows, questions = judged
    report = score_official(ScoreOfficialConfig(str(rows), str(tmp_path / "out"), str(questions), judge="offline"))
    written = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["autoeval_label"]["label"] for row in written] == [True, False, False]
    assert all(row["autoeval_label"]["model"].startswith("offline") for row in written)
    assert report["written_back"] == "changed"
    assert list(written[0]) == ["question_id", "hypothesis", "autoeval_label"]


def test_refusals(tmp_path: Path, judged: tuple[Path, Path]) -> None:
    rows, questions = judged
    out = tmp_path / "out"
    config = ScoreOfficialConfig(str(rows), str(out), str(questions))
    for change, error, message in (
        ({"references": None}, ConfigError, "references"),
        ({"out": str(rows.parent)}, ConfigError, "choose another"),
        ({"model": "m"}, ConfigError, "for LoCoMo"),
        ({"judge": "llm"}, ConfigError, "no endpoint"),
        ({"results": str(questions), "references": None}, FormatError, "neither"),
    ):
        with pytest.raises(error, match=message):
            score_official(replace(config, **change))  # type: ignore[arg-type]
    assert not out.exists()
    command = ("experiments.official.score", "--results", rows, "--out", out)
    status, _, errors = run_module(*command)
    assert (status, errors.count("\n")) == (2, 1)
    assert errors.startswith("error: LongMemEval's rows")
    status, printed, errors = run_module(*command, "--references", questions)
    assert status == 0, errors
    assert "written back: identical" in printed


def test_the_published_rows_come_back_byte_for_byte(tmp_path: Path, remind_data: Path) -> None:
    (source,) = (remind_data / "longmemeval").glob("*.eval-results*")
    questions = remind_data / "longmemeval" / "longmemeval_s_queries.json"
    report = score_official(ScoreOfficialConfig(str(source), str(tmp_path), str(questions)))
    raw = source.read_bytes()
    assert (tmp_path / source.name).read_bytes() == raw
    # not because nothing was serialised: the style found for a changed row gives every row's bytes
    file = ResultFile(source)
    for row in file.records:
        row["new"] = 1
    assert file.dump() == b"".join(line[:-1] + b', "new": 1}\n' for line in raw.splitlines())
    types = {row["id"]: row["meta"]["question_type"] for row in json.loads(questions.read_text())}
    rows = [json.loads(line) for line in raw.splitlines()]
    for name, estimate in report["by_type"].items():
        labels = [row["autoeval_label"]["label"] for row in rows if types[row["question_id"]] == name]
        assert (estimate["n"], estimate["value"]) == (len(labels), pytest.approx(sum(labels) / len(labels)))
    assert report["overall"]["n"] == 500
    assert report["abstention"]["n"] == 30
