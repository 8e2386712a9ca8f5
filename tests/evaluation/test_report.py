"""Report: hostile text stays text; tables."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from remind.evaluation import report as reports
from remind.evaluation import tables
from remind.evaluation.scores import Score, counts, parse_all, score, summaries
from remind.models.generate import Generation
from remind.states.records import StateRecord
from remind.text.words import Verdict

HOSTILE = "<script>alert('x')</script> \"q\" 'a' & {{ 7*7 }} \u202etxet<img src=x onerror=alert(1)> | `md` </bdi></pre>"


@pytest.fixture
def scores(make_record: Callable[..., StateRecord]) -> list[Score]:
    records = [
        make_record("a", text=HOSTILE, answers=(HOSTILE + "!",), category=HOSTILE),
        make_record(HOSTILE, format="single", options=(HOSTILE, "b"), answers=("B",), dimension="belief_modeling"),
        make_record("c", format="multi", options=("x", "y"), answers=("B",)),
    ]
    outputs = [
        Generation(f"<answer>{HOSTILE}</answer><explanation>{HOSTILE}</explanation>", 5, 5, True),
        Generation(f"<answer>A</answer><explanation>{HOSTILE}</explanation>", 5, 5, True),
        Generation("", 5, failure="too_long", message=HOSTILE),
    ]
    rulings = [Verdict(False), None, None]
    return score(records, outputs, parse_all(records, outputs), rulings, lambda lines: torch.eye(len(lines)))


@pytest.fixture
def report(scores: list[Score]) -> dict[str, Any]:
    """Two conditions with the same scores, and endpoints that cost something."""
    row = {"requests": 7, "cached": 3, "failures": {"server": 1}, "calls": 5, "prompt_tokens": 1234}
    row |= {"completion_tokens": 56, "cost_usd": 0.5, "unknown_usage": 1, "now": {"cost_usd": 0.25}}
    row["seconds"] = {"p50": 0.5, "p95": None}
    part = {
        "config": {"model": HOSTILE, "split": "test", "level": "x0", "encoder": "minilm", "max_new_tokens": 9},
        "identity": {"judge": "rule", "states": "5" * 64, "model": HOSTILE, "llm": HOSTILE},
        "model": {"name": HOSTILE, "kind": "chat", "max_length": None},
        "states": {"inputs": {HOSTILE: "7"}, "kind": "infer"},
        "prompts": {"answer": "abc"},
        "counts": {**counts(scores), "left_out": {HOSTILE: 1}, "cut_prompts": 0, "cut_turns": 0},
        **summaries([one.row() for one in scores], 20),
        "unlabelled": [],
        "seconds": {"model": 1.0, "scoring": 1.0},
        "resumed": 2,
        "machine": "m",
        "versions": {"torch": "2.9"},
        "costs": {"total": row, "stages": {"answer": row}, "endpoints": {HOSTILE: row}},
        "stood_in": {"summary": 2},
    }
    gain = {"value": -0.125, "low": -0.25, "high": 0.0, "n": 2}
    differences = {"rag": {"all": {"accuracy": gain}, "single": {"accuracy": gain}}}
    return {**part, "reference": "x0", "conditions": {"x0": part, "rag": part}, "differences": differences}


def test_hostile_text_is_shown_as_text(scores: list[Score], report: dict[str, Any]) -> None:
    tags, attributes, text = list[str](), list[tuple[str, str | None]](), list[str]()
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, own: (tags.append(tag), attributes.extend(own))  # type: ignore[method-assign]
    reader.handle_data = text.append  # type: ignore[method-assign]
    reader.feed(reports.html(report, {"x0": scores, "rag": scores}))
    assert not {"img", "link", "iframe"} & set(tags)
    assert tags.count("script") == 2
    assert not any(name.startswith("on") or name in ("src", "srcset") for name, _ in attributes)
    shown = "".join(text)
    # id, question, option, answer, gold, output, evidence, model, input, category: each whole, none evaluated
    assert shown.count(HOSTILE.split("</bdi>")[0]) >= 10
    for words in ("-12.5", "[-25.0, +0.0]", "1234", "0.5000", "too long", "Ana: a line 5", "2.9"):
        assert words in shown


def test_every_answer_is_shown_with_what_came_of_it(
    scores: list[Score], report: dict[str, Any], browser: Any, tmp_path: Path
) -> None:
    shown = {row["id"]: row for row in reports.answers({"x0": scores, "rag": scores})}
    assert [row["outcomes"] for row in shown.values()] == [["wrong-0", "wrong-1"]] * 2 + [["failed-0", "failed-1"]]
    first = shown["a"]["given"][0]
    assert (first["found"], first["missed"]) == (["Ana: a line 1"], ["Ana: a line 5"])
    assert [(one["letter"], one["gold"], one["chosen"]) for one in shown[HOSTILE]["options"]] == [
        ("A", False, ["x0", "rag"]),
        ("B", True, []),
    ]
    (tmp_path / "report.html").write_text(reports.html(report, {"x0": scores, "rag": scores}), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    page.locator("select").select_option("wrong-0")
    assert page.locator("article:visible").count() == 2
    page.locator("select").select_option("")
    page.fill("#find", "belief modeling")
    assert page.locator("#found").inner_text() == "1 of 3"
    page.close()


def test_tables_in_text(report: dict[str, Any]) -> None:
    heads = ["condition", "x0", "rag", "failed,", "condition", "x0", "rag", "dimension", "belief", "mean"]
    assert [line.split()[0] for line in tables.table(report).splitlines() if line] == heads
    lines = tables.table({**report, "conditions": {"x0": report["conditions"]["x0"]}}).splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["format", "single", "multi", "direct", "all"]
    assert lines[4].split()[1:3] == ["3", "1"]
    assert lines[5] == "failed, counted as wrong: 1"
    # Wilson's, of three clusters that agree
    assert "0.0 [0.0, 56.1]" in lines[4]
