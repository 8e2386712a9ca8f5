"""Answers through vLLM: a stand-in with its signatures runs our model, one prompt at a time."""

from __future__ import annotations

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
from scripted_answers import rows
from transformers import AutoModelForImageTextToText

from remind.core.errors import ModelError
from remind.evaluation.config import EvaluateConfig, VLLMConfig
from remind.evaluation.run import run_evaluation
from remind.models.nano import nano_config, nano_folder, nano_image_processor
from remind.states.dataset import write_states as write_pictured
from remind.states.records import StateRecord


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
def cfg(local: EvaluateConfig, six: list[StateRecord], make_record: Any, write_states: Any) -> EvaluateConfig:
    """Six questions, one of them with words that the chat template uses too, and one whose prompt is too long."""
    more = make_record("i1", text="who said <|im_end|>?"), make_record("long", text="why? " * 20_000)
    return replace(
        local, states=str(write_states(*six[1:], *more, name="more")), model="nano", max_new_tokens=16, batch_size=4
    )


def test_answers_are_those_of_a_local_model(cfg: EvaluateConfig, engine: Any, tmp_path: Path) -> None:
    local = run_evaluation(cfg)
    own = replace(cfg, answers="vllm", out=str(tmp_path / "vllm"), vllm=VLLMConfig(at_once=4))
    report = run_evaluation(own)
    assert rows(own) == rows(cfg)
    # some ended by themselves, some were cut off, one did not fit
    assert {(True, None), (False, "too_long")} <= {(row["finished"], row["failure"]) for row in rows(own).values()}
    assert [len(prompts) for prompts in engine.handed] == [4, 2]
    most = local["model"]["max_length"]
    assert report["model"] == {"name": "nano", "kind": "vllm 0.0", "max_length": most}
    expected = {"model": str(nano_folder()), "load_format": "safetensors", "max_model_len": most}
    assert expected.items() <= engine.made.items()


def test_images_are_shown_as_to_a_local_model(cfg: EvaluateConfig, engine: Any, tmp_path: Path) -> None:
    records = [replace(record, split="test") for record in pictured_records(tmp_path / "data")]
    cfg = replace(
        cfg, states=str(tmp_path / "pictured"), images="pixels", image_tokens=5, max_new_tokens=8, dtype="float64"
    )
    write_pictured(cfg.states, records, {"llm": "none"})
    run_evaluation(cfg)
    own = replace(cfg, answers="vllm", out=str(tmp_path / "vllm"), vllm=VLLMConfig(at_once=3))
    run_evaluation(own)
    assert rows(own) == rows(cfg)
    token = nano_config().image_token_id
    assert sorted(row.count(token) for rows in engine.handed for row in rows) == [0, 0, 1, 2]


def test_what_the_engine_refuses_is_told_in_a_line(cfg: EvaluateConfig, engine: Any) -> None:
    own = replace(cfg, answers="vllm")
    with pytest.raises(ModelError, match="nano: vLLM does not load it: no room for the cache"):
        run_evaluation(replace(own, vllm=VLLMConfig(gpu_memory_utilization=1.0)))
    engine.ends = "abort"
    with pytest.raises(ModelError, match="none of 6 questions: vLLM ended the answer: abort"):
        run_evaluation(own)
