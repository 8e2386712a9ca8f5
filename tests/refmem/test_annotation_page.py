"""The page in a browser, by keyboard alone, and what must not be in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from refmem_samples import HOSTILE, dialogue, item

from remind.core.errors import ConfigError, DataError
from remind.core.files import write_rows
from remind.data.dialogue import Corpus, Image, Session, Turn
from remind.data.readers import write_refmem
from remind.refmem import annotate
from remind.refmem.annotate import in_order, page_data, windows
from remind.refmem.items import write_items
from remind.refmem.merge import read_annotations

ITEMS = [
    item("one", options=("she hikes", HOSTILE[0], HOSTILE[2], "she bakes")),
    item("two", "multi", question=HOSTILE[1], evidence=("T0", "T1", "T2", "T3"), images=(0,)),
    item("three", "direct", dimension="temporal_dynamics", candidates=("a quiet life", HOSTILE[0], HOSTILE[2])),
]
HELD = Corpus((dialogue(),))
NAMES = ("one", "two", "three")

#: As annotator "Ana <b>" is shown them.
ORDER = in_order(sorted(ITEMS, key=lambda one: one.id), 0, "Ana <b>")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("page") / "page.html"
    page.write_text(annotate.page_html(page_data(ITEMS, HELD, "Ana <b>")), encoding="utf-8")
    return page


class Opened:
    """The page opened from disk without a network, with all that its console said."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 860}, offline=True)
        self.said: list[str] = []
        self.open(path)

    def open(self, path: Path) -> None:
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.documentElement.dataset.ready === 'true'")

    def press(self, *keys: str, then: str = "") -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.page.keyboard.type(then)

    def go_to(self, name: str) -> None:
        self.press(*["n"] * [one.id for one in ORDER].index(name))

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


def test_three_items_by_keyboard_alone_are_saved_and_read_back(opened: Opened, made: Path, tmp_path: Path) -> None:
    candidates = in_order(sorted(ITEMS[2].candidates), 0, "Ana <b>", "three")
    for one in ORDER:
        if one.id == "one":
            # the answer; the first proposal ticked; one turn further down ticked too; confidence; a note
            opened.press("a", "c", ".", "Space", "ArrowDown", "Space", "4", "q", then='said "so" \\ n 5')
            opened.press("Escape")
        elif one.id == "two":
            opened.press("d", "a", "b", "b", "y", "5")
        else:
            opened.press("ABC"[candidates.index(HOSTILE[0])], "w", then="her own way; n")
            opened.press("Escape", "2")
        opened.press("Enter")
    saved = {row.item_id: row for row in read_annotations(opened.save(tmp_path / "saved.jsonl"), ITEMS)}
    found = [(one.answers, one.evidence, one.images, one.confidence) for one in map(saved.__getitem__, NAMES)]
    ticked = [(("C",), ("T20", "T21"), (), 4), (("A", "D"), ("T0", "T1", "T2", "T3"), (0,), 5)]
    assert found == [*ticked, ((HOSTILE[0], "her own way", "n"), (), (), 2)]
    assert saved["one"].note == 'said "so" \\ n 5'
    assert opened.said == []
    # nothing that is data ran, and text that turns the direction stays inside its own element
    assert opened.page.evaluate("window.hacked === undefined")
    assert opened.page.locator("#turns img, #choices img, #choices b").count() == 0


