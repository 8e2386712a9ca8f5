"""Comparing two runs: the paired bootstrap against enumeration and SciPy, refusals that say why, the script."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import run_script
from scipy.stats import binomtest, bootstrap, ttest_rel

from remind.core.errors import ConfigError, DataError
from remind.evaluation.compare import CompareConfig, compare, load_run, table
from remind.evaluation.intervals import wilson
from remind.evaluation.paired import paired_bootstrap

ROOT = Path(__file__).parents[2]


# --- the statistics --------------------------------------------------------------------------------------------------


def every_mean(sums: list[float], sizes: list[int]) -> np.ndarray:
    """The mean of every one of the n^n resamples, all equally likely."""
    n = len(sums)
    draws = list(itertools.product(range(n), repeat=n))
    return np.array([sum(sums[i] for i in draw) / sum(sizes[i] for i in draw) for draw in draws])


def test_against_every_resample() -> None:
    first, second = [0.0, 1.0, 0.25, 0.5, 0.0], [1.0, 1.0, 0.5, 0.25, 0.75]
    gains = [b - a for a, b in zip(first, second, strict=True)]
    means = every_mean(gains, [1] * 5)
    found = paired_bootstrap(first, second, resamples=40_000)
    assert found is not None
    value = sum(gains) / 5
    assert (found["value"], found["n"], found["units"]) == (pytest.approx(value), 5, 5)
    assert (found["first"], found["second"]) == (pytest.approx(0.35), pytest.approx(0.7))
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.02)
    assert found["p"] == pytest.approx(np.mean(np.abs(means - value) >= value - 1e-12), abs=0.01)


def test_clusters_against_every_resample() -> None:
    first, second = [0.0] * 7, [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    clusters = ["a", "b", "a", "a", "c", "d", "d"]
    means = every_mean([2.0, 1.0, 0.0, 1.0], [3, 1, 1, 2])
    found = paired_bootstrap(first, second, clusters, resamples=40_000)
    assert found is not None
    assert (found["value"], found["units"]) == (pytest.approx(4 / 7), 4)
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.02)
    assert found["p"] == pytest.approx(np.mean(np.abs(means - 4 / 7) >= 4 / 7 - 1e-12), abs=0.01)


def test_many_questions_against_scipy() -> None:
    draws = np.random.default_rng(1)
    first = draws.random(400)
    second = np.clip(first + draws.normal(0.02, 0.2, 400), 0, 1)
    found = paired_bootstrap(first.tolist(), second.tolist(), resamples=5000)
    other = bootstrap((second - first,), np.mean, method="percentile", n_resamples=5000, rng=2).confidence_interval
    assert found is not None
    assert (found["low"], found["high"]) == pytest.approx((other.low, other.high), abs=0.003)
    assert found["p"] == pytest.approx(ttest_rel(second, first).pvalue, abs=0.03)


def test_one_cluster_per_question_is_no_clustering() -> None:
    first, second = [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]
    assert paired_bootstrap(first, second, list("abcd")) == paired_bootstrap(first, second)


def test_repeated_dialogues_widen_the_interval() -> None:
    draws = np.random.default_rng(3)
    by_dialogue = draws.normal(size=10)
    second = np.repeat(by_dialogue, 30).tolist()
    clusters = np.repeat(np.arange(10), 30).tolist()
    alone, together = paired_bootstrap([0.0] * 300, second), paired_bootstrap([0.0] * 300, second, clusters)
    assert alone is not None
    assert together is not None
    widths = [row["high"] - row["low"] for row in (alone, together)]  # type: ignore[operator]
    # a dialogue counts once, however many questions: sqrt(30) times as wide
    assert widths[1] / widths[0] == pytest.approx(30**0.5, rel=0.25)


def test_edges() -> None:
    assert paired_bootstrap([], []) is None
    same = paired_bootstrap([0.3, 0.7, 1.0], [0.3, 0.7, 1.0])
    assert same is not None
    assert (same["value"], same["low"], same["high"], same["p"]) == (0.0, 0.0, 0.0, 1.0)
    for single in (paired_bootstrap([0.0], [1.0]), paired_bootstrap([0.0, 0.0], [1.0, 0.0], ["a", "a"])):
        assert single is not None
        assert (single["low"], single["high"], single["p"], single["units"]) == (None, None, None, 1)
    assert paired_bootstrap([0.0, 1.0], [1.0, 0.0], seed=1) == paired_bootstrap([0.0, 1.0], [1.0, 0.0], seed=1)
    with pytest.raises(ConfigError, match="one length"):
        paired_bootstrap([0.0], [])
    with pytest.raises(ConfigError, match="one length"):
        paired_bootstrap([0.0], [1.0], [])
    with pytest.raises(ConfigError, match="at least 1"):
        paired_bootstrap([0.0], [1.0], resamples=0)


def test_wilson_against_scipy() -> None:
    for right, n in itertools.product((0, 1, 7, 29, 30), (30,)):
        found = wilson([1.0] * right + [0.0] * (n - right))
        assert found is not None
        interval = binomtest(right, n).proportion_ci(method="wilson")
        assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high), abs=1e-9)


# --- runs ------------------------------------------------------------------------------------------------------------

IDENTITY = {"states": "1" * 64, "level": "x0", "split": "test", "judge": "offline-1", "encoder": "minilm", "model": "a"}


def question(name: str, accuracy: float | None, **more: Any) -> dict[str, Any]:
    row = {"question_id": name, "dialogue_id": "d", "format": "direct", "gold": ["x"], "failure": None}
    return {**row, "score_failure": None, "accuracy": accuracy, "f1": accuracy, **more}


def run(folder: Path, rows: list[dict[str, Any]], report: dict[str, Any] | None = None, **identity: Any) -> Path:
    folder.mkdir()
    base = {
        "identity": {**IDENTITY, **identity},
        "overall": {"n": len(rows), "failed": 0, "accuracy": None, "f1": None, "accuracy_failures_wrong": None},
        "states": {"inputs": {"talk.json": "2" * 64}},
        "prompts": {},
    }
    (folder / "report.json").write_text(json.dumps({**base, **(report or {})}))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "predictions.jsonl").write_text(text, encoding="utf-8")
    return folder


FIRST = [question(f"q{n}", float(n % 2), dialogue_id=f"d{n // 4}") for n in range(8)]
SECOND = [question(f"q{n}", float(n % 4 != 0), dialogue_id=f"d{n // 4}") for n in range(8)]


def test_differences_by_format_and_measure(tmp_path: Path) -> None:
    options = [question("o1", 1.0, format="single", gold=["A"], f1=None)]
    others = [question("o1", None, format="single", gold=["A"], f1=None, score_failure="unparsable")]
    one = run(tmp_path / "one", FIRST + options)
    two = run(tmp_path / "two", [*reversed(SECOND), *others], level="x1", model="b")
    out = tmp_path / "c.json"
    result = compare(CompareConfig(str(one), str(two), str(out), resamples=200))
    direct = result["differences"]["direct"]
    assert (direct["accuracy"]["first"], direct["accuracy"]["second"]) == (0.5, 0.75)
    expected = paired_bootstrap([r["accuracy"] for r in FIRST], [r["accuracy"] for r in SECOND], resamples=200)
    assert direct["accuracy"] == direct["f1"] == expected
    # a failure is in no accuracy, and wrong where failures count
    assert list(result["differences"]["single"]) == ["accuracy_failures_wrong"]
    assert result["differences"]["single"]["accuracy_failures_wrong"]["value"] == -1.0
    assert result["differences"]["all"]["accuracy"]["n"] == 8
    assert result["differences"]["all"]["accuracy_failures_wrong"]["n"] == 9
    assert (result["n"], result["dropped"], result["failed"]) == (9, [0, 0], [0, 1])
    assert result["differing"] == {"level": ["x0", "x1"], "model": ["a", "b"]}
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    shown = table(result)
    assert "differs: level: x0 and x1" in shown
    assert "only_common" not in shown
    clustered = compare(CompareConfig(str(one), str(two), by_dialogue=True, resamples=200))
    assert clustered["differences"]["direct"]["accuracy"]["units"] == 2
    assert "over dialogues" in table(clustered)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "dev"}, r"they differ in: split \(test and dev\)$"),
        ({"judge": "offline-2"}, r"judge \(offline-1 and offline-2\)"),
        ({"encoder": "other"}, r"encoder \(minilm and other\)"),
        (
            {"report": {"states": {"inputs": {"talk.json": "3" * 64, "more.json": "4" * 64}}}},
            r"data \(more.json: absent and 4{12}, talk.json: 2{12} and 3{12}\)",
        ),
        ({"split": "dev", "judge": "x"}, r"split \(test and dev\); judge \(offline-1 and x\)"),
    ],
)
def test_refuses_runs_of_another_yardstick(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    one, two = run(tmp_path / "one", FIRST), run(tmp_path / "two", SECOND, **changes)
    for only_common in (False, True):
        with pytest.raises(ConfigError, match=message):
            compare(CompareConfig(str(one), str(two), only_common=only_common))


def test_refuses_another_judge_prompt(tmp_path: Path) -> None:
    judge = {"judge": "chat-1 judge=m@server"}
    one = run(tmp_path / "one", FIRST, {"prompts": {"ask_judge": "aaaa", "answer": "1"}}, **judge)
    two = run(tmp_path / "two", SECOND, {"prompts": {"ask_judge": "bbbb", "answer": "2"}}, **judge)
    three = run(tmp_path / "three", SECOND, {"prompts": {"ask_judge": "aaaa", "answer": "3"}}, **judge)
    with pytest.raises(ConfigError, match=r"judge prompt \(ask_judge: aaaa and bbbb\)"):
        compare(CompareConfig(str(one), str(two)))
    assert compare(CompareConfig(str(one), str(three), resamples=5))["n"] == 8


def test_refuses_other_questions_unless_told_and_then_says_so(tmp_path: Path) -> None:
    one, two = run(tmp_path / "one", FIRST), run(tmp_path / "two", [*SECOND[3:], question("new", 1.0)])
    with pytest.raises(ConfigError, match=r"3 only in the first: q0, q1, q2, 1 only in the second: new; .*other 5"):
        compare(CompareConfig(str(one), str(two)))
    result = compare(CompareConfig(str(one), str(two), only_common=True, resamples=50))
    assert (result["n"], result["dropped"], result["only_common"]) == (5, [3, 1], True)
    assert "only_common: 3 questions of the first and 1 of the second" in table(result)
    three = run(tmp_path / "three", [question("alone", 1.0)])
    with pytest.raises(ConfigError, match="no question in common"):
        compare(CompareConfig(str(one), str(three), only_common=True))


def test_refuses_other_gold_answers(tmp_path: Path) -> None:
    one, two = run(tmp_path / "one", FIRST), run(tmp_path / "two", [{**SECOND[0], "gold": ["y"]}, *SECOND[1:]])
    with pytest.raises(ConfigError, match=r"gold answers of 1 questions \(q0: .*\"x\".* and .*\"y\""):
        compare(CompareConfig(str(one), str(two), only_common=True))


def test_questions_that_took_no_part_are_neither_right_nor_wrong(tmp_path: Path) -> None:
    absent = {**SECOND[1], "left_out": "no gold evidence"}
    absent = {key: value for key, value in absent.items() if key not in ("accuracy", "f1", "score_failure")}
    one, two = run(tmp_path / "one", FIRST), run(tmp_path / "two", [SECOND[0], absent, *SECOND[2:]])
    result = compare(CompareConfig(str(one), str(two), resamples=5))
    assert {name: row["n"] for name, row in result["differences"]["all"].items()} == {
        "accuracy": 7,
        "f1": 7,
        "accuracy_failures_wrong": 7,
    }
    assert (result["n"], result["left_out"], result["failed"]) == (8, [0, 1], [0, 0])
    assert "left out: 0 in the first, 1 in the second" in table(result)


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    folder = run(tmp_path / "one", [question("q", 1.0, text="a\u2028b\x0bc\u0085d"), question("p\u2028", 0.0)])
    assert list(load_run(folder).rows) == ["q", "p\u2028"]


def test_folders_without_a_finished_run(tmp_path: Path) -> None:
    one = run(tmp_path / "one", FIRST)
    with pytest.raises(DataError, match=r"report\.json: no such file"):
        load_run(tmp_path / "none")
    (one / "predictions.jsonl").write_text(json.dumps({"question_id": "q", "text": "unscored"}) + "\n")
    with pytest.raises(DataError, match=r"line 1.*not a scored prediction"):
        load_run(one)
    (one / "predictions.jsonl").unlink()
    with pytest.raises(DataError, match=r"predictions\.jsonl: no such file"):
        load_run(one)
    run(one / "x1", FIRST)
    (one / "report.json").write_text(json.dumps({"identity": {}, "overall": {}, "conditions": {"x1": {}, "gone": {}}}))
    with pytest.raises(DataError, match=r"name the folder of one: x1$"):
        load_run(one)
    (one / "report.json").write_text("[]")
    with pytest.raises(DataError, match="no identity"):
        load_run(one)


def test_the_script(tmp_path: Path) -> None:
    one, two = run(tmp_path / "one", FIRST), run(tmp_path / "two", SECOND)
    other = run(tmp_path / "other", SECOND, judge="offline-2")
    script = ROOT / "scripts" / "compare.py"
    status, _, complaints = run_script(script, one, other)
    assert status == 2
    assert complaints.count("\n") == 1
    assert "judge (offline-1 and offline-2)" in complaints
    status, said, complaints = run_script(script, one, two)
    assert status == 0, complaints
    assert "+25.0" in said
