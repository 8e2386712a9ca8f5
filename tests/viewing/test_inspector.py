"""The inspector: numbers against grounding and sorting in Python, pages in a browser, and the command."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image as Picture

from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import Corpus, Image, Question
from remind.data.readers.refmem import write_refmem
from remind.grounding import Grounder, GroundingConfig
from remind.models.backbone import load_backbone
from remind.models.nano import save_nano
from remind.states.dataset import write_states
from remind.states.pyramid import FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import record_of
from remind.viewing.explanations import Explanation
from remind.viewing.inspector import InspectConfig, inspect_grounding
from remind.viewing.inspector.page import Inspection, Inspector, page_name, write_page
from sae import layer_folder
from tests.viewing.conftest import data_of, inspection_of, long_state, saes

LAYER = 3


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    return inspection_of(60, 2, LAYER, beta_unit=None, beta=0.5)


@pytest.fixture(scope="module")
def data(inspection: Inspection, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_page(inspection, tmp_path_factory.mktemp("page") / "page.html", features=None, per_feature=3)
    return data_of(path)


def test_numbers_are_those_of_text_codes_and_equations(data: Any, inspection: Inspection) -> None:
    trace, layer, tokens = inspection.trace, data["layers"][1], data["tokens"]
    turns = inspection.record.x0.turns
    for start, end, turn in zip(*(tokens[name] for name in ("start", "end", "turn")), strict=True):
        assert turns[turn].start <= start < end <= turns[turn].end
    codes = trace.codes.layers[LAYER].dialogue
    for indices, values, *given in zip(codes.indices, codes.values, layer["features"], layer["values"], strict=True):
        pairs = zip(indices.tolist(), values.tolist(), strict=True)
        shown = {layer["ids"][local]: value for local, value in zip(*given, strict=True)}
        assert shown == pytest.approx({feature: value for feature, value in pairs if value > 0}, abs=1e-5)
    dense, v = codes.dense(96).double(), trace.guidance[LAYER].double()
    numbers = ((tokens["r"], trace.combined), (tokens["s"], trace.smoothed), (layer["r"], trace.resonance[LAYER]))
    for field, values in (*numbers, (layer["local"], dense @ v), (layer["v"], v[layer["ids"]])):
        assert field == pytest.approx(values.tolist(), rel=1e-4, abs=1e-4)
    assert layer["fired"] == (dense[:, layer["ids"]] > 0).sum(0).tolist()
    assert layer["active"] == (dense > 0).sum(1).tolist()


def test_top_examples_are_those_of_a_full_sort(data: Any, inspection: Inspection) -> None:
    codes = inspection.trace.codes
    layer, context, turn = data["layers"][1], data["context"], codes.turn.tolist()
    columns = codes.layers[LAYER].dialogue.dense(96)
    for place, feature in enumerate(layer["ids"]):
        column = [round(value, 4) for value in columns[:, feature].tolist()]
        best: dict[int, int] = {}
        for t, value in enumerate(column):
            if value > 0 and (turn[t] not in best or value > column[best[turn[t]]]):
                best[turn[t]] = t
        wanted = sorted((column[t] for t in best.values()), reverse=True)[:3]
        shown = layer["examples"][place]
        assert [column[peak] for peak, _ in shown] == pytest.approx(wanted, abs=2e-4)
        assert len({turn[peak] for peak, _ in shown}) == len(shown)
        for peak, digits in shown:
            around = range(max(peak - context, 0), min(peak + context + 1, len(turn)))
            near = [t for t in around if turn[t] == turn[peak]]
            for t, digit in zip(near, digits, strict=True):
                assert abs(int(digit) - 9 * column[t] / max(wanted)) < 1.01
                assert (digit == "0") == (column[t] == 0)


def test_tokens_are_made_when_they_come_near(tmp_path: Path, open_page: Any) -> None:
    opened = open_page(write_page(inspection_of(150, LAYER), tmp_path / "page.html"))
    assert opened.page.locator(".turn").count() == 150
    assert opened.page.locator("#t149 .tok").count() == 0
    opened.page.evaluate("show(149)")
    opened.page.locator("#t149 .tok").nth(3).click()
    assert opened.page.locator("#panel .example").count() > 0
    assert opened.said == []


def test_a_click_shows_the_features_of_the_token(inspection: Inspection, tmp_path: Path, open_page: Any) -> None:
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
    # shaded by a feature, exactly the tokens that show it
    row, layer = page.locator("#panel details.feature").nth(2), data["layers"][0]
    local = layer["ids"].index(int(row.get_attribute("data-feature")))
    row.locator("summary").click()
    row.get_by_role("button", name="Shade the dialogue by it").click()
    shaded = page.evaluate("[...document.querySelectorAll('.tok:is([class*=v])')].map(t => Number(t.dataset.t))")
    filled = page.evaluate("[...document.querySelectorAll('.tok')].map(t => Number(t.dataset.t))")
    assert set(shaded) == {t for t in filled if local in layer["features"][t]} != set()
    page.keyboard.press("Escape")
    assert page.locator(".tok[aria-pressed='true']").count() == 0
    assert opened.said == []


def test_keys_alone_are_enough_and_a_narrow_window_too(inspection: Inspection, tmp_path: Path, open_page: Any) -> None:
    opened = open_page(write_page(inspection, tmp_path / "page.html"))
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


# the command


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two questions about a dialogue, grounded with the nano backbone, random SAEs, and a picture as pixels."""
    folder, dialogue = tmp_path_factory.mktemp("built"), long_state(40).dialogue
    Picture.effect_noise((600, 300), 60).convert("RGB").save(folder / "bike.png")
    dialogue = dialogue.illustrated(lambda image: Image(0, str(folder / "bike.png"), 'a "red" <b>bike</b>'))
    wanted = tuple(turn.id for turn in dialogue.turns[3:30:9])
    questions = (
        Question("q/1", "long", "What does <b>Ana</b> like?", "single", ("tea", "rain"), ("A",), wanted, split="test"),
        Question("q2", "long", "Who is it?", "direct", answers=("Ben",), evidence=wanted[:1], split="test"),
    )
    write_refmem(Corpus((dialogue,), questions), folder / "talk.jsonl")
    for layer, coder in saes(1, 3).items():
        coder.save(layer_folder(folder / "sae", layer))
    pixels = {"images": "pixels", "image_tokens": 16, "image_root": str(folder)}
    settings = GroundingConfig(budget_share=0.3, alpha=5.0, **pixels)  # type: ignore[arg-type]
    grounder = Grounder(load_backbone("nano"), saes(1, 3), None, settings)
    strategy = Strategy(("Look for drinks.",), speakers=("Ana",), entities=("tea", "rain"))
    states = [FactualState(dialogue, one, (Segment(0, 12), Segment(20, 35)), strategy) for one in questions]
    reflected = [ReflectiveState(grounder.ground(state), "She drinks </script> tea.") for state in states]
    records = [record_of(state, "test") for state in reflected]
    config = {"input": str(folder / "talk.jsonl"), "format": None, "backbone": "nano", "sae": str(folder / "sae")}
    write_states(folder / "states", records, {"config": {**config, "grounding": asdict(settings)}})
    return SimpleNamespace(folder=folder, states=str(folder / "states"), records=records, settings=settings)


