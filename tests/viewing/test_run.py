"""The command: from states on disk to pages, with what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remind import read
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json
from remind.data.dialogue import Corpus, Question
from remind.data.readers.refmem import write_refmem
from remind.grounding import Grounder, GroundingConfig
from remind.grounding.config import FusionConfig, grounding_config
from remind.models.backbone import load_backbone
from remind.states.dataset import MANIFEST, read_states, write_states
from remind.states.pyramid import FactualState, ReflectiveState, Segment, Strategy, one_line
from remind.states.records import record_of
from remind.viewing.inspector import InspectConfig, inspect_grounding
from remind.viewing.inspector.page import write_page
from remind.viewing.inspector.run import page_names
from sae import TopKSAE, layer_folder, load_layers
from tests.viewing.conftest import data_of, inspect_state, long_state, numbers_of

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
        coder = TopKSAE(backbone.hidden_size, 128, 8)
        coder.save(layer_folder(folder / "sae", layer))
    grounder = Grounder(backbone, load_layers(folder / "sae"), None, SETTINGS)
    strategy = Strategy(("Look for drinks.",), speakers=("Ana",), entities=("tea", "rain"))
    states = [FactualState(dialogue, one, (Segment(0, 12), Segment(20, 35)), strategy) for one in questions]
    reflected = [ReflectiveState(grounder.ground(state), "She drinks </script> tea.") for state in states]
    records = [record_of(state, "test") for state in reflected]
    config = {"input": str(folder / "talk.jsonl"), "format": None, "backbone": "nano", "sae": str(folder / "sae")}
    write_states(folder / "states", records, {"config": {**config, "grounding": asdict(SETTINGS)}})
    return SimpleNamespace(folder=folder, states=str(folder / "states"), records=records)


def test_one_question_as_a_file(built: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert inspect_grounding(InspectConfig(states=built.states, question="q/1", out=str(out))) == out
    # blocks and salience come out as the states have them, so there is nothing to warn of
    assert capsys.readouterr().out == f"1 page: {out}\n"
    html, data = out.read_text(encoding="utf-8"), data_of(out)
    record = built.records[0]
    assert all(data["levels"][name]["text"] == record.level(name).text for name in ("x0", "x1", "x2"))
    assert html.count(" opens") == len(record.x1.markers) // 2 > 0
    assert "She drinks &lt;/script&gt; tea." in html
    assert "What does &lt;b&gt;Ana&lt;/b&gt; like?" in html
    assert [layer["layer"] for layer in data["layers"]] == [1, 3]
    # 3, 12 and 30 are gold; 21 is retrieved, 12 too
    assert html.count('class="gold-tag"') == sum(turn in built.records[0].evidence_found for turn in record.evidence)
    assert numbers_of(data["tokens"]["start"], "u4")[0] == record.x0.turns[0].start


def test_all_questions_with_an_index_and_answers(built: Any, tmp_path: Path) -> None:
    cfg = InspectConfig(states=built.states, all=True, out=str(tmp_path / "pages"), model="nano", max_new_tokens=3)
    index = inspect_grounding(cfg)
    names = sorted(path.name for path in index.parent.iterdir())
    assert names == sorted(["index.html", *page_names(["q/1", "q2"])])
    html = index.read_text(encoding="utf-8")
    for name in page_names(["q/1", "q2"]):
        assert f'href="{name}"' in html
        page = (index.parent / name).read_text(encoding="utf-8")
        assert page.count('class="answer"') == 3
        assert 'href="index.html"' in page
    assert html.count("✓ right") + html.count("✗ wrong") == 3
    with pytest.raises(ConfigError, match="exists"):
        inspect_grounding(cfg)
    inspect_grounding(replace(cfg, model=None, overwrite=True))
    assert "✗" not in index.read_text(encoding="utf-8")


def test_examples_from_other_dialogues(built: Any, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    corpus = str(built.folder / "talk.jsonl")
    inspect_grounding(InspectConfig(states=built.states, question="q2", out=str(out), examples=corpus, per_feature=2))
    data = data_of(out)
    texts = [text for text, _, _ in data["snippets"]]
    assert len(set(map(str, data["snippets"]))) == len(texts)
    for layer in data["layers"]:
        for examples in layer["examples"]:
            values = [value for *_, value in examples]
            assert values == sorted(values, reverse=True)
            for number, peak, digits, active, _ in examples:
                text, ends, label = data["snippets"][number]
                assert digits[peak] != "0"
                assert len(active) == len(digits) - digits.count("0")
                assert len(digits) == len(ends)
                assert ends[-1] == len(text)
                assert label.startswith("long s0:")


def test_other_settings_are_told(built: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    other = replace(SETTINGS, alpha=0.0, beta=0.0, budget_share=0.6)
    inspect_grounding(InspectConfig(states=built.states, question="q2", out=str(out), grounding=other))
    assert "salience shown was computed for this page" in capsys.readouterr().out
    html = out.read_text(encoding="utf-8")
    assert html.count('class="notice"') == 2
    # what is outlined is still what the states mark
    assert html.count(" opens") == len(built.records[1].x1.markers) // 2


def test_what_cannot_be_shown_is_refused(built: Any, tmp_path: Path) -> None:
    def run(**settings: Any) -> None:
        inspect_grounding(InspectConfig(**{"states": built.states, "out": str(tmp_path / "x.html"), **settings}))

    moved = changed(built, tmp_path / "moved", sae=str(tmp_path / "gone"))
    for settings, error, message in (
        ({"question": "q3"}, DataError, r"no question 'q3'; there are 2, such as q2"),
        ({}, ConfigError, "name a question"),
        ({"question": "q2", "all": True}, ConfigError, "name a question"),
        ({"all": True}, ConfigError, "out must be a folder"),
        ({"question": "q2", "corpus": str(tmp_path / "none.jsonl")}, ConfigError, "give --corpus"),
        ({"question": "q2", "states": str(moved)}, ConfigError, "give --sae"),
        ({"question": "q2", "explanations": str(tmp_path)}, DataError, "feature-pages writes them"),
    ):
        with pytest.raises(error, match=message):
            run(**settings)
    text = (built.folder / "talk.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    rows[0]["sessions"][0]["turns"][2]["text"] = "something else"
    (tmp_path / "changed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(DataError, match="cannot be rebuilt"):
        run(question="q2", corpus=str(tmp_path / "changed.jsonl"))
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("name", ["owner/model", ""])
def test_a_manifest_makes_nobody_ask_the_hub(
    built: Any, name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States may be another's, and their manifest may name what it likes."""
    monkeypatch.setattr("remind.models.backbone.load_backbone", lambda *_, **__: pytest.fail("a model was loaded"))
    moved = changed(built, tmp_path / "moved", backbone=name)
    with pytest.raises(ConfigError, match=r"^the states name the backbone [^\n]*; give --backbone$"):
        inspect_grounding(InspectConfig(states=str(moved), question="q2", out=str(tmp_path / "x.html")))
    assert not (tmp_path / "x.html").exists()


