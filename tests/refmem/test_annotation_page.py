"""The page in a browser, by keyboard alone, and what must not be in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from refmem_samples import HOSTILE, corpus, dialogue, item

from remind.core.errors import ConfigError, DataError
from remind.core.files import write_rows
from remind.data.dialogue import Corpus, Image
from remind.data.readers import write_refmem
from remind.refmem import annotate
from remind.refmem.annotate import in_order, page_data, windows
from remind.refmem.items import Item, write_items
from remind.refmem.merge import read_annotations

ITEMS = [
    item("one", options=("she hikes", HOSTILE[0], HOSTILE[2], "she bakes")),
    item("two", "multi", question=HOSTILE[1], evidence=("T0", "T1", "T2", "T3"), images=(0,)),
    item("three", "direct", dimension="temporal_dynamics", candidates=("a quiet life", HOSTILE[0], HOSTILE[2])),
]

#: As annotator "Ana <b>" is shown them.
ORDER = in_order(sorted(ITEMS, key=lambda one: one.id), 0, "Ana <b>")


def write(path: Path, items: list[Item], held: Corpus, annotator: str) -> Path:
    """An annotator's page."""
    path.write_text(annotate.page_html(page_data(items, held, annotator)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page") / "page.html", ITEMS, corpus(), "Ana <b>")


class Opened:
    """The page opened from disk without a network, with all that its console said and all it asked for."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 860}, offline=True)
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

    def go_to(self, name: str) -> None:
        self.press(*["n"] * [one.id for one in ORDER].index(name))
        assert self.page.evaluate("item().id") == name

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


def test_three_items_by_keyboard_alone_are_saved_and_read_back(opened: Opened, made: Path, tmp_path: Path) -> None:
    candidates = in_order(sorted(ITEMS[2].candidates), 0, "Ana <b>", "three")
    for place, one in enumerate(ORDER):
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
    saved = {row.item_id: row for row in read_annotations(opened.save(tmp_path / "saved.jsonl"), ITEMS)}
    one, two, three = (saved[name] for name in ("one", "two", "three"))
    assert (one.answers, one.evidence, one.images, one.confidence) == (("C",), ("T20", "T21"), (), 4)
    assert one.note == 'said "so" \\ n 5'
    assert (two.answers, two.evidence, two.images, two.confidence) == (("A", "D"), ("T0", "T1", "T2", "T3"), (0,), 5)
    assert (three.answers, three.evidence, three.confidence) == ((HOSTILE[0], "her own way", "n"), (), 2)
    assert all(0 < row.seconds < 60 and not row.remove for row in saved.values())
    assert opened.said == []
    assert {url.split(":")[0] for url in opened.fetched} <= {"file", "blob"}
    # nothing that is data ran, and text that turns the direction stays inside its own element
    assert opened.page.evaluate("window.hacked === undefined")
    assert opened.page.locator("#turns img, #choices img, #choices b").count() == 0


def test_what_was_done_survives_closing_and_goes_to_another_machine(
    opened: Opened, browser: Any, made: Path, tmp_path: Path
) -> None:
    opened.go_to("two")
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
    (before,) = read_annotations(saved := opened.save(tmp_path / "saved.jsonl"), ITEMS)
    other = Opened(browser, made)
    other.page.set_input_files("#file", saved)
    other.page.wait_for_selector("#message.good")
    (after,) = read_annotations(other.save(tmp_path / "again.jsonl"), ITEMS)
    assert replace(after, seconds=0) == replace(before, seconds=0)
    # files of others are refused whole
    for change, why in (({"annotator": "Ben"}, "annotated by Ben"), ({"item_id": "gone"}, "another build")):
        bad = replace(before, **{"item_id": "one", "fingerprint": None, **change})
        write_rows(tmp_path / "other.jsonl", map(asdict, [replace(before, answers=("D",)), bad]))
        other.page.set_input_files("#file", tmp_path / "other.jsonl")
        other.page.wait_for_function("(why) => byId('message').textContent.includes(why)", arg=why)
        assert other.state("two")["answers"] == ["B"]
    assert other.said == []
    other.context.close()


def given_data(path: Path) -> Any:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)[1])


def test_the_page_is_the_same_whatever_the_generated_answer(tmp_path: Path) -> None:
    for kind in ("single", "multi", "direct"):
        texts = set()
        for answers, maker in (("A", "m1"), ("D", "m2")):
            given = item("i", kind, answers=tuple(answers), made_by=maker, prompt_id=maker, cluster_id=maker)
            texts.add(write(tmp_path / "p.html", [given], corpus(), "Ana").read_text(encoding="utf-8"))
        assert len(texts) == 1


def test_the_whole_dialogue_finding_and_flags(opened: Opened, tmp_path: Path) -> None:
    while opened.page.evaluate("item().id") != "one":
        opened.press("n")
    page = opened.page
    # 20±4 and 95±4 of 120 turns
    assert [page.locator(name).count() for name in (".turn:visible", ".turn.proposed", ".gap")] == [18, 2, 5]
    page.locator(".gap summary").first.click()
    assert page.locator(".turn:visible").count() == 18 + 16
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


def test_a_page_for_every_annotator_with_pictures(tmp_path: Path) -> None:
    from PIL import Image as Picture

    Picture.new("RGB", (1600, 800), (200, 30, 30)).save(tmp_path / "red.png")
    plain = dialogue()
    turns = list(plain.sessions[0].turns)
    turns[5] = replace(turns[5], images=(Image(0, path=str(tmp_path / "red.png"), caption="red"),))
    held = Corpus((replace(plain, sessions=(replace(plain.sessions[0], turns=tuple(turns)), *plain.sessions[1:])),))
    write_items(tmp_path / "items.jsonl", [item(f"i{n}") for n in range(30)])
    write_refmem(held, tmp_path / "dialogues.jsonl")
    paths = {"drafts": str(tmp_path / "items.jsonl"), "input": str(tmp_path / "dialogues.jsonl"), "out": str(tmp_path)}
    config = annotate.AnnotateConfig(**paths, annotators=["Ana", "Ben C"], around=1)
    pages = annotate.write_pages(config)
    assert [page.name for page in pages] == ["annotate_Ana.html", "annotate_Ben_C.html"]
    shown = [given_data(page) for page in pages]
    assert shown[0]["items"][0]["near"] == [[19, 21], [94, 96]]
    assert shown[0]["dialogues"]["d1"][0]["turns"][5]["images"][0]["src"].startswith("data:image/jpeg;base64,")
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
        page_data([item("i", evidence=("T999",))], corpus(), "Ana")