def test_one_question_as_a_file(built: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, record = tmp_path / "page.html", built.records[0]
    cfg = InspectConfig(states=built.states, question="q/1", out=str(out), per_feature=2)
    inspect_grounding(cfg)
    # blocks and salience come out as the states have them, so there is nothing to warn of
    assert capsys.readouterr().out == f"1 page: {out}\n"
    html, data = out.read_text(encoding="utf-8"), data_of(out)
    assert all(data["levels"][name]["text"] == record.level(name).text for name in ("x0", "x1", "x2"))
    assert html.count(" opens") == len(record.x1.markers) // 2 > 0
    assert "She drinks &lt;/script&gt; tea." in html
    assert html.count('class="gold-tag"') == sum(turn in record.evidence_found for turn in record.evidence)
    assert html.count('<img class="picture" src="data:image/jpeg;base64,') == 1
    assert 'alt="[Image #0 Caption] a &#34;red&#34; &lt;b&gt;bike&lt;/b&gt;"' in html
    # other settings are told, and what is outlined is still what the states mark
    inspect_grounding(replace(cfg, grounding=replace(built.settings, alpha=0.0, budget_share=0.6), overwrite=True))
    assert "salience shown was computed for this page" in capsys.readouterr().out
    html = out.read_text(encoding="utf-8")
    assert (html.count('class="notice"'), html.count(" opens")) == (2, len(record.x1.markers) // 2)


def test_saes_are_chosen_as_for_building(built: Any, tmp_path: Path) -> None:
    cfg = InspectConfig(states=built.states, question="q/1", out=str(tmp_path / "page.html"), per_feature=2)
    inspect_grounding(replace(cfg, sae=f"{built.folder / 'sae'}:layer_03"))
    assert (tmp_path / "page.html").is_file()
    gone = built.folder / "gone"
    shutil.copytree(built.states, gone)
    manifest = gone / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace(str(built.folder / "sae"), "google/gemma-scope-2b-pt-res:layer_20")
    )
    with pytest.raises(ConfigError, match=r"the SAEs google/[^\n]* are not there; give --sae"):
        inspect_grounding(replace(cfg, states=str(gone), overwrite=True))


def test_all_questions_with_an_index_and_answers(built: Any, tmp_path: Path, browser: Any) -> None:
    model = save_nano(tmp_path / "model")
    # one that was trained on pixels is shown them
    (model / "training.json").write_text(json.dumps({"config": {"data": {"images": "pixels", "image_tokens": 16}}}))
    cfg = InspectConfig(states=built.states, all=True, out=str(tmp_path / "pages"), model=str(model), max_new_tokens=3)
    index = inspect_grounding(cfg)
    html = index.read_text(encoding="utf-8")
    for name in (page_name("q/1"), "q2.html"):
        assert f'href="{name}"' in html
        assert (index.parent / name).read_text(encoding="utf-8").count('class="answer"') == 3
    assert html.count("✓ right") + html.count("✗ wrong") == 3
    page = browser.new_page()
    page.goto(index.as_uri())
    page.fill("#find", "who is")
    assert page.locator("tbody tr:visible a").all_inner_texts() == ["Who is it?"]
    page.close()


def test_finished_pages_are_kept(built: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    cfg = InspectConfig(states=built.states, all=True, out=str(tmp_path / "pages"))
    write, index, first = Inspector.write, tmp_path / "pages" / "index.html", tmp_path / "pages" / page_name("q/1")

    def stopped(self: Any, record: Any, *rest: Any) -> Any:
        if record.question_id == "q2":
            raise KeyboardInterrupt
        return write(self, record, *rest)

    monkeypatch.setattr(Inspector, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        inspect_grounding(cfg)
    assert "1 of 2 questions" in index.read_text(encoding="utf-8")
    monkeypatch.setattr(Inspector, "write", write)
    then = first.stat().st_mtime_ns
    inspect_grounding(replace(cfg, limit=5))
    assert "2 pages, 1 of them from before" in capsys.readouterr().out
    assert first.stat().st_mtime_ns == then
    with pytest.raises(ConfigError, match=r"other settings \(features\)"):
        inspect_grounding(replace(cfg, features=3))
    first.write_text("<p>")
    with pytest.raises(DataError, match=f"{first.name}: no page of a question"):
        inspect_grounding(cfg)


def test_what_cannot_be_shown_is_refused(built: Any, tmp_path: Path) -> None:
    changed = (built.folder / "talk.jsonl").read_text(encoding="utf-8").replace("dog", "fox")
    (built.folder / "changed.jsonl").write_text(changed, encoding="utf-8")
    for settings, message in (
        ({"question": "q3"}, r"no question 'q3'; there are 2, such as q"),
        ({"question": "q2", "corpus": str(built.folder / "changed.jsonl")}, "cannot be rebuilt"),
    ):
        with pytest.raises(DataError, match=message):
            inspect_grounding(InspectConfig(**{"states": built.states, "out": str(tmp_path / "x.html"), **settings}))
        assert not (tmp_path / "x.html").exists()