def test_what_was_done_goes_to_another_machine(opened: Opened, browser: Any, made: Path, tmp_path: Path) -> None:
    opened.go_to("two")
    opened.press("b", "y", "3", "q", then="half")
    # closing a driven page is a kill: what it stored may still be on its way, until another page sees it
    beside = opened.context.new_page()
    beside.goto(made.as_uri())
    beside.wait_for_function("Object.values(localStorage).some((kept) => kept.includes('\"half\"'))")
    opened.page.close()
    opened.open(made)
    # at the same item, in the same state
    assert opened.page.evaluate("item().id") == "two"
    (before,) = read_annotations(saved := opened.save(tmp_path / "saved.jsonl"), ITEMS)
    other = Opened(browser, made)
    other.page.set_input_files("#file", saved)
    other.page.wait_for_selector("#message.good")
    (after,) = read_annotations(other.save(tmp_path / "again.jsonl"), ITEMS)
    assert replace(after, seconds=0) == replace(before, seconds=0)
    assert (after.answers, after.evidence, after.note) == (("B",), ("T0", "T1", "T2", "T3"), "half")
    # files of others are refused whole
    bad = replace(before, item_id="one", fingerprint=None, annotator="Ben")
    write_rows(tmp_path / "other.jsonl", map(asdict, [replace(before, answers=("D",)), bad]))
    other.page.set_input_files("#file", tmp_path / "other.jsonl")
    other.page.wait_for_function("byId('message').textContent.includes('annotated by Ben')")
    assert other.page.evaluate("STATE.get('two').answers") == ["B"]
    assert other.said == []
    other.context.close()


def test_the_page_is_the_same_whatever_the_generated_answer() -> None:
    for kind in ("single", "multi", "direct"):
        made = [item("i", kind, answers=(one,), made_by=one, prompt_id=one, cluster_id=one) for one in "AD"]
        one, other = (annotate.page_html(page_data([given], HELD, "Ana")) for given in made)
        assert one == other


def test_the_whole_dialogue_finding_and_flags(opened: Opened, tmp_path: Path) -> None:
    opened.go_to("one")
    visible = opened.page.locator(".turn:visible")
    # 20±4 and 95±4 of 120 turns
    assert visible.count() == 18
    opened.press("v")
    assert visible.count() == 120
    opened.press("v", "/", then="subject 77")
    opened.press("Enter", "Escape", "ArrowDown", "Space")
    assert opened.page.evaluate("STATE.get('one').evidence") == ["T77"]
    opened.press("r")
    (flag,) = read_annotations(opened.save(tmp_path / "a.jsonl"), ITEMS)
    assert (flag.remove, flag.answers, flag.confidence) == (True, (), None)


def test_a_page_for_every_annotator_with_pictures(tmp_path: Path) -> None:
    from PIL import Image as Picture

    Picture.new("RGB", (1600, 800), (200, 30, 30)).save(tmp_path / "red.png")
    plain = dialogue()
    red = Turn("R", "Ana", "A red one.", images=(Image(12, path=str(tmp_path / "red.png"), caption="red"),))
    write_items(tmp_path / "items.jsonl", [item(f"i{n}") for n in range(30)])
    held = Corpus((replace(plain, sessions=(*plain.sessions, Session("S4", None, (red,)))),))
    write_refmem(held, tmp_path / "dialogues.jsonl")
    paths = {"drafts": str(tmp_path / "items.jsonl"), "input": str(tmp_path / "dialogues.jsonl"), "out": str(tmp_path)}
    config = annotate.AnnotateConfig(**paths, annotators=["Ana", "Ben C"], around=1)
    pages = annotate.write_pages(config)
    assert [page.name for page in pages] == ["annotate_Ana.html", "annotate_Ben_C.html"]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    shown = [json.loads(text.partition('id="data">')[2].partition("</script>")[0]) for text in texts]
    assert shown[0]["items"][0]["near"] == [[19, 21], [94, 96]]
    assert shown[0]["dialogues"]["d1"][3]["turns"][0]["images"][0]["src"].startswith("data:image/jpeg;base64,")
    orders = [[one["id"] for one in data["items"]] for data in shown]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    with pytest.raises(ConfigError):
        replace(config, annotators=["a b", "a_b"])
    # sessions are turns 0-39, 40-79, 80-119; 1±2 cut at the start, joined with 6±2, 42±2 cut at its session
    assert windows(plain, item("w", evidence=("T1", "T6", "T42"), images=()), 2) == [(0, 8), (40, 44)]
    # image 1 is shared in turn 15
    assert windows(plain, item("w", evidence=(), images=(1,)), 1) == [(14, 16)]
    with pytest.raises(DataError, match="no evidence, or"):
        page_data([item("i", evidence=("T999",))], HELD, "Ana")
