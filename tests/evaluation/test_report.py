"""Report: hostile text stays text, tables, comparison of two runs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
import torch

from remind.evaluation import report as reports
from remind.evaluation import tables
from remind.evaluation.scores import Score, counts, group, score, summarise
from remind.models.generate import Generation
from remind.states.auxiliary import AuxiliaryLLM
from remind.states.parquet import StateRecord

HOSTILE = "<script>alert('x')</script> \"q\" 'a' & {{ 7*7 }} \u202etxet<img src=x onerror=alert(1)> | `md` </bdi></pre>"
CONFIG = {"model": HOSTILE, "split": "test", "level": "x0", "encoder": "minilm", "max_new_tokens": 9, "examples": 9}


def make_report(scores: list[Score], judge: str = "rule") -> dict[str, Any]:
    def rows(groups: dict[str, list[Score]]) -> dict[str, Any]:
        return {name: summarise(members, 20) for name, members in groups.items()}

    return {
        "config": CONFIG,
        "identity": {"judge": judge, "states": "5" * 64, "model": HOSTILE, "llm": HOSTILE},
        "model": {"name": HOSTILE, "kind": "chat", "max_length": None},
        "states": {"inputs": {HOSTILE: "7"}},
        "prompts": {"answer": "abc"},
        "counts": {**counts(scores), "left_out": {HOSTILE: 1}},
        "overall": summarise(scores, 20),
        "by_format": rows(group(scores, lambda r: r.format)),
        "by_dimension": rows(group(scores, lambda r: r.dimension)),
        "by_category": rows(group(scores, lambda r: r.category)),
        "seconds": {"answering": 1.0, "scoring": 1.0},
        "resumed": 2,
        "machine": "m",
        "versions": {"torch": "2.9"},
    }


ROW = {
    "requests": 7,
    "cached": 3,
    "failures": {"server": 1},
    "calls": 5,
    "prompt_tokens": 1234,
    "completion_tokens": 56,
    "cost_usd": 0.5,
    "now": {"cost_usd": 0.25},
    "seconds": {"p50": 0.5, "p95": None},
}


def beside(scores: list[Score]) -> dict[str, Any]:
    """Two conditions with the same scores, and endpoints that cost something."""
    report = make_report(scores)
    gain = {"value": -0.125, "low": -0.25, "high": 0.0, "n": 2}
    return {
        **report,
        "reference": "x0",
        "conditions": {"x0": report, "rag": report},
        "differences": {"rag": {"all": {"accuracy": gain}, "single": {"accuracy": gain}}},
        "costs": {"total": ROW, "stages": {"answer": ROW}, "endpoints": {HOSTILE: ROW}},
        "stood_in": {"summary": 2},
    }


@pytest.fixture
def scores(make_record: Callable[..., StateRecord], judge: AuxiliaryLLM) -> list[Score]:
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
    return score(records, outputs, judge, lambda lines: torch.eye(20)[: len(lines)])


class Reader(HTMLParser):
    """Collects tags, attributes and text as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if "\u202e" in data and not {"bdi", "title"} & set(self.open):
            self.outside.append(data)


def test_hostile_text_is_shown_as_text(scores: list[Score]) -> None:
    failed = reports.failed_examples({"x0": scores}, 9)
    page = reports.html(beside(scores), reports.examples(scores, 9), failed)
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert "script" not in reader.tags
    assert "img" not in reader.tags
    assert not any(name.startswith("on") for name, _ in reader.attributes)
    shown = "".join(reader.text)
    # id, question, option, answer, gold, output, evidence, model, input, category: each whole, none evaluated
    assert shown.count(HOSTILE.split("</bdi>")[0]) >= 10
    assert "49" not in shown.replace("7*7", "")
    assert reader.outside == []
    # and needs no network
    assert not {"link", "iframe"} & set(reader.tags)
    assert not any(name in ("src", "href", "srcset") for name, _ in reader.attributes)
    assert "url(" not in page
    assert "@import" not in page


