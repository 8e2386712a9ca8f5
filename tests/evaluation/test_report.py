"""The page and the tables of a run: hostile text stays text, and every answer is there with what came of it."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from scripted_answers import Chat, Judge, by

from remind.evaluation.config import EvaluateConfig
from remind.evaluation.run import run_evaluation
from remind.evaluation.tables import table
from remind.llm.request import Reply

HOSTILE = "<script>alert('x')</script> \"q\" 'a' & {{ 7*7 }} \u202etxet<img src=x onerror=alert(1)> | `md` </bdi></pre>"


def test_hostile_text_is_shown_as_text(cfg: EvaluateConfig, make_record: Any, write_states: Any, browser: Any) -> None:
    options = {"format": "single", "options": (HOSTILE, "b"), "answers": ("B",), "dimension": "belief_modeling"}
    records = [
        make_record("a", text=HOSTILE, answers=(HOSTILE + "!",), category=HOSTILE),
        make_record(HOSTILE, **options),
        make_record("c", format="multi", options=("x", "y"), answers=("B",)),
    ]
    replies: dict[str, Reply | str] = {
        "a": f"<answer>{HOSTILE}</answer><explanation>{HOSTILE}</explanation>",
        HOSTILE: f"<answer>A</answer><explanation>{HOSTILE}</explanation>",
        "c": Reply("", failure="too_long", message=HOSTILE),
    }
    cfg = replace(cfg, states=str(write_states(*records, name="own")), conditions=["x0", "x1"])
    report = run_evaluation(cfg, Judge(), answerer=by(Chat(replies=replies, name=HOSTILE)))
    heads = ["condition", "x0", "x1", "failed,", "condition", "x0", "x1", "dimension", "belief", "mean"]
    assert [line.split()[0] for line in table(report).splitlines() if line] == heads

    path = Path(cfg.out) / "report.html"
    tags, attributes, text = list[str](), list[tuple[str, str | None]](), list[str]()
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, own: (tags.append(tag), attributes.extend(own))  # type: ignore[method-assign]
    reader.handle_data = text.append  # type: ignore[method-assign]
    reader.feed(path.read_text(encoding="utf-8"))
    assert not {"img", "link", "iframe"} & set(tags)
    assert tags.count("script") == 2
    assert not any(name.startswith("on") or name in ("src", "srcset") for name, _ in attributes)
    shown = "".join(text)
    # id, question, option, answer, gold, output, evidence, model, category: each whole, none evaluated
    assert shown.count(HOSTILE.split("</bdi>")[0]) >= 9
    assert all(words in shown for words in ("too long", "Ana: a line 1", "Ana: a line 5"))

    page = browser.new_page()
    page.goto(path.as_uri())
    page.locator("select").select_option("wrong-0")
    assert page.locator("article:visible").count() == 2
    page.locator("select").select_option("")
    page.fill("#find", "belief modeling")
    assert page.locator("#found").inner_text() == "1 of 3"
    page.close()
