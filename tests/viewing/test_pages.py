"""Pages in a browser: they open fast and in silence, answer pointer and keys, and run nothing that is data."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remind.viewing.inspector.inspection import inspect_state
from remind.viewing.inspector.page import write_page


def written(made: SimpleNamespace, turns: int, folder: Path) -> Path:
    return write_page(inspect_state(made.table_grounder(), made.long_state(turns)), folder / "page.html")


@pytest.fixture(scope="module")
def short_page(made: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(made, 60, tmp_path_factory.mktemp("short"))


def test_two_thousand_turns_open_within_two_seconds(made: SimpleNamespace, tmp_path: Path, open_page: Any) -> None:
    long_page, seconds = written(made, 2000, tmp_path), []
    # a machine that does other things at the moment deserves another try
    for _ in range(5):
        opened = open_page(long_page)
        seconds.append(opened.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000)
        assert opened.page.locator(".turn").count() == 2000
        assert opened.said == []
        assert opened.fetched == [long_page.as_uri()]
        if seconds[-1] <= 2:
            break
        opened.close()
    assert min(seconds) <= 2, f"opened in {seconds} s"
    page = opened.page
    # the last turn has no elements for its tokens before one goes there
    assert page.locator("#t1999 .tok").count() == 0
    page.evaluate("show(1999)")
    page.locator("#t1999 .tok").nth(3).click()
    assert page.locator("#panel details.feature").count() > 0
    assert page.locator("#panel .example").count() > 0
    assert opened.said == []


def test_a_click_shows_the_features_of_the_token(short_page: Path, open_page: Any, made: SimpleNamespace) -> None:
    opened = open_page(short_page)
    page, data = opened.page, made.data_of(short_page)
    token = page.locator("#t7 .tok").nth(5)
    t = int(token.get_attribute("data-t"))
    token.click()
    assert token.get_attribute("aria-pressed") == "true"
    assert page.locator("#panel h2").inner_text() == f"“{token.inner_text()}”"
    for layer in data["layers"]:
        width, ids = layer["width"], layer["ids"]
        row = made.numbers_of(layer["features"], layer["kind"])[t * width : (t + 1) * width]
        wanted = {str(ids[int(local) - 1]) for local in row if local}
        rows = page.locator(f"#panel details.feature[data-layer='{layer['layer']}']")
        assert {rows.nth(n).get_attribute("data-feature") for n in range(rows.count())} == wanted
    closed = page.locator("#panel details.feature").nth(2)
    closed.locator("summary").click()
    assert closed.locator(".example").count() > 0
    peak = closed.locator(".example .peak").first
    assert "v8" in peak.get_attribute("class")
    # an example leads to its token
    closed.locator(".example button").first.click()
    assert page.locator(".tok[aria-pressed='true']").inner_text() == page.locator("#panel h2 bdi").inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".tok[aria-pressed='true']").count() == 0
    assert "What the strategy asks for" in page.locator("#panel h2").inner_text()
    page.locator("#t3 .number").click()
    assert page.locator("#panel h2").inner_text() == "Turn 4"
    assert page.locator("#panel details.feature").count() > 0
    assert opened.said == []


def test_shades_grow_with_what_they_stand_for(short_page: Path, open_page: Any, made: SimpleNamespace) -> None:
    opened = open_page(short_page)
    page, data = opened.page, made.data_of(short_page)
    for choice, values in (
        ("s", made.numbers_of(data["tokens"]["s"], "f4")),
        ("r", made.numbers_of(data["tokens"]["r"], "f4")),
        ("1", made.numbers_of(data["layers"][1]["r"], "f4")),
    ):
        page.select_option("#by", choice)
        shown = page.evaluate(
            "[...document.querySelectorAll('.tok')].map(t => [Number(t.dataset.t), "
            r"Number((t.className.match(/v(\d)/) || [0, 0])[1])])"
        )
        assert len(shown) > 100
        pairs = sorted((values[t], level) for t, level in shown)
        assert [level for _, level in pairs] == sorted(level for _, level in pairs)
        assert {level for _, level in pairs} >= {0, 1, 2, 3}
        median = sorted(values)[len(values) // 2]
        assert all((level == 0) == (value <= median) for value, level in pairs)
    # shaded by a feature, exactly the tokens that show it
    page.locator("#t2 .tok").nth(4).click()
    row = page.locator("#panel details.feature").first
    feature = int(row.get_attribute("data-feature"))
    row.get_by_role("button", name="Shade the dialogue by it").click()
    layer = data["layers"][0]
    local, width = layer["ids"].index(feature) + 1, layer["width"]
    rows = made.numbers_of(layer["features"], layer["kind"])
    fires = {i // width for i, found in enumerate(rows) if found == local}
    lit = page.evaluate("[...document.querySelectorAll('.tok[class*=\" v\"]')].map(t => Number(t.dataset.t))")
    there = set(page.evaluate("[...document.querySelectorAll('.tok')].map(t => Number(t.dataset.t))"))
    assert set(lit) == fires & there
    assert lit


def test_keys_alone_are_enough(short_page: Path, open_page: Any) -> None:
    opened = open_page(short_page)
    page = opened.page
    here = "[document.activeElement.dataset.t, document.activeElement.closest('.turn')?.id]"
    page.locator("#t0 .tok").first.focus()
    assert page.evaluate(here) == ["0", "t0"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(here) == ["2", "t0"]
    assert page.locator("#tip").is_visible()
    page.keyboard.press("ArrowDown")
    assert page.evaluate(here)[1] == "t1"
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(here)[1] == "t2"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(here)[1] == "t1"
    # one token at a time is in the order of the tab key
    assert page.locator(".tok[tabindex='0']").count() == 1
    outline = page.evaluate(
        "getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).outlineWidth"
    )
    assert outline == "solid2px"
    page.keyboard.press("Enter")
    assert page.locator("#panel h2").inner_text().startswith("“")
    page.keyboard.press("Escape")
    assert "strategy" in page.locator("#panel h2").inner_text()
    page.locator("#prompts summary").focus()
    page.keyboard.press("Enter")
    page.locator("[role=tab][data-level=x0]").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#pane-x1").is_visible()
    assert not page.locator("#pane-x0").is_visible()
    assert page.locator("#pane-x1 mark.marker").count() == 2 * page.locator(".turn.opens").count() > 0
    page.get_by_role("button", name="Side by side").click()
    assert page.locator("#pane-x0").is_visible()
    assert page.locator("#pane-x1").is_visible()
    assert opened.said == []


def test_text_stays_text(made: SimpleNamespace, tmp_path: Path, open_page: Any) -> None:
    state = made.hostile_state()
    path = write_page(inspect_state(made.table_grounder(), state), tmp_path / "hostile.html")
    opened = open_page(path)
    page = opened.page
    # let every part that is built late be built
    for n in range(len(state.turns)):
        page.evaluate(f"show({n})")
        page.locator(f"#t{n} .tok").first.click()
    page.locator("#prompts summary").click()
    for row in page.locator("#panel summary").all():
        row.click()
    for n, turn in enumerate(state.turns):
        said = " ".join(turn.text.split())
        assert page.locator(f"#t{n} .said").evaluate("node => node.textContent") == said
        assert page.locator(f"#t{n} .caption").evaluate("node => node.textContent") == f"[Image #{n} Caption] {said}"
        assert page.locator(f"#t{n} .who").evaluate("node => node.textContent") == f"{turn.speaker}:"
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, iframe, object, embed, i.x, #dialogue script").count() == 0
    assert page.evaluate("document.scripts.length") == 2
    assert page.evaluate("document.title") == f"Grounding of {state.question.id}"
    assert opened.said == []
    assert opened.fetched == [path.as_uri()]
    # Hebrew runs from the right, also inside a page that does not; there the left arrow goes on
    assert page.locator("#t4 .said").evaluate("node => getComputedStyle(node).direction") == "rtl"
    assert page.locator("#t1 .said").evaluate("node => getComputedStyle(node).direction") == "ltr"
    # an emoji of two tokens is one element that knows both
    emoji = page.locator("#t3 .said .tok", has_text="\U0001f634")
    assert emoji.get_attribute("data-n") == "2"
    assert emoji.inner_text() == "\U0001f634"


def test_the_policy_lets_no_other_script_run(short_page: Path, tmp_path: Path, open_page: Any) -> None:
    html = short_page.read_text(encoding="utf-8")
    path = tmp_path / "tampered.html"
    path.write_text(
        html.replace("<h1>", "<script>window.hacked = 1</script><img src='x' onerror='window.hacked = 2'><h1>")
    )
    opened = open_page(path)
    assert opened.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in line for line in opened.said)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_shade(short_page: Path, open_page: Any, scheme: str) -> None:
    page = open_page(short_page, color_scheme=scheme).page
    colours = page.evaluate(
        """(names) => {
        const probe = document.createElement("span"); document.body.append(probe);
        const of = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
        return Object.fromEntries(names.map((n) => [n, of(n)]));
    }""",
        ["ink", "soft", "paper", "raised", "link", "bad", "gold", "block", *(f"v{n}" for n in range(1, 9))],
    )

    def light(name: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colours[name])[:3]]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(one: str, other: str) -> float:
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    for name in ("paper", "raised", *(f"v{n}" for n in range(1, 9))):
        assert contrast("ink", name) >= 4.5, name
    for name in ("soft", "link", "bad", "gold", "block"):
        assert contrast(name, "paper") >= 4.5, name
    ramp = [light("paper"), *(light(f"v{n}") for n in range(1, 9))]
    # the shades are told apart by lightness alone
    assert ramp == sorted(ramp, reverse=scheme == "light")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_a_narrow_window_needs_no_sideways_scrolling(short_page: Path, open_page: Any) -> None:
    page = open_page(short_page).page
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert not page.locator("#panel").is_visible()
    page.locator("#t2 .tok").nth(2).click()
    assert page.locator("#panel").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="Close").click()
    assert not page.locator("#panel").is_visible()
