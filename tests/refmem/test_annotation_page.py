"""The page in a browser, by keyboard alone, and what must not be in it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from annotation_samples import HOSTILE, corpus, dialogue, item

from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import Corpus, Image
from remind.data.readers import write_refmem
from remind.refmem import annotate
from remind.refmem.annotate import candidates_for, order_for, page_data, windows
from remind.refmem.annotations import read_annotations, write_annotations
from remind.refmem.items import Item, write_items

ITEMS = [
    item("one", options=("she hikes", HOSTILE[0], HOSTILE[2], "she bakes")),
    item("two", "multi", question=HOSTILE[1], evidence=("T0", "T1", "T2", "T3"), images=(0,)),
    item("three", "direct", dimension="temporal_dynamics", candidates=("a quiet life", HOSTILE[0], HOSTILE[2])),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page") / "page.html", ITEMS, corpus(), "Ana <b>")


def write(path: Path, items: list[Item], held: Corpus, annotator: str, **options: Any) -> Path:
    """An annotator's page."""
    path.write_text(annotate.page_html(page_data(items, held, annotator, **options)), encoding="utf-8")
    return path


class Opened:
    """The page opened from disk without a network, with all that its console said and all it asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 860}, offline=True, **options)
        self.said: list[str] = []
        self.fetched: list[str] = []
        self.open(path)

    def open(self, path: Path) -> None:
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.fetched.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.documentElement.dataset.ready === 'true'")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def state(self, name: str) -> dict[str, Any]:
        return self.page.evaluate("(id) => STATE.get(id)", name)

    def save(self, path: Path) -> Path:
        with self.page.expect_download() as caught:
            self.press("s")
        caught.value.save_as(path)
        return path


@pytest.fixture
def opened(browser: Any, made: Path) -> Iterator[Opened]:
    page = Opened(browser, made)
    yield page
    page.context.close()


def to_item(opened: Opened, name: str) -> None:
    """From the first item on to one of a name."""
    for _ in range([one.id for one in order_for(ITEMS, "Ana <b>", 0)].index(name)):
        opened.press("n")
    assert opened.page.evaluate("item().id") == name


def test_three_items_by_keyboard_alone_are_saved_and_read_back(opened: Opened, made: Path, tmp_path: Path) -> None:
    candidates = candidates_for(ITEMS[2], "Ana <b>", 0)
    for place, one in enumerate(order_for(ITEMS, "Ana <b>", 0)):
        assert opened.page.locator("#count").inner_text() == f"{place} of 3 done"
        if one.id == "one":
            # the answer; the first proposal ticked; one turn further down ticked too; confidence; a note
            opened.press("a", "c", ".", "Space", "ArrowDown", "Space", "4", "q")
            opened.page.keyboard.type('said "so" \\ n 5')
            opened.press("Escape")
        elif one.id == "two":
            opened.press("d", "a", "b", "b", "y", "5")
        else:
            opened.press("ABC"[candidates.index(HOSTILE[0])], "w")
            opened.page.keyboard.type("her own way; n")
            opened.press("Escape", "2")
        assert "Done" in opened.page.locator("#missing").inner_text()
        opened.press("Enter")
    assert opened.page.locator("#count").inner_text() == "3 of 3 done"
    saved = {row.item_id: row for row in read_annotations(opened.save(tmp_path / "saved.jsonl"), ITEMS)}
    one, two, three = (saved[name] for name in ("one", "two", "three"))
    assert (one.answers, one.evidence, one.images, one.confidence) == (("C",), ("T20", "T21"), (), 4)
    assert one.note == 'said "so" \\ n 5'
    assert (two.answers, two.evidence, two.images, two.confidence) == (("A", "D"), ("T0", "T1", "T2", "T3"), (0,), 5)
    assert (three.answers, three.evidence, three.confidence) == ((HOSTILE[0], "her own way", "n"), (), 2)
    assert not any(row.remove for row in saved.values())
    assert all(0 < row.seconds < 60 for row in saved.values())
    assert opened.said == []
    assert {url.split(":")[0] for url in opened.fetched} <= {"file", "blob"}
    assert opened.fetched[0] == made.as_uri()
    # nothing that is data ran, and text that turns the direction stays inside its own element
    assert opened.page.evaluate("window.hacked === undefined")
    assert opened.page.locator("#turns img, #choices img, #choices b").count() == 0


def test_what_was_done_survives_closing_and_goes_to_another_machine(
    opened: Opened, browser: Any, made: Path, tmp_path: Path
) -> None:
    to_item(opened, "two")
    opened.press("b", "y", "3", "q")
    opened.page.keyboard.type("half")
    # closing a driven page is a kill: what it stored may still be on its way, until another page sees it
    (blank := tmp_path / "blank.html").write_text("<!doctype html>", encoding="utf-8")
    beside = opened.context.new_page()
    beside.goto(blank.as_uri())
    beside.wait_for_function("Object.values(localStorage).some((kept) => kept.includes('\"half\"'))")
    opened.page.close()
    opened.open(made)
    # at the same item, in the same state
    assert opened.page.evaluate("item().id") == "two"
    assert opened.state("two") | {"seconds": 0} == {
        "answers": ["B"], "own": "", "evidence": ["T0", "T1", "T2", "T3"], "images": [0], "confidence": 3,
        "remove": False, "note": "half", "seconds": 0,
    }  # fmt: skip
    saved = opened.save(tmp_path / "saved.jsonl")
    other = Opened(browser, made)
    other.page.set_input_files("#file", saved)
    other.page.wait_for_selector("#message.good")
    again = other.save(tmp_path / "again.jsonl")
    (before,), (after,) = read_annotations(saved, ITEMS), read_annotations(again, ITEMS)
    assert replace(after, seconds=0) == replace(before, seconds=0)
    assert after.seconds >= before.seconds > 0
    other.context.close()


def test_files_of_others_are_refused_whole(opened: Opened, made: Path, tmp_path: Path) -> None:
    to_item(opened, "one")
    opened.press("a", "5")
    (mine,) = read_annotations(opened.save(tmp_path / "mine.jsonl"), ITEMS)
    for change, why in (
        ({"annotator": "Ben"}, "annotated by Ben"),
        ({"fingerprint": "0" * 16}, "reads otherwise"),
        ({"item_id": "gone"}, "another build"),
        ({"answers": ("Z",)}, "no option Z"),
    ):
        fine = replace(mine, answers=("D",))
        bad = replace(mine, item_id="two", fingerprint=None)
        write_annotations([fine, replace(bad, **change)], tmp_path / "other.jsonl")
        opened.page.set_input_files("#file", tmp_path / "other.jsonl")
        opened.page.wait_for_function("(why) => byId('message').textContent.includes(why)", arg=why)
        assert "line 2" in opened.page.locator("#message").inner_text()
        assert opened.state("one")["answers"] == ["A"]
    assert opened.said == []


def test_the_whole_dialogue_finding_and_flags(opened: Opened, tmp_path: Path) -> None:
    to_item(opened, "one")
    page = opened.page
    # 20±4 and 95±4 of 120 turns
    assert [page.locator(name).count() for name in (".turn:visible", ".turn.proposed", ".gap")] == [18, 2, 5]
    page.locator(".gap").first.click()
    assert [page.locator(name).count() for name in (".turn:visible", ".gap")] == [18 + 16, 4]
    opened.press("v")
    assert page.locator(".turn:visible").count() == 120
    opened.press("v", "/")
    page.keyboard.type("subject 77")
    opened.press("Enter")
    assert page.locator(".turn.match").inner_text().startswith("דנה: We talked about subject 77")
    opened.press("Escape", "ArrowDown", "Space")
    assert opened.state("one")["evidence"] == ["T77"]
    opened.press("r")
    (flag,) = read_annotations(opened.save(tmp_path / "a.jsonl"), ITEMS)
    assert (flag.remove, flag.answers, flag.confidence) == (True, (), None)
    assert opened.said == []


def test_every_control_has_a_name_and_the_focus_is_seen(opened: Opened) -> None:
    page = opened.page
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input:not([hidden]), textarea, progress')].filter((node) =>
            !(node.labels && [...node.labels].some((label) => label.textContent.trim())) &&
            !node.getAttribute('aria-label') && !node.textContent.trim()).map((node) => node.outerHTML)"""
    )
    assert nameless == []
    seen = set()
    for _ in range(40):
        opened.press("Tab")
        kind, style = page.evaluate(
            """() => { const node = document.activeElement, row = node.closest('.turn, .choice');
                const outlines = [node, row].filter(Boolean).map((one) => getComputedStyle(one).outlineStyle);
                const outlined = outlines.some((style) => style !== 'none');
                return [node.id || node.name || node.tagName, outlined]; }"""
        )
        assert style or kind in ("BODY", "HTML", "main", "turns"), f"no focus to be seen on {kind}"
        seen.add(kind)
    assert {"next", "save", "find", "answer", "confidence", "remove", "note"} <= seen
    # one turn takes the Tab key, not all of them
    assert page.locator("#turns input[tabindex='0']").count() == 1


