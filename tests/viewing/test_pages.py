"""Pages in a browser: they open fast and in silence, answer pointer and keys, and run nothing that is data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remind.viewing.explanations import Explanation
from remind.viewing.inspector.page import write_page
from tests.viewing.conftest import data_of, hostile_state, inspect_state, long_state, table_grounder


@pytest.fixture(scope="module")
def short_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(inspect_state(table_grounder(), long_state(60)), tmp_path_factory.mktemp("short") / "page.html")


def test_two_thousand_turns_open_within_two_seconds(tmp_path: Path, open_page: Any) -> None:
    path = write_page(inspect_state(table_grounder(), long_state(2000)), tmp_path / "page.html")
    seconds = []
    # a machine that does other things at the moment deserves another try
    while len(seconds) < 5 and not min(seconds, default=3) <= 2:
        opened = open_page(path)
        seconds.append(opened.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000)
    assert min(seconds) <= 2, f"opened in {seconds} s"
    assert opened.page.locator(".turn").count() == 2000
    # the last turn has no elements for its tokens before one goes there
    assert opened.page.locator("#t1999 .tok").count() == 0
    opened.page.evaluate("show(1999)")
    opened.page.locator("#t1999 .tok").nth(3).click()
    assert opened.page.locator("#panel .example").count() > 0
    assert opened.said == []
    assert opened.fetched == [path.as_uri()]


def test_a_click_shows_the_features_of_the_token(tmp_path: Path, open_page: Any) -> None:
    inspection = inspect_state(table_grounder(), long_state(60))
    plain = data_of(write_page(inspection, tmp_path / "page.html"))["layers"][0]
    named = plain["ids"][plain["guiding"][0]]
    name = Explanation("<i>talk of tea", "model", {"detection": {"value": 0.9, "low": 0.7, "high": 1.0, "n": 20}})
    path = write_page(inspection, tmp_path / "page.html", names={plain["layer"]: {named: name}})
    opened = open_page(path)
    page, data = opened.page, data_of(path)
    words = page.locator(f"#panel details.feature[data-feature='{named}'] summary .words").first
    assert words.inner_text() == "<i>talk of tea (detection 0.90)"
    token = page.locator("#t7 .tok").nth(5)
    t = int(token.get_attribute("data-t"))
    token.click()
    assert page.locator("#panel h2").inner_text() == f"“{token.inner_text()}”"
    for layer in data["layers"]:
        rows = page.locator(f"#panel details.feature[data-layer='{layer['layer']}']").all()
        shown = {one.get_attribute("data-feature") for one in rows}
        assert shown == {str(layer["ids"][local]) for local in layer["features"][t]}
    closed = page.locator("#panel details.feature").nth(2)
    closed.locator("summary").click()
    closed.locator(".example").first.wait_for()  # made when the row has opened
    assert "v8" in closed.locator(".example .peak").first.get_attribute("class")
    # an example leads to its token
    closed.locator(".example button").first.click()
    assert page.locator(".tok[aria-pressed='true']").inner_text() == page.locator("#panel h2 bdi").inner_text()
    page.keyboard.press("Escape")
    assert "What the strategy asks for" in page.locator("#panel h2").inner_text()
    # shaded by a feature, exactly the tokens that show it
    row, layer = page.locator("#panel details.feature").first, data["layers"][0]
    local = layer["ids"].index(int(row.get_attribute("data-feature")))
    row.locator("summary").click()
    row.get_by_role("button", name="Shade the dialogue by it").click()
    shaded = page.evaluate("[...document.querySelectorAll('.tok:is([class*=v])')].map(t => Number(t.dataset.t))")
    filled = page.evaluate("[...document.querySelectorAll('.tok')].map(t => Number(t.dataset.t))")
    assert set(shaded) == {t for t in filled if local in layer["features"][t]} != set()
    page.locator("#t3 .number").click()
    assert page.locator("#panel h2").inner_text() == "Turn 4"
    assert opened.said == []


def test_text_stays_text(tmp_path: Path, open_page: Any) -> None:
    state = hostile_state()
    path = write_page(inspect_state(table_grounder(), state), tmp_path / "hostile.html")
    opened = open_page(path)
    page = opened.page
    # let every part that is built late be built
    for n in range(len(state.turns)):
        page.evaluate(f"show({n})")
        page.locator(f"#t{n} .tok").first.click()
    for row in page.locator("#prompts summary, #panel summary").all():
        row.click()
    for n, turn in enumerate(state.turns):
        said = " ".join(turn.text.split())
        shown = [page.locator(f"#t{n} .{part}").evaluate("node => node.textContent") for part in ("said", "caption")]
        assert shown == [said, f"[Image #{n} Caption] {said}"]
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, iframe, object, embed, i.x, #dialogue script").count() == 0
    assert page.evaluate("document.title") == f"Grounding of {state.question.id}"
    assert opened.said == []
    assert opened.fetched == [path.as_uri()]
    # Hebrew runs from the right, also inside a page that does not
    directions = [page.locator(f"#t{n} .said").evaluate("node => getComputedStyle(node).direction") for n in (4, 1)]
    assert directions == ["rtl", "ltr"]
    # an emoji of two tokens is one element that knows both
    assert page.locator("#t3 .said .tok", has_text="\U0001f634").get_attribute("data-n") == "2"
    # the policy lets no other script run
    foreign = "<script>window.hacked = 1</script><img src='x' onerror='window.hacked = 2'><h1>"
    path.write_text(path.read_text(encoding="utf-8").replace("<h1>", foreign), encoding="utf-8")
    tampered = open_page(path)
    assert tampered.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in line for line in tampered.said)


def test_keys_alone_are_enough_and_a_narrow_window_too(short_page: Path, open_page: Any) -> None:
    opened = open_page(short_page)
    page = opened.page

    def after(*keys: str) -> list[str]:
        """Token and turn that have the focus after these keys."""
        for key in keys:
            page.keyboard.press(key)
        return page.evaluate("[document.activeElement.dataset.t, document.activeElement.closest('.turn')?.id]")

    page.locator("#t0 .tok").first.focus()
    assert after("ArrowRight", "ArrowRight") == ["2", "t0"]
    assert "layer 3: " in page.evaluate("document.activeElement.title")
    assert after("ArrowDown")[1] == "t1"
    assert after("End", "ArrowRight")[1] == "t2"
    assert after("ArrowLeft")[1] == "t1"
    # one token at a time is in the order of the tab key
    assert page.locator(".tok[tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    assert page.locator("#panel h2").inner_text().startswith("“")
    page.keyboard.press("Escape")
    for prompt in page.locator("#prompts summary").all():
        prompt.focus()
        page.keyboard.press("Enter")
    page.locator("#prompts pre").nth(1).wait_for()
    assert page.locator("[data-level=x1] mark.marker").count() == 2 * page.locator(".turn.opens").count() > 0
    # states that are open stand side by side
    boxes = [page.locator(f"[data-level={level}]").bounding_box() for level in ("x0", "x1")]
    assert boxes[0]["y"] == boxes[1]["y"]
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.locator("#theme").click()
    assert page.evaluate(ground) != before
    page.set_viewport_size({"width": 360, "height": 740})
    assert not page.locator("#panel").is_visible()
    page.locator("#t2 .tok").nth(2).click()
    assert page.locator("#panel").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert opened.said == []
