"""The command: from states on disk to pages, with what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import Corpus, Question
from remind.data.readers.refmem import write_refmem
from remind.grounding import Grounder, GroundingConfig
from remind.models.backbone import load_backbone
from remind.states.dataset import write_states
from remind.states.pyramid import FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import record_of
from remind.viewing.inspector import InspectConfig, inspect_grounding
from remind.viewing.inspector.page import Inspector, page_name
from sae import TopKSAE, layer_folder, load_layers
from tests.viewing.conftest import data_of, long_state

SETTINGS = GroundingConfig(budget_share=0.3, alpha=5.0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two questions about a dialogue, grounded with the nano backbone and random SAEs."""
    folder = tmp_path_factory.mktemp("built")
    dialogue = long_state(40).dialogue
    wanted = tuple(turn.id for turn in dialogue.turns[3:30:9])
    questions = (
        Question("q/1", "long", "What does <b>Ana</b> like?", "single", ("tea", "rain"), ("A",), wanted, split="test"),
        Question("q2", "long", "Who is it?", "direct", answers=("Ben",), evidence=wanted[:1], split="test"),
    )
    write_refmem(Corpus((dialogue,), questions), folder / "talk.jsonl")
    backbone = load_backbone("nano")
    for layer in (1, 3):
        TopKSAE(backbone.hidden_size, 128, 8).save(layer_folder(folder / "sae", layer))
    grounder = Grounder(backbone, load_layers(folder / "sae"), None, SETTINGS)
    strategy = Strategy(("Look for drinks.",), speakers=("Ana",), entities=("tea", "rain"))
    states = [FactualState(dialogue, one, (Segment(0, 12), Segment(20, 35)), strategy) for one in questions]
    reflected = [ReflectiveState(grounder.ground(state), "She drinks </script> tea.") for state in states]
    records = [record_of(state, "test") for state in reflected]
    config = {"input": str(folder / "talk.jsonl"), "format": None, "backbone": "nano", "sae": str(folder / "sae")}
    write_states(folder / "states", records, {"config": {**config, "grounding": asdict(SETTINGS)}})
    return SimpleNamespace(folder=folder, states=str(folder / "states"), records=records)


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
    # other settings are told, and what is outlined is still what the states mark
    inspect_grounding(replace(cfg, grounding=replace(SETTINGS, alpha=0.0, budget_share=0.6), overwrite=True))
    assert "salience shown was computed for this page" in capsys.readouterr().out
    html = out.read_text(encoding="utf-8")
    assert (html.count('class="notice"'), html.count(" opens")) == (2, len(record.x1.markers) // 2)


def test_all_questions_with_an_index_and_answers(built: Any, tmp_path: Path, browser: Any) -> None:
    cfg = InspectConfig(states=built.states, all=True, out=str(tmp_path / "pages"), model="nano", max_new_tokens=3)
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
    written: list[str] = []

    def stopped(self: Any, record: Any, *rest: Any) -> Any:
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(record.question_id)
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
    text = (built.folder / "talk.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    rows[0]["sessions"][0]["turns"][2]["text"] = "something else"
    (tmp_path / "changed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for settings, error, message in (
        ({"question": "q3"}, DataError, r"no question 'q3'; there are 2, such as q"),
        ({"question": "q2", "corpus": str(tmp_path / "changed.jsonl")}, DataError, "cannot be rebuilt"),
    ):
        with pytest.raises(error, match=message):
            inspect_grounding(InspectConfig(**{"states": built.states, "out": str(tmp_path / "x.html"), **settings}))
        assert not (tmp_path / "x.html").exists()
