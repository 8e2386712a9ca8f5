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

from remind.errors import ConfigError
from remind.evaluation import report as reports
from remind.evaluation.answer import Generation
from remind.evaluation.scores import Score, counts, group, score, summarise
from remind.llm import AuxiliaryLLM
from remind.states import StateRecord

HOSTILE = "<script>alert('x')</script> \"q\" 'a' & {{ 7*7 }} \u202etxet<img src=x onerror=alert(1)> | `md` </bdi></pre>"
CONFIG = {"model": HOSTILE, "split": "test", "level": "x0", "encoder": "minilm", "max_new_tokens": 9, "examples": 9}


def make_report(scores: list[Score], judge: str = "rule") -> dict[str, Any]:
    def rows(groups: dict[str, list[Score]]) -> dict[str, Any]:
        return {name: summarise(members, 20) for name, members in groups.items()}

    return {
        "config": CONFIG,
        "identity": {"judge": judge, "states": "5" * 64, "model": "6" * 64},
        "states": {"inputs": {HOSTILE: "7"}},
        "prompts": {"answer": "abc"},
        "counts": counts(scores),
        "overall": summarise(scores, 20),
        "by_format": rows(group(scores, lambda r: r.format)),
        "by_dimension": rows(group(scores, lambda r: r.dimension)),
        "by_category": rows(group(scores, lambda r: r.category)),
        "seconds": {"answering": 1.0, "scoring": 1.0},
        "resumed": 2,
        "machine": "m",
        "versions": {"torch": "2"},
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
    page = reports.html(make_report(scores), reports.examples(scores, 9))
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


def test_the_page_needs_no_network(scores: list[Score]) -> None:
    page = reports.html(make_report(scores), [])
    reader = Reader()
    reader.feed(page)
    assert not {"link", "script", "img", "iframe"} & set(reader.tags)
    assert not any(name in ("src", "href", "srcset") for name, _ in reader.attributes)
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page


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
    text = reports.markdown(make_report(scores))
    plain = re.sub(r"\\.", "", text)  # what is left can still mean something to a Markdown reader
    assert "alert" in plain
    assert not set("<`*_") & set(plain.split("States `")[0])
    columns = [line.count("|") for line in plain.splitlines()]
    for above, below in pairwise(columns):
        assert above == below or 0 in (above, below)


def test_tables(scores: list[Score]) -> None:
    lines = reports.table(make_report(scores)).splitlines()
    assert lines[0].split()[:3] == ["format", "n", "failed"]
    assert [line.split()[0] for line in lines[1:]] == ["direct", "multi", "single", "all"]
    assert lines[4].split()[1:3] == ["3", "1"]
    assert "0.0 [0.0, 65.8]" in lines[4]


def test_compare_before_and_after(scores: list[Score]) -> None:
    before = make_report(scores)
    after = copy.deepcopy(before)
    after["identity"]["model"] = "8" * 64
    after["overall"]["accuracy"]["value"] = 0.75
    lines = reports.compare_rows(before, after).splitlines()
    assert lines[0].split("  ")[0] == "format"
    assert "Acc before" in lines[0]
    assert "F1 after" in lines[0]
    overall = next(line for line in lines if line.startswith("all"))
    assert overall.split()[1:4] == ["3", "0.0", "75.0"]
    assert lines[-1] == "failed and in no score: 1 before, 1 after"


@pytest.mark.parametrize("key", ["judge", "states"])
def test_compare_refuses_runs_that_differ_otherwise(scores: list[Score], key: str) -> None:
    before, after = make_report(scores), make_report(scores)
    after["identity"] = {**after["identity"], key: "other"}
    with pytest.raises(ConfigError, match=f"they differ in {key}$"):
        reports.compare_rows(before, after)
    assert reports.compare_rows(before, after, comparing=("model", key))
    del after["identity"][key]
    with pytest.raises(ConfigError, match=key):
        reports.compare_rows(before, after)
