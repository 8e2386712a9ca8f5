"""An evaluation that shows images as pixels: what is asked, in which batches, what a server and vLLM are sent, and what
is refused."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pictured import pictured_records
from PIL import Image as Picture
from scripted_answers import rows

from remind.core.errors import ConfigError, DataError, ImagePathError
from remind.core.files import write_json
from remind.core.run_folder import as_dict
from remind.evaluation.answerers import FixedAnswers
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.run import run_evaluation, with_images
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.models.generate import Generation
from remind.states.dataset import write_states
from remind.train_pra.config import DataConfig, TrainConfig
from tests.llm.fault_proxy import Proxy, completion


@pytest.fixture
def cfg(tmp_path: Path) -> EvaluateConfig:
    """Four questions about a dialogue each; q0 and q3 have images in x0, of unlike sizes."""
    records = [replace(record, split="test") for record in pictured_records(tmp_path / "data")]
    write_states(tmp_path / "states", records, {"llm": "none"})
    pixels: dict[str, Any] = {"images": "pixels", "image_tokens": 16, "dtype": "float64", "max_new_tokens": 4}
    return EvaluateConfig(str(tmp_path / "states"), "nano-untrained", str(tmp_path / "out"), bootstrap=20, **pixels)


def test_batches_with_and_without_images_give_the_same_answers(cfg: EvaluateConfig, tmp_path: Path) -> None:
    shown = {"x2": ["q0", "q3"], "evidence": ["q0", "q3"], "no_context": []}
    found = {}
    for size, images in ((1, "pixels"), (4, "pixels"), (4, "captions")):
        out = str(tmp_path / f"{size} {images}")
        run_evaluation(replace(cfg, out=out, batch_size=size, conditions=list(shown), images=images))  # type: ignore[arg-type]
        for name in shown:
            answers = rows(replace(cfg, out=f"{out}/{name}")).items()
            found[size, images, name] = {q: (row["text"], row["prompt_tokens"]) for q, row in answers}
    for name, told in shown.items():
        other, pixels = found[4, "captions", name], found[1, "pixels", name]
        assert pixels == found[4, "pixels", name]
        assert [q for q in pixels if pixels[q] != other[q]] == told


def test_a_server_is_sent_the_images_and_asked_again_where_they_change(cfg: EvaluateConfig, tmp_path: Path) -> None:
    with Proxy(answer=lambda _: (200, {}, completion("<answer>a bike</answer>"))) as proxy:
        endpoint = EndpointConfig("m", proxy.url, concurrency=1)
        llm = LLMConfig(answer=endpoint, cache=str(tmp_path / "replies.sqlite"))
        cfg = replace(cfg, answers="server", model="m", image_tokens=2, llm=llm)
        run_evaluation(cfg)
        contents = [body["messages"][0]["content"] for body in proxy.bodies]
        [shown] = [one for one in contents if not isinstance(one, str) and "I am 0" in one[0]["text"]]
        assert [part["type"] for part in shown] == ["text", "image_url", "text", "image_url", "text"]
        assert shown[0]["text"].endswith("[Image #0 Caption] ")
        assert [isinstance(one, str) for one in contents].count(True) == 2
        for part, size, colour in ((shown[1], (45, 30), (200, 20, 30)), (shown[3], (23, 45), (10, 20, 220))):
            head, data = part["image_url"]["url"].split(",")
            image = Picture.open(io.BytesIO(base64.b64decode(data)))
            # within a square of two tokens of 32 x 32 pixels
            assert (head, image.size) == ("data:image/jpeg;base64", size)
            assert image.getpixel((5, 5)) == pytest.approx(colour, abs=4)
        # equal requests are paid for once, and others where a file has changed
        run_evaluation(replace(cfg, overwrite=True))
        assert proxy.hits == 4
        Picture.new("RGB", (96, 64), "green").save(tmp_path / "data" / "red.png")
        run_evaluation(replace(cfg, overwrite=True))
        assert proxy.hits == 6
    run_evaluation(replace(cfg, overwrite=True, llm=replace(llm, dry_run=str(tmp_path / "dry.jsonl"), cache=None)))
    [line, *_] = map(json.loads, (tmp_path / "dry.jsonl").read_text().splitlines())
    assert line["prompt_tokens"] == len(json.dumps([line["messages"], None])) // 4 + 2 * 256


def test_the_model_says_how_it_was_trained(cfg: EvaluateConfig, tmp_path: Path) -> None:
    def shown(config: Any, **settings: Any) -> tuple[Any, Any]:
        write_json(tmp_path / "training.json", {"config": config})
        found = with_images(replace(cfg, **{"images": None, "image_tokens": None, "model": str(tmp_path), **settings}))
        return found.images, found.image_tokens

    trained = as_dict(TrainConfig("states", "run", data=DataConfig(images="pixels", image_tokens=9)))
    assert shown(trained) == ("pixels", 9)
    assert shown(trained, images="captions", image_tokens=4) == ("captions", 4)
    assert shown(trained, model="nano") == shown([]) == ("captions", 256)
    with pytest.raises(DataError, match=r"training\.json: config\.data\.image_tokens is not a number"):
        shown({"data": {"images": "pixels", "image_tokens": "x"}})


def test_an_image_that_cannot_be_used_stops_it_at_once(cfg: EvaluateConfig, tmp_path: Path) -> None:
    path, line = tmp_path / "data" / "red.png", r"red.png \[q0\]: {}[^\n]*set images captions[^\n]*$"
    with pytest.raises(ImagePathError, match=line.format("is outside")):
        run_evaluation(replace(cfg, image_root=str(tmp_path / "states")))
    path.write_text("not a picture")
    with pytest.raises(ImagePathError, match=line.format("cannot be read")):
        run_evaluation(cfg)
    assert not (Path(cfg.out) / "predictions.jsonl").exists()
    with pytest.raises(ConfigError, match="images pixels: none takes text only"):
        run_evaluation(replace(cfg, overwrite=True), answerer=FixedAnswers("text", Generation("", 0)))