def test_a_manifest_may_name_a_model_folder_and_no_folder_to_write_to(
    built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remind.models.nano import nano_folder

    codes, cache = tmp_path / "codes", tmp_path / "cache"
    grounding = asdict(GroundingConfig(**{**asdict(SETTINGS), "codes_folder": str(codes)}))
    caches: list[str] = []

    def folder_of_saes(given: str | None, data: Any, backbone: str, cache: str, *_: Any) -> Path:
        caches.append(cache)
        return Path(built.folder / "sae")

    monkeypatch.setattr("remind.grounding.ground.folder_of_saes", folder_of_saes)
    config = {"backbone": str(nano_folder()), "grounding": grounding, "cache": str(cache), "sae": None}
    moved = changed(built, tmp_path / "moved", **config)
    out = tmp_path / "x.html"
    assert inspect_grounding(InspectConfig(states=str(moved), question="q2", out=str(out))) == out
    assert caches == ["~/.cache/remind"]
    assert not codes.exists()
    assert not cache.exists()


def changed(built: Any, folder: Path, **config: Any) -> Path:
    """The states with other words in their manifest."""
    manifest = read_json(Path(built.states) / MANIFEST)
    write_states(folder, read_states(built.states), {**manifest, "config": {**manifest["config"], **config}})
    return folder


def test_names_of_pages_differ_and_stay_in_their_folder() -> None:
    names = page_names(["q1", "Q1", "../q1", "a b", "a/b", "index", "אנה", "", "q" * 300])
    assert len({name.lower() for name in names}) == len(names)
    assert names[0] == "q1.html"
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") for name in names)
    assert all(not name.startswith(".") and len(name) < 100 for name in names)
    assert "index.html" not in names


def test_settings_of_a_manifest_come_back_or_are_refused() -> None:
    settings = GroundingConfig(alpha=3.0, fuse=FusionConfig(bm25=2.0), agg="max")
    assert grounding_config({**asdict(settings), "added_later": 1}) == settings
    assert grounding_config({"alpha": 3, "threshold": None, "fuse": None}) == GroundingConfig(alpha=3.0)
    for values, message in (
        ({"alpha": "x"}, "alpha: Input should be a valid number"),
        ({"idf": ["auto"]}, "idf: Input should be 'auto'"),
        ({"fuse": 3}, "fuse: Input should be a dictionary or an instance of FusionConfig"),
        ({"fuse": {"dense": "much"}}, "fuse.dense: Input should be a valid number"),
        ({"lam": 7}, "lam: Input should be less than or equal to 1"),
    ):
        with pytest.raises(DataError, match=rf"manifest\.json: grounding\.{message}"):
            grounding_config(values, "manifest.json")


def test_a_page_of_real_dialogue(built: Any, remind_data: Path, tmp_path: Path) -> None:
    """LoCoMo: dates, pictures and evidence as they come."""
    corpus = read(remind_data / "locomo" / "locomo_dev.json")
    dialogue = corpus.dialogues[0]
    question = next(q for q in corpus.questions if q.dialogue_id == dialogue.id and len(q.evidence) > 1)
    places = sorted(dialogue.positions[turn] for turn in question.evidence)
    sessions = [dialogue.session_of[dialogue.turns[place].id] for place in places]
    segments = {s.id: [dialogue.positions[turn.id] for turn in s.turns] for s in sessions}
    retrieved = tuple(Segment(turns[0], turns[-1]) for turns in segments.values())
    state = FactualState(dialogue, question, retrieved, Strategy(("Look for it.",), speakers=dialogue.speakers[:1]))
    settings = replace(SETTINGS, context_codes="windowed")
    grounder = Grounder(load_backbone("nano"), load_layers(built.folder / "sae"), None, settings)
    out = write_page(inspect_state(grounder, state), tmp_path / "page.html")
    html, data = out.read_text(encoding="utf-8"), data_of(out)
    assert html.count('class="gold-tag"') == len(set(question.evidence))
    text = data["levels"]["x0"]["text"]
    assert all(one_line(turn.text) in text for turn in state.turns)
    ends = numbers_of(data["tokens"]["end"], "u4")
    assert max(ends) <= len(text.encode("utf-16-le")) // 2
    assert data["turns"] == len(state.turns)