#: WCAG contrast of the text that is hardest to read, and its element.
WORST_CONTRAST = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const part = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    const light = (c) => 0.2126 * part(c[0]) + 0.7152 * part(c[1]) + 0.0722 * part(c[2]);
    const ground = (node) => {
        for (; node; node = node.parentElement) {
            const c = parse(getComputedStyle(node).backgroundColor);
            if (c.length < 4 || c[3] > 0) return c;
        }
        return [255, 255, 255];
    };
    let worst = [99, ''];
    const kinds = 'kbd, bdi, label, legend, .gap, .session, .tag, .name, #hint, #missing, #kind, #question';
    for (const node of document.querySelectorAll(kinds)) {
        if (!node.offsetParent) continue;
        const a = light(parse(getComputedStyle(node).color)), b = light(ground(node));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < worst[0]) worst = [ratio, node.outerHTML.slice(0, 80)];
    }
    return worst;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(browser: Any, made: Path, scheme: str) -> None:
    opened = Opened(browser, made, color_scheme=scheme)
    opened.press("a", "y")
    worst = opened.page.evaluate(WORST_CONTRAST)
    assert worst[0] >= 4.5, worst
    opened.context.close()


def given_data(path: Path) -> tuple[str, Any]:
    text = path.read_text(encoding="utf-8")
    return text, json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.mark.parametrize("kind", ["single", "multi", "direct"])
