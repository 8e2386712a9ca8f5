"""An evaluation that shows images as pixels: what is asked, in which batches, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Picture

from remind.core.errors import ConfigError, DataError, ImagePathError
from remind.core.files import input_hashes
from remind.core.run_folder import as_dict
from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.data.readers import read
from remind.data.readers.refmem import write_refmem
from remind.evaluation.answerers import FixedAnswers
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.run import run_evaluation, with_images
from remind.models.generate import Generation
from remind.states.dataset import write_states
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import record_of
from remind.train_pra.config import DataConfig, TrainConfig


@pytest.fixture
def cfg(tmp_path: Path) -> EvaluateConfig:
    """Three questions about a dialogue each; the first and the last have images in x0, of unlike sizes."""
    dialogues, questions = [], []
    for number, sizes in enumerate([((90, 60),), (), ((64, 64), (40, 120))]):
        images = []
        for place, size in enumerate(sizes):
            path = tmp_path / f"{number}{place}.png"
            Picture.effect_noise(size, 40 + number).convert("RGB").save(path)
            images.append(Image(place, str(path), f"a picture of {number}" if place else None))
        turns = (
            Turn("t0", "Ana", "Look at this " * (1 + number), images=tuple(images[:1])),
            Turn("t1", "Ben", "What is it?"),
            Turn("t2", "Ana", "A bike.", images=tuple(images[1:])),
        )
        dialogues.append(Dialogue(f"d{number}", (Session("s", None, turns),)))
        questions.append(
            Question(f"q{number}", f"d{number}", "What?", answers=("a bike",), evidence=("t2",), split="test")
        )
    write_refmem(Corpus(tuple(dialogues), tuple(questions)), tmp_path / "talk.jsonl")
    corpus = read(tmp_path / "talk.jsonl")
    records = []
    for question in corpus.questions:
        dialogue = corpus.dialogue(question.dialogue_id)
        factual = FactualState(dialogue, question, (Segment(0, 2),), Strategy(("Look.",)))
        state = ReflectiveState(AttentionalState(factual, ((2, 2),)), "They speak of a bike.")
        records.append(record_of(state, "test"))
    write_states(tmp_path / "states", records, {"inputs": input_hashes([tmp_path / "talk.jsonl"]), "llm": "none"})
    return EvaluateConfig(
        states=str(tmp_path / "states"),
        model="nano-untrained",
        out=str(tmp_path / "out"),
        corpus=[str(tmp_path / "talk.jsonl")],
        max_new_tokens=4,
        bootstrap=20,
        images="pixels",
        image_tokens=16,
        dtype="float64",
    )


def answers(folder: Path) -> dict[str, Any]:
    rows = map(json.loads, (folder / "predictions.jsonl").read_text().splitlines())
    return {row["question_id"]: (row["text"], row["prompt_tokens"]) for row in rows}


def test_batches_with_and_without_images_give_the_same_answers(cfg: EvaluateConfig, tmp_path: Path) -> None:
    names = ["x2", "evidence", "no_context", "oracle"]
    found = {}
    for size in (1, 4):
        out = tmp_path / f"batches of {size}"
        report = run_evaluation(replace(cfg, out=str(out), batch_size=size, conditions=names))
        assert report["config"]["images"] == "pixels"
        found[size] = {name: answers(out / name) for name in names}
    assert found[1] == found[4]
    captions = tmp_path / "captions"
    run_evaluation(replace(cfg, out=str(captions), images="captions", conditions=names))
    for name in names:
        other, pixels = answers(captions / name), found[1][name]
        assert other["q1"] == pixels["q1"]
        # oracle shows q0 the turn without its image
        told = {"no_context": (), "oracle": ("q2",)}.get(name, ("q0", "q2"))
        assert [q for q in pixels if pixels[q][1] != other[q][1]] == list(told)


def test_the_model_says_how_it_was_trained(cfg: EvaluateConfig, tmp_path: Path) -> None:
    cfg = replace(cfg, images=None, image_tokens=None)
    assert (with_images(cfg).images, with_images(cfg).image_tokens) == ("captions", 256)
    model = tmp_path / "model"
    model.mkdir()
    trained = TrainConfig("states", "run", data=DataConfig(images="pixels", image_tokens=9))
    told: list[tuple[Any, tuple[str, int]]] = [
        (as_dict(trained), ("pixels", 9)),  # as an export writes it
        ({"data": {"images": "captions", "image_tokens": 9}}, ("captions", 256)),
        ({"data": {}}, ("captions", 256)),
        ([], ("captions", 256)),
    ]
    for config, expected in told:
        (model / "training.json").write_text(json.dumps({"config": config}))
        found = with_images(replace(cfg, model=str(model)))
        assert (found.images, found.image_tokens) == expected
    (model / "training.json").write_text(json.dumps({"config": told[0][0]}))
    own = with_images(replace(cfg, model=str(model), images="captions", image_tokens=4))
    assert (own.images, own.image_tokens) == ("captions", 4)
    (model / "training.json").write_text(json.dumps({"config": {"data": {"images": "pixels", "image_tokens": "x"}}}))
    with pytest.raises(DataError, match=r"training\.json: config\.data\.image_tokens is not a number"):
        with_images(replace(cfg, model=str(model)))


@pytest.mark.parametrize("damage", ["missing", "no image", "outside"])
def test_an_image_that_cannot_be_used_stops_it_at_once(cfg: EvaluateConfig, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "20.png"
    if damage == "missing":
        path.unlink()
    elif damage == "no image":
        path.write_text("not a picture")
    else:
        (tmp_path / "data").mkdir()
        cfg = replace(cfg, image_root=str(tmp_path / "data"))
    what = {
        "missing": "20.png [q2]: no such",
        "no image": "20.png [q2]: cannot be read",
        "outside": "00.png [q0]: is outside",
    }
    with pytest.raises(ImagePathError) as caught:
        run_evaluation(cfg)
    assert what[damage] in str(caught.value)
    assert "images cannot be used; set images captions to go without)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (Path(cfg.out) / "predictions.jsonl").exists()


def test_other_pixels_are_asked_again(cfg: EvaluateConfig, tmp_path: Path) -> None:
    run_evaluation(cfg)
    assert run_evaluation(cfg)["resumed"] == 3
    Picture.new("RGB", (90, 60), (200, 20, 30)).save(tmp_path / "00.png")
    assert run_evaluation(cfg)["resumed"] == 2
    first = (tmp_path / "out" / "predictions.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="a run that differs in pictures;"):
        run_evaluation(replace(cfg, images="captions"))
    assert (tmp_path / "out" / "predictions.jsonl").read_bytes() == first


def test_who_shows_no_images_is_refused(cfg: EvaluateConfig) -> None:
    with pytest.raises(ConfigError, match="images pixels: none takes text only"):
        run_evaluation(cfg, answerer=FixedAnswers("text", Generation("", 0)))
    with pytest.raises(ConfigError, match="images pixels: minilm takes no images"):
        run_evaluation(replace(cfg, model="minilm"))