def test_examples_show_evidence_found_and_missed_by_turns(scores: list[Score]) -> None:
    shown = reports.examples(scores, 9)
    assert [item["id"] for item in shown] == [HOSTILE, "a"]
    assert shown[1]["found"] == ["Ana: a line 1"]
    assert shown[1]["missed"] == ["Ana: a line 5"]
    assert shown[0]["options"][0]["chosen"] is True
    assert shown[0]["options"][1] == {"letter": "B", "text": "b", "gold": True, "chosen": False}
    assert reports.examples(scores, 1) == shown[:1]
    assert reports.examples(scores, 0) == []


def test_markdown_keeps_hostile_text_in_its_cell(scores: list[Score]) -> None:
    failed = reports.failed_examples({"x0": scores}, 9)
    text = reports.markdown(make_report(scores), reports.examples(scores, 9), failed)
    plain = re.sub(r"\\.", "", text)  # what is left can still mean something to a Markdown reader
    assert plain.count("alert") >= 10
    assert not set("<*_`") & set(plain)
    assert "\u202e" not in text
    assert "(U+202E)" in text
    columns = [line.count("|") for line in plain.splitlines()]
    for above, below in pairwise(columns):
        assert above == below or 0 in (above, below)


def test_conditions_and_costs_are_on_both_pages(scores: list[Score]) -> None:
    page, text = reports.html(beside(scores), []), reports.markdown(beside(scores))
    assert "-12.5<small>[-25.0, +0.0]</small>" in page
    assert "-12.5 [-25.0, +0.0]" in text
    for shown in (page, text):
        assert "1234" in shown
        assert "0.5000" in shown
        assert "too long" in shown.replace("\\_", " ").replace("_", " ")
    assert "2 times the offline stand-in wrote for stage summary" in page
    plain = re.sub(r"\\.", "", text)
    columns = [line.count("|") for line in plain.splitlines()]
    assert all(above == below or 0 in (above, below) for above, below in pairwise(columns))
    lines = tables.table(beside(scores)).splitlines()
    assert [line.split()[0] for line in lines if line] == ["condition", "x0", "rag", "condition", "x0", "rag"]


def test_markdown_shows_examples_and_what_was_run(scores: list[Score]) -> None:
    failed = reports.failed_examples({"x0": scores}, 9)
    lines = reports.markdown(make_report(scores), reports.examples(scores, 9), failed).splitlines()
    for line in (
        "  - evidence shown: Ana: a line 1",
        "  - evidence not shown: Ana: a line 5",
        "  - gold: B. y",
        "- max\\_new\\_tokens: 9",
        "- prompt answer: abc",
        "- version of torch: 2.9",
    ):
        assert line in lines
    assert any(line.startswith("  - x0: too\\_long ") for line in lines)
    shown = reports.failed_examples({"x0": scores, "rag": scores}, 9)
    assert [(item["condition"], item["failure"], item["message"]) for item in shown] == [
        ("x0", "too_long", HOSTILE),
        ("rag", "too_long", HOSTILE),
    ]


def test_tables(scores: list[Score]) -> None:
    lines = tables.table(make_report(scores)).splitlines()
    assert lines[0].split()[:3] == ["format", "n", "failed"]
    assert [line.split()[0] for line in lines[1:]] == ["direct", "multi", "single", "all"]
    assert lines[4].split()[1:3] == ["3", "1"]
    assert "0.0 [0.0, 65.8]" in lines[4]


def test_compare_before_and_after(scores: list[Score]) -> None:
    before = make_report(scores)
    after = copy.deepcopy(before)
    after["overall"]["accuracy"]["value"] = 0.75
    lines = tables.compare_rows(before, after).splitlines()
    assert lines[0].split("  ")[0] == "format"
    assert "Acc before" in lines[0]
    assert "F1 after" in lines[0]
    overall = next(line for line in lines if line.startswith("all"))
    assert overall.split()[1:4] == ["3", "0.0", "75.0"]
    assert lines[-1] == "failed and in no score: 1 before, 1 after"