def test_the_page_is_the_same_whatever_the_generated_answer(kind: str, tmp_path: Path) -> None:
    texts = []
    for answers, maker in (("A", "m1"), ("D", "m2")):
        given = item("i", kind, answers=tuple(answers), made_by=maker, prompt_id=maker, cluster_id=maker)
        texts.append(write(tmp_path / "p.html", [given], corpus(), "Ana").read_bytes())
    assert texts[0] == texts[1]


def test_hostile_text_stays_text(made: Path) -> None:
    text, data = given_data(made)
    assert text.count("<script") == text.count("</script>") == 2
    assert "window.hacked = 1</script>" not in text
    assert "template-secret" not in text
    assert [one["id"] for one in data["items"]] == [one.id for one in order_for(ITEMS, "Ana <b>", 0)]
    shown = "id dialogue dimension hint format question choices evidence images near fingerprint"
    assert set(data["items"][0]) == set(shown.split())


def test_pictures_go_into_the_page(tmp_path: Path, browser: Any) -> None:
    from PIL import Image as Picture

    Picture.new("RGB", (1600, 800), (200, 30, 30)).save(tmp_path / "red.png")
    plain = dialogue(sessions=1, turns=8)
    turns = list(plain.turns)
    turns[5] = replace(turns[5], images=(Image(0, path=str(tmp_path / "red.png"), caption="red"),))
    held = Corpus((replace(plain, sessions=(replace(plain.sessions[0], turns=tuple(turns)),)),))
    given = item("i", dimension="topic_scoped_visual_prototypes", evidence=(), images=(0,))
    opened = Opened(browser, write(tmp_path / "p.html", [given], held, "Ana"))
    script = "const i = document.querySelector('#turns img'); return i.complete && [i.naturalWidth, i.naturalHeight];"
    assert opened.page.wait_for_function(f"(() => {{ {script} }})()").json_value() == [480, 240]
    assert opened.said == []
    opened.context.close()
    _, data = given_data(write(tmp_path / "q.html", [given], held, "Ana", pictures=False))
    assert data["dialogues"]["d1"][0]["turns"][5]["images"] == [{"index": 0, "caption": "red", "src": None}]


