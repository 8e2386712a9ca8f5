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
from remind.llm.asking import Verdict
from remind.models.generate import Generation
from remind.states.records import StateRecord

HOSTILE = "<script>alert('x')</script> \"q\" 'a' & {{ 7*7 }} \u202etxet<img src=x onerror=alert(1)> | `md` </bdi></pre>"
CONFIG = {"model": HOSTILE, "split": "test", "level": "x0", "encoder": "minilm", "max_new_tokens": 9}


def make_report(scores: list[Score]) -> dict[str, Any]:
    part = {
        "config": CONFIG,
        "identity": {"judge": "rule", "states": "5" * 64, "model": HOSTILE, "llm": HOSTILE},
        "model": {"name": HOSTILE, "kind": "chat", "max_length": None},
        "states": {"inputs": {HOSTILE: "7"}, "kind": "infer"},
        "prompts": {"answer": "abc"},
        "counts": {**counts(scores), "left_out": {HOSTILE: 1}, "cut_prompts": 0, "cut_turns": 0},
        **summaries([one.row() for one in scores], 20),
        "seconds": {"model": 1.0, "scoring": 1.0},
        "resumed": 2,
        "machine": "m",
        "versions": {"torch": "2.9"},
    }
    return {**part, "reference": "x0", "conditions": {"x0": part}, "differences": {}}


ROW = {
    "requests": 7,
    "cached": 3,
    "failures": {"server": 1},
    "calls": 5,
    "prompt_tokens": 1234,
    "completion_tokens": 56,
    "cost_usd": 0.5,
    "unknown_usage": 1,
    "now": {"cost_usd": 0.25},
    "seconds": {"p50": 0.5, "p95": None},
}


def beside(scores: list[Score]) -> dict[str, Any]:
    """Two conditions with the same scores, and endpoints that cost something."""
    report = make_report(scores)
    gain = {"value": -0.125, "low": -0.25, "high": 0.0, "n": 2}
    return {
        **report,
        "conditions": {"x0": report, "rag": report},
        "differences": {"rag": {"all": {"accuracy": gain}, "single": {"accuracy": gain}}},
        "costs": {"total": ROW, "stages": {"answer": ROW}, "endpoints": {HOSTILE: ROW}},
        "stood_in": {"summary": 2},
    }


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
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text.append(data)
        if "\u202e" in data and not {"bdi", "title"} & set(self.open):
            self.outside.append(data)


def test_hostile_text_is_shown_as_text(scores: list[Score]) -> None:
    page = reports.html(beside(scores), {"x0": scores})
    reader = Reader()
    reader.feed(page)
    assert (reader.open, reader.outside) == ([], [])
    assert not {"img", "link", "iframe"} & set(reader.tags)
    assert reader.tags.count("script") == 2
    assert not any(name.startswith("on") or name in ("src", "srcset") for name, _ in reader.attributes)
    assert "url(" not in page
    assert "@import" not in page
    shown = "".join(reader.text)
    # id, question, option, answer, gold, output, evidence, model, input, category: each whole, none evaluated
    assert shown.count(HOSTILE.split("</bdi>")[0]) >= 10
    assert "49" not in shown.replace("7*7", "")


def test_conditions_examples_and_costs_are_on_the_page(scores: list[Score]) -> None:
    page = reports.html(beside(scores), {"x0": scores, "rag": scores})
    for words in (
        "-12.5<small>[-25.0, +0.0]</small>",
        "1234",
        "0.5000",
        "too long",
        "2 times the offline stand-in wrote for stage summary",
        '<li><bdi dir="auto">Ana: a line 5</bdi></li>',
        '<dt><bdi dir="auto">prompts.answer</bdi></dt><dd><bdi dir="auto">abc</bdi></dd>',
        '<dt><bdi dir="auto">versions.torch</bdi></dt><dd><bdi dir="auto">2.9</bdi></dd>',
    ):
        assert words in page
    lines = tables.table(beside(scores)).splitlines()
    shown = ["condition", "x0", "rag", "failed,", "condition", "x0", "rag", "dimension", "belief"]
    assert [line.split()[0] for line in lines if line] == shown


def test_the_table_by_dimension_is_shown_whole(browser: Any, scores: list[Score]) -> None:
    """All measures, in numbers as wide as they can be, on a window of 1,200 pixels."""
    report = make_report(scores)
    full = {"value": 1.0, "low": 1.0, "high": 1.0, "n": 1000}
    row = {**dict.fromkeys(report["overall"], full), "n": 1000, "failed": 1000, "no_verdict": 1000}
    names = ["cross_modal_latent_inference", "temporal_preference_dynamics", "belief_modeling"]
    report["by_dimension"] = report["conditions"]["x0"]["by_dimension"] = dict.fromkeys(names, row)
    product = dict.fromkeys(names, dict.fromkeys(("single", "multi", "direct"), row))
    report["by_dimension_and_format"] = report["conditions"]["x0"]["by_dimension_and_format"] = product
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.set_content(reports.html(report, {}))
    widths = page.eval_on_selector_all(".wide", "all => all.map(one => [one.scrollWidth, one.clientWidth])")
    page.close()
    assert len(widths) >= 3
    assert all(needed <= room for needed, room in widths), widths


