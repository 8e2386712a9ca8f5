"""Every kind of page in a browser: hostile text stays text, no script of it runs, nothing is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_process import run_module

from remind import read
from remind.models.backbone import load_backbone
from sae import load_layers
from sae.dashboard import write_dashboard
from sae.probe import Probe, collect


@pytest.fixture(scope="module")
def pages(hostile: Path, tiny: Path, saes: Path) -> dict[str, Path]:
    """One page of each kind, made from hostile dialogues by the command that makes it."""
    states, out = hostile / "states", hostile / "pages"
    answering: list[object] = ["--max_new_tokens", "3", "--bootstrap", "20", "--conditions", "[x0, no_context]"]
    answering += ["--model", tiny, "--out", out / "evaluation"]
    shown = run_module("remind", "inspect", "--states", states, "--all", "true", "--out", out / "inspector")
    answered = run_module("remind", "evaluate", "--states", states, *answering)
    assert (shown[0], answered[0]) == (0, 0), shown[2] + answered[2]
    coders, backbone = load_layers(saes), load_backbone(str(tiny))
    turns = [turn for dialogue in read(hostile / "data.jsonl").dialogues for turn in dialogue.turns]
    probe = Probe(backbone.model, backbone.tokenizer, coders)
    record = collect(probe, [(turn.speaker, turn.text) for turn in turns])[1]
    return {
        "inspector": next(path for path in (out / "inspector").glob("*.html") if path.name != "index.html"),
        "index": out / "inspector" / "index.html",
        "report": out / "evaluation" / "report.html",
        "dashboard": write_dashboard(out / "dashboard.html", coders[1], record, title=turns[0].text),
    }


@pytest.mark.parametrize("kind", ["inspector", "index", "report", "dashboard"])
def test_hostile_text_stays_text_and_nothing_is_asked_for(kind: str, pages: dict[str, Path], browser: Any) -> None:
    messages, requests = list[str](), list[str]()
    page = browser.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    for event in ("pageerror", "dialog"):
        page.on(event, lambda what: messages.append(str(what)))
    page.goto(pages[kind].as_uri())
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    page.wait_for_timeout(200)
    shown = page.evaluate("document.body.innerText + document.title")
    assert page.evaluate("window.hacked") is None
    assert page.locator("iframe, link[rel=stylesheet], body img:not([src^='data:'])").count() == 0
    page.close()
    assert [url for url in requests if not url.startswith("data:")] == [pages[kind].as_uri()]
    assert messages == []
    assert "window.hacked" in shown or "onerror" in shown, "the hostile text is not on the page: nothing was tested"