def test_a_page_for_every_annotator(tmp_path: Path) -> None:
    write_items(tmp_path / "items.jsonl", ITEMS[:1])
    write_refmem(corpus(), tmp_path / "dialogues.jsonl")
    paths = {"drafts": str(tmp_path / "items.jsonl"), "input": str(tmp_path / "dialogues.jsonl"), "out": str(tmp_path)}
    config = annotate.AnnotateConfig(**paths, annotators=["Ana", "Ben C"], around=1)
    pages = annotate.write_pages(config)
    assert [page.name for page in pages] == ["annotate_Ana.html", "annotate_Ben_C.html"]
    (shown,) = given_data(pages[1])[1]["items"]
    assert shown["near"] == [[19, 21], [94, 96]]
    for change in ({"annotators": []}, {"annotators": ["a b", "a_b"]}, {"around": -1}):
        with pytest.raises(ConfigError):
            replace(config, **change)


def test_windows_by_hand() -> None:
    given = item("w", evidence=("T1", "T6", "T42"))
    # sessions are turns 0-39, 40-79, 80-119; 1±2 cut at the start, joined with 6±2, 42±2 cut at its session
    assert windows(dialogue(), given, 2) == [(0, 8), (40, 44)]
    assert windows(dialogue(), given, 0) == [(1, 1), (6, 6), (42, 42)]
    # image 1 is shared in turn 15
    assert windows(dialogue(), item("w", evidence=(), images=(1,)), 1) == [(14, 16)]
    assert windows(dialogue(), item("w", evidence=()), 1) == [(0, 39)]


def test_items_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs items"):
        page_data([], corpus(), "Ana")
    for change, reason in (
        ({"dialogue_id": "d9"}, "no dialogue 'd9'"),
        ({"images": (99,)}, "image 99"),
        ({"evidence": ("T999",)}, "T999"),
    ):
        with pytest.raises(DataError, match=reason):
            page_data([item("i", **change)], corpus(), "Ana")


def test_orders_differ_by_annotator_and_seed_and_hold_everything() -> None:
    items = [item(f"i{n}") for n in range(30)]
    orders = [[one.id for one in order_for(items, *key)] for key in (("Ana", 0), ("Ben", 0), ("Ana", 1))]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(one.id for one in items) for order in orders)
    # the file's own order has no part in it
    assert [one.id for one in order_for(items[::-1], "Ana", 0)] == orders[0]


def test_the_place_of_a_candidate_does_not_give_the_answer_away() -> None:
    """It stands first in every draft."""
    drafts = [item(f"d{n}", "direct") for n in range(600)]
    places = Counter(candidates_for(given, "Ana", 0).index("a quiet life") for given in drafts)
    # 600 draws of 1/3: deviation 11.5
    assert all(abs(places[n] - 200) < 5 * 11.6 for n in range(3))