def test_every_answer_is_shown_with_what_came_of_it(scores: list[Score], browser: Any, tmp_path: Path) -> None:
    shown = {row["id"]: row for row in reports.answers({"x0": scores, "rag": scores})}
    assert list(shown) == ["a", HOSTILE, "c"]
    assert [row["outcomes"] for row in shown.values()] == [["wrong-0", "wrong-1"]] * 2 + [["failed-0", "failed-1"]]
    first = shown["a"]["given"][0]
    assert (first["found"], first["missed"]) == (["Ana: a line 1"], ["Ana: a line 5"])
    assert shown[HOSTILE]["options"][0]["chosen"] == ["x0", "rag"]
    assert shown[HOSTILE]["options"][1] == {"letter": "B", "text": "b", "gold": True, "chosen": []}
    assert [(one["condition"], one["failure"], one["message"]) for one in shown["c"]["given"]] == [
        ("x0", "too_long", HOSTILE),
        ("rag", "too_long", HOSTILE),
    ]
    (tmp_path / "report.html").write_text(reports.html(beside(scores), {"x0": scores, "rag": scores}), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    # those that are wrong under the reference first; all on demand
    assert page.locator("article:visible").count() == 2
    page.locator("select").select_option("")
    assert page.locator("article:visible").count() == 3
    page.fill("#find", "belief modeling")
    assert page.locator("article:visible p").first.text_content().startswith(HOSTILE[:8])
    assert page.locator("#found").inner_text() == "1 of 3"
    page.close()


def test_the_table_of_one_condition(scores: list[Score]) -> None:
    before = make_report(scores)
    lines = tables.table(before).splitlines()
    assert lines[0].split()[:3] == ["format", "n", "failed"]
    assert [line.split()[0] for line in lines[1:5]] == ["single", "multi", "direct", "all"]
    assert lines[4].split()[1:3] == ["3", "1"]
    assert lines[5] == "failed, counted as wrong: 1"
    # Wilson's, of three clusters that agree
    assert "0.0 [0.0, 56.1]" in lines[4]


def test_the_table_of_dimensions_and_formats_sums_to_its_margins(make_record: Callable[..., StateRecord]) -> None:
    """Against a count over the questions themselves; questions without a dimension are in no cell."""
    formats = {"single": ("x", "y"), "multi": ("x", "y"), "direct": ()}
    names = ("belief_modeling", "pattern_induction", None)
    records, texts, rulings = [], [], []
    hits: dict[tuple[str | None, str], list[int]] = {}
    for number in range(40):
        format, name = list(formats)[number % 3], names[number % 7 % 3]
        right = number % 5 < 2
        gold = ("so",) if format == "direct" else ("A",)
        options = formats[format]
        records.append(make_record(f"q{number}", format=format, options=options, answers=gold, dimension=name))
        # every fifth names no option
        texts.append("" if number % 5 == 4 else f"<answer>{gold[0] if right else 'B'}</answer>")
        rulings.append(Verdict(right) if format == "direct" else None)
        hits.setdefault((name, format), []).append(right)
    outputs = [Generation(text, 1, 1, True) for text in texts]
    scored = score(records, outputs, parse_all(records, outputs), rulings, lambda lines: torch.eye(len(lines)))
    product = summaries([one.row() for one in scored], 5)["by_dimension_and_format"]
    found = {(name, format): row for name, cells in product.items() for format, row in cells.items()}
    assert found.keys() == {key for key in hits if key[0] is not None}
    for key, row in found.items():
        assert (row["n"], row["accuracy"]["n"]) == (len(hits[key]), len(hits[key]))
        assert row["accuracy"]["value"] * row["n"] == pytest.approx(sum(hits[key]))
    (table,) = tables.dimensions_and_formats({"by_dimension_and_format": product})
    assert [row.name for row in table.rows] == ["belief modeling", "pattern induction"]
    assert len(table.heads) == 1 + 4 + 4 + 6
    for line, name in zip(table.rows, names, strict=False):
        cells = dict(zip(table.heads[1:], line.cells, strict=True))
        for format in formats:
            own = hits[name, format]
            assert (cells[f"{format} n"], cells[f"{format} Acc"]) == (str(len(own)), f"{100 * sum(own) / len(own):.1f}")
        assert ("direct F1" in cells, "single F1" in cells) == (True, False)
