"""Pages in a browser: they open fast and in silence, answer pointer and keys, and run nothing that is data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remind.viewing.explanations import Explanation
from remind.viewing.inspector.page import write_page
from tests.viewing.conftest import data_of, inspect_state, long_state, table_grounder


@pytest.fixture(scope="module")
def short_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(inspect_state(table_grounder(), long_state(60)), tmp_path_factory.mktemp("short") / "page.html")


def test_tokens_are_made_when_they_come_near(tmp_path: Path, open_page: Any) -> None:
    path = write_page(inspect_state(table_grounder(), long_state(600)), tmp_path / "page.html")
    opened = open_page(path)
    assert opened.page.locator(".turn").count() == 600
    assert opened.page.locator("#t599 .tok").count() == 0
    opened.page.evaluate("show(599)")
    opened.page.locator("#t599 .tok").nth(3).click()
    assert opened.page.locator("#panel .example").count() > 0
    assert (opened.said, opened.fetched) == ([], [path.as_uri()])


def test_a_click_shows_the_features_of_the_token(tmp_path: Path, open_page: Any) -> None:
    inspection = inspect_state(table_grounder(), long_state(60))
    plain = data_of(write_page(inspection, tmp_path / "page.html"))["layers"][0]
    named = plain["ids"][plain["guiding"][0]]
    name = Explanation("<i>talk of tea", {"detection": {"value": 0.9, "low": 0.7, "high": 1.0, "n": 20}})
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
    # shaded by a feature, exactly the tokens that show it
    row, layer = page.locator("#panel details.feature").first, data["layers"][0]
    local = layer["ids"].index(int(row.get_attribute("data-feature")))
    row.locator("summary").click()
    row.get_by_role("button", name="Shade the dialogue by it").click()
    shaded = page.evaluate("[...document.querySelectorAll('.tok:is([class*=v])')].map(t => Number(t.dataset.t))")
    filled = page.evaluate("[...document.querySelectorAll('.tok')].map(t => Number(t.dataset.t))")
    assert set(shaded) == {t for t in filled if local in layer["features"][t]} != set()
    assert opened.said == []


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
    assert after("ArrowDown")[1] == "t1"
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
