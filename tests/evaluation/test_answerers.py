"""Who answers: vLLM, whose stand-in runs our model one prompt at a time, as a local model does; images as pixels."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pictured import pictured_records
from PIL import Image as Picture
from scripted_answers import rows
from transformers import AutoModelForImageTextToText

from remind.core.errors import ConfigError, DataError, ImagePathError, ModelError
from remind.core.files import write_json
from remind.core.run_folder import as_dict
from remind.evaluation.answerers import FixedAnswers
from remind.evaluation.config import EvaluateConfig, VLLMConfig
from remind.evaluation.run import run_evaluation, with_images
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.models.generate import Generation
from remind.models.nano import nano_config, nano_folder, nano_image_processor
from remind.states.dataset import write_states
from remind.states.records import StateRecord
from remind.train_pra.config import DataConfig, TrainConfig
from tests.llm.fault_proxy import Proxy, completion


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module `vllm`, and what it was given; `ends` stands in place of the reason for which an answer ended."""
    noted = SimpleNamespace(made={}, handed=[], ends="")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)

    class LLM:
        def __init__(
            self, model: str, *, trust_remote_code: bool, gpu_memory_utilization: float, seed: int, **kwargs: Any
        ) -> None:
            if gpu_memory_utilization > 0.95:
                raise ValueError("no room for\nthe cache")
            assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
            assert not trust_remote_code
            noted.made = {"model": model, **kwargs}
            self.model = AutoModelForImageTextToText.from_pretrained(model, dtype=kwargs["dtype"])

        def generate(self, prompts: Sequence[Any], sampling_params: Any, *, use_tqdm: bool) -> list[Any]:
            assert (sampling_params.temperature, use_tqdm) == (0.0, False)
            noted.handed.append([prompt["prompt_token_ids"] for prompt in prompts])
            return [self.one(prompt, sampling_params) for prompt in prompts]

        def one(self, prompt: dict[str, Any], settings: Any) -> Any:
            """The most likely token after the other, without a cache. As vLLM does, an image is processed here, and its
            tokens take the place of the one that stands for it."""
            row, stops, new, pixels = prompt["prompt_token_ids"], settings.stop_token_ids, list[int](), dict[str, Any]()
            if images := prompt.get("multi_modal_data", {}).get("image"):
                pixels = dict(nano_image_processor()(images=images, return_tensors="pt"))
                counts = (pixels["image_grid_thw"].prod(1) // 4).tolist()
                token = self.model.config.image_token_id
                row = [one for t in row for one in ([t] * counts.pop(0) if t == token else [t])]
                assert not counts
            while len(new) < settings.max_tokens and not (new and new[-1] in stops):
                ids = torch.tensor([row + new])
                kinds = {"mm_token_type_ids": (ids == self.model.config.image_token_id).int()} if pixels else {}
                with torch.no_grad():
                    logits = self.model(input_ids=ids, use_cache=False, **pixels, **kinds).logits
                new.append(int(logits[0, -1].argmax()))
            reason = noted.ends or ("stop" if new[-1] in stops else "length")
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(new), finish_reason=reason)])

    module = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace, __version__="0.0")
    monkeypatch.setitem(sys.modules, "vllm", module)
    return noted


@pytest.fixture
def eight(local: EvaluateConfig, six: list[StateRecord], make_record: Any, write_states: Any) -> EvaluateConfig:
    """Six questions, one of them with words that the chat template uses too, and one whose prompt is too long."""
    more = make_record("i1", text="who said <|im_end|>?"), make_record("long", text="why? " * 20_000)
    return replace(
        local, states=str(write_states(*six[1:], *more, name="more")), model="nano", max_new_tokens=16, batch_size=4
    )


def test_answers_are_those_of_a_local_model(eight: EvaluateConfig, engine: Any, tmp_path: Path) -> None:
    local = run_evaluation(eight)
    own = replace(eight, answers="vllm", out=str(tmp_path / "vllm"), vllm=VLLMConfig(at_once=4))
    report = run_evaluation(own)
    assert rows(own) == rows(eight)
    # some ended by themselves, some were cut off, one did not fit
    assert {(True, None), (False, "too_long")} <= {(row["finished"], row["failure"]) for row in rows(own).values()}
    assert [len(prompts) for prompts in engine.handed] == [4, 2]
    most = local["model"]["max_length"]
    assert report["model"] == {"name": "nano", "kind": "vllm 0.0", "max_length": most}
    expected = {"model": str(nano_folder()), "load_format": "safetensors", "max_model_len": most}
    assert expected.items() <= engine.made.items()


def test_images_are_shown_as_to_a_local_model(cfg: EvaluateConfig, engine: Any, tmp_path: Path) -> None:
    cfg = replace(cfg, model="nano", image_tokens=5, max_new_tokens=8)
    run_evaluation(cfg)
    own = replace(cfg, answers="vllm", out=str(tmp_path / "vllm"), vllm=VLLMConfig(at_once=3))
    run_evaluation(own)
    assert rows(own) == rows(cfg)
    token = nano_config().image_token_id
    assert sorted(row.count(token) for rows in engine.handed for row in rows) == [0, 0, 1, 2]


def test_what_the_engine_refuses_is_told_in_a_line(eight: EvaluateConfig, engine: Any) -> None:
    own = replace(eight, answers="vllm")
    with pytest.raises(ModelError, match="nano: vLLM does not load it: no room for the cache"):
        run_evaluation(replace(own, vllm=VLLMConfig(gpu_memory_utilization=1.0)))
    engine.ends = "abort"
    with pytest.raises(ModelError, match="none of 6 questions: vLLM ended the answer: abort"):
        run_evaluation(own)


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
    # a file of that name may be anybody's
    assert shown(trained, model="nano") == shown([]) == shown([1]) == shown({"data": 3}) == ("captions", 256)
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
