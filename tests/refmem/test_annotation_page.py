"""The page in a browser, by keyboard alone, and what must not be in it."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Picture
from refmem_samples import HOSTILE, dialogue, item

from remind.core.errors import ConfigError, DataError
from remind.core.files import write_rows
from remind.data.dialogue import Corpus, Image, Session, Turn
from remind.data.readers import write_refmem
from remind.refmem import annotate
from remind.refmem.annotate import in_order, page_data, windows
from remind.refmem.items import write_items
from remind.refmem.merge import Row, read_annotations
from sae.pages import data_of

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


def press(page: Any, *keys: str, then: str = "") -> None:
    for key in keys:
        page.keyboard.press(key)
    page.keyboard.type(then)


def go_to(page: Any, name: str) -> None:
    press(page, *["n"] * [one.id for one in ORDER].index(name))


def saved(page: Any, path: Path) -> list[Row]:
    """The rows of the file that the page saves."""
    with page.expect_download() as caught:
        press(page, "s")
    caught.value.save_as(path)
    return read_annotations(path, ITEMS)


def test_three_items_by_keyboard_alone_are_saved_and_read_back(open_page: Any, made: Path, tmp_path: Path) -> None:
    candidates = in_order(sorted(ITEMS[2].candidates), 0, "Ana <b>", "three")
    opened = open_page(made)
    page = opened.page
    for one in ORDER:
        if one.id == "one":
            # the answer; the first proposal ticked; one turn further down ticked too; confidence; a note
            press(page, "a", "c", ".", "Space", "ArrowDown", "Space", "4", "q", then='said "so" \\ n 5')
            press(page, "Escape")
        elif one.id == "two":
            press(page, "d", "a", "b", "b", "y", "5")
        else:
            press(page, "ABC"[candidates.index(HOSTILE[0])], "w", then="her own way; n")
            press(page, "Escape", "2")
        press(page, "Enter")
    rows = {row.item_id: row for row in saved(page, tmp_path / "saved.jsonl")}
    found = [(one.answers, one.evidence, one.images, one.confidence) for one in map(rows.__getitem__, NAMES)]
    ticked = [(("C",), ("T20", "T21"), (), 4), (("A", "D"), ("T0", "T1", "T2", "T3"), (0,), 5)]
    assert found == [*ticked, ((HOSTILE[0], "her own way", "n"), (), (), 2)]
    assert rows["one"].note == 'said "so" \\ n 5'
    # nothing that is data ran, and text that turns the direction stays inside its own element
    assert opened.said == []
    assert page.evaluate("window.hacked === undefined")
    assert page.locator("#turns img, #choices img, #choices b").count() == 0


def test_what_was_done_goes_to_another_machine(open_page: Any, made: Path, tmp_path: Path) -> None:
    page = open_page(made).page
    go_to(page, "two")
    press(page, "b", "y", "3", "q", then="half")
    # closing a driven page is a kill: what it stored may still be on its way, until another page sees it
    beside = page.context.new_page()
    beside.goto(made.as_uri())
    until = time.monotonic() + 60
    while not beside.evaluate("Object.values(localStorage).some((kept) => kept.includes('\"half\"'))"):
        assert time.monotonic() < until
        beside.wait_for_timeout(20)
    page.close()
    # at the same item, in the same state
    page = open_page(made, beside.context).page
    assert page.evaluate("item().id") == "two"
    (before,) = saved(page, tmp_path / "saved.jsonl")
    other = open_page(made)
    other.page.set_input_files("#file", tmp_path / "saved.jsonl")
    other.page.wait_for_selector("#message.good")
    (after,) = saved(other.page, tmp_path / "again.jsonl")
    assert replace(after, seconds=0) == replace(before, seconds=0)
    assert (after.answers, after.evidence, after.note) == (("B",), ("T0", "T1", "T2", "T3"), "half")
    # files of others are refused whole
    bad = replace(before, item_id="one", fingerprint=None, annotator="Ben")
    write_rows(tmp_path / "other.jsonl", map(asdict, [replace(before, answers=("D",)), bad]))
    other.page.set_input_files("#file", tmp_path / "other.jsonl")
    other.page.locator("#message", has_text="annotated by Ben").wait_for()
    assert other.page.evaluate("STATE.get('two').answers") == ["B"]
    assert other.said == []


def test_the_page_is_the_same_whatever_the_generated_answer() -> None:
    for kind in ("single", "multi", "direct"):
        made = [item("i", kind, answers=(one,), made_by=one, prompt_id=one, cluster_id=one) for one in "AD"]
        one, other = (annotate.page_html(page_data([given], HELD, "Ana")) for given in made)
        assert one == other


def test_the_whole_dialogue_finding_and_flags(open_page: Any, made: Path, tmp_path: Path) -> None:
    page = open_page(made).page
    go_to(page, "one")
    visible = page.locator(".turn:visible")
    # 20±4 and 95±4 of 120 turns
    assert visible.count() == 18
    press(page, "v")
    assert visible.count() == 120
    press(page, "v", "/", then="subject 77")
    press(page, "Enter", "Escape", "ArrowDown", "Space")
    assert page.evaluate("STATE.get('one').evidence") == ["T77"]
    press(page, "r")
    (flag,) = saved(page, tmp_path / "a.jsonl")
    assert (flag.remove, flag.answers, flag.confidence) == (True, (), None)


def test_a_page_for_every_annotator_with_pictures(tmp_path: Path) -> None:
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
    shown = [data_of(page.read_text(encoding="utf-8")) for page in pages]
    assert shown[0]["items"][0]["near"] == [[19, 21], [94, 96]]
    assert shown[0]["dialogues"]["d1"][3]["turns"][0]["images"][0]["src"].startswith("data:image/jpeg;base64,")
    orders = [[one["id"] for one in data["items"]] for data in shown]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    with pytest.raises(ConfigError):
        replace(config, annotators=["a b", "a_b"])
    with pytest.raises(DataError, match="no evidence, or"):
        page_data([item("i", evidence=("T999",))], HELD, "Ana")


def test_windows_are_cut_at_sessions_and_joined() -> None:
    """Sessions are turns 0-39, 40-79, 80-119; image 1 is shared in turn 15."""
    assert windows(dialogue(), item("w", evidence=("T1", "T6", "T42"), images=()), 2) == [(0, 8), (40, 44)]
    assert windows(dialogue(), item("w", evidence=(), images=(1,)), 1) == [(14, 16)]
