"""An evaluation that shows images as pixels: what is asked, in which batches, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Picture
from scripted_answers import rows

from remind.core.errors import ConfigError, DataError, ImagePathError
from remind.core.files import input_hashes, write_json
from remind.core.run_folder import as_dict
from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.data.readers import read, write_refmem
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
        said = (
            ("Ana", "Look at this " * (1 + number), images[:1]),
            ("Ben", "What?", []),
            ("Ana", "A bike.", images[1:]),
        )
        turns = (Turn(f"t{n}", who, text, images=tuple(own)) for n, (who, text, own) in enumerate(said))
        dialogues.append(Dialogue(f"d{number}", (Session("s", None, tuple(turns)),)))
        about = {"answers": ("a bike",), "evidence": ("t2",), "split": "test"}
        questions.append(Question(f"q{number}", f"d{number}", "What?", **about))  # type: ignore[arg-type]
    write_refmem(Corpus(tuple(dialogues), tuple(questions)), tmp_path / "talk.jsonl")
    corpus, records = read(tmp_path / "talk.jsonl"), []
    for question in corpus.questions:
        factual = FactualState(corpus.dialogue(question.dialogue_id), question, (Segment(0, 2),), Strategy(("Look.",)))
        records.append(
            record_of(ReflectiveState(AttentionalState(factual, ((2, 2),)), "They speak of a bike."), "test")
        )
    write_states(tmp_path / "states", records, {"inputs": input_hashes([tmp_path / "talk.jsonl"]), "llm": "none"})
    folders = [str(tmp_path / name) for name in ("states", "out", "talk.jsonl")]
    pixels: dict[str, Any] = {"images": "pixels", "image_tokens": 16, "dtype": "float64", "corpus": folders[2:]}
    return EvaluateConfig(folders[0], "nano-untrained", folders[1], max_new_tokens=4, bootstrap=20, **pixels)


def answers(out: Path) -> dict[str, Any]:
    found = rows(EvaluateConfig("", "", str(out)))
    return {name: (row["text"], row["prompt_tokens"]) for name, row in found.items()}


def test_batches_with_and_without_images_give_the_same_answers(cfg: EvaluateConfig, tmp_path: Path) -> None:
    names = ["x2", "evidence", "no_context", "oracle"]
    found = {}
    for size, images in ((1, "pixels"), (4, "pixels"), (4, "captions")):
        out = tmp_path / f"{size} {images}"
        run_evaluation(replace(cfg, out=str(out), batch_size=size, conditions=names, images=images))  # type: ignore[arg-type]
        found[size, images] = {name: answers(out / name) for name in names}
    assert found[1, "pixels"] == found[4, "pixels"]
    for name in names:
        other, pixels = found[4, "captions"][name], found[1, "pixels"][name]
        # oracle shows q0 the turn without its image
        told = {"no_context": (), "oracle": ("q2",)}.get(name, ("q0", "q2"))
        assert [q for q in pixels if pixels[q] != other[q]] == list(told)


def test_the_model_says_how_it_was_trained(cfg: EvaluateConfig, tmp_path: Path) -> None:
    def shown(config: Any, **settings: Any) -> tuple[Any, Any]:
        write_json(tmp_path / "training.json", {"config": config})
        own = {"images": None, "image_tokens": None, "model": str(tmp_path), **settings}
        found = with_images(replace(cfg, **own))
        return found.images, found.image_tokens

    trained = as_dict(TrainConfig("states", "run", data=DataConfig(images="pixels", image_tokens=9)))
    assert shown(trained) == ("pixels", 9)
    assert shown(trained, images="captions", image_tokens=4) == ("captions", 4)
    for config in ({"data": {"images": "captions", "image_tokens": 9}}, {"data": {}}, []):
        assert shown(config) == shown(config, model="nano") == ("captions", 256)
    with pytest.raises(DataError, match=r"training\.json: config\.data\.image_tokens is not a number"):
        shown({"data": {"images": "pixels", "image_tokens": "x"}})


@pytest.mark.parametrize("damage", ["missing", "no image", "outside"])
def test_an_image_that_cannot_be_used_stops_it_at_once(cfg: EvaluateConfig, tmp_path: Path, damage: str) -> None:
    path, what = tmp_path / "20.png", r"20.png \[q2\]: no such"
    if damage == "missing":
        path.unlink()
    elif damage == "no image":
        path.write_text("not a picture")
        what = r"20.png \[q2\]: cannot be read"
    else:
        cfg, what = replace(cfg, image_root=str(tmp_path / "states")), r"00.png \[q0\]: is outside"
    with pytest.raises(ImagePathError, match=rf"{what}[^\n]*images cannot be used; set images captions[^\n]*$"):
        run_evaluation(cfg)
    assert not (Path(cfg.out) / "predictions.jsonl").exists()


def test_other_pixels_are_asked_again_and_who_shows_none_is_refused(cfg: EvaluateConfig, tmp_path: Path) -> None:
    run_evaluation(cfg)
    Picture.new("RGB", (90, 60), (200, 20, 30)).save(tmp_path / "00.png")
    assert run_evaluation(cfg)["resumed"] == 2
    with pytest.raises(ConfigError, match="a run that differs in pictures;"):
        run_evaluation(replace(cfg, images="captions"))
    cfg = replace(cfg, out=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="images pixels: none takes text only"):
        run_evaluation(cfg, answerer=FixedAnswers("text", Generation("", 0)))
    with pytest.raises(ConfigError, match="images pixels: minilm takes no images"):
        run_evaluation(replace(cfg, model="minilm"))
