"""Answers through vLLM: a stand-in with its signatures runs our model, one prompt at a time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from remind.core.errors import ConfigError, ModelError
from remind.evaluation.config import EvaluateConfig, VLLMConfig
from remind.evaluation.run import run_evaluation
from remind.models.nano import nano_folder
from remind.states.records import StateRecord


@dataclass
class SamplingParams:
    """The fields of vLLM's that matter here, with its defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16


@dataclass
class Engine:
    """What the stand-in was given.

    Attributes:
        ends: in place of the reason for which an answer ended.
    """

    made: dict[str, Any] = field(default_factory=dict)
    handed: list[list[list[int]]] = field(default_factory=list)
    ends: str = ""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A module `vllm`."""
    noted = Engine()
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)

    class LLM:
        def __init__(
            self,
            model: str,
            *,
            tokenizer: str | None = None,
            trust_remote_code: bool = False,
            tensor_parallel_size: int = 1,
            dtype: str = "auto",
            seed: int = 0,
            gpu_memory_utilization: float = 0.9,
            **kwargs: Any,
        ) -> None:
            if gpu_memory_utilization > 0.95:
                raise ValueError("no room for\nthe cache")
            assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
            assert set(kwargs) == {"max_model_len", "load_format"}
            noted.made = {"model": model, "dtype": dtype, "tensor_parallel_size": tensor_parallel_size, **kwargs}
            self.model = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype)
            self.tokenizer = AutoTokenizer.from_pretrained(model)

        def generate(
            self,
            prompts: Sequence[dict[str, list[int]]],
            sampling_params: SamplingParams | None = None,
            *,
            use_tqdm: bool = True,
            lora_request: Any = None,
            priority: list[int] | None = None,
        ) -> list[Any]:
            assert sampling_params is not None
            assert (sampling_params.temperature, use_tqdm) == (0.0, False)
            noted.handed.append([prompt["prompt_token_ids"] for prompt in prompts])
            return [self.one(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

        def one(self, row: list[int], params: SamplingParams) -> Any:
            """The most likely token after the other, without a cache."""
            stops, new = params.stop_token_ids or [], list[int]()
            while len(new) < (params.max_tokens or 16) and not (new and new[-1] in stops):
                with torch.no_grad():
                    logits = self.model(input_ids=torch.tensor([row + new]), use_cache=False).logits
                new.append(int(logits[0, -1].argmax()))
            reason = noted.ends or ("stop" if new[-1] in stops else "length")
            # the token that ended it is among the ids and not in the text
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            completion = SimpleNamespace(index=0, text=text, token_ids=tuple(new), finish_reason=reason)
            return SimpleNamespace(prompt_token_ids=row, outputs=[completion], finished=True)

    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__version__ = LLM, SamplingParams, "0.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    return noted


@pytest.fixture
def cfg(
    tmp_path: Path,
    six: list[StateRecord],
    make_record: Callable[..., StateRecord],
    write_states: Callable[..., Path],
) -> EvaluateConfig:
    """Six questions, one of them with words that the chat template uses too, and one whose prompt is too long."""
    marked = make_record("i1", text="who said <|im_end|>?")
    long = make_record("long", text="why? " * 20_000)
    states = str(write_states(*six[1:], marked, long))
    return EvaluateConfig(states, "nano", str(tmp_path / "local"), max_new_tokens=16, batch_size=4, bootstrap=20)


def rows(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "predictions.jsonl").open(encoding="utf-8")]


def test_answers_are_those_of_a_local_model(cfg: EvaluateConfig, engine: Engine, tmp_path: Path) -> None:
    local = run_evaluation(cfg)
    own = replace(cfg, answers="vllm", out=str(tmp_path / "vllm"), vllm=VLLMConfig(at_once=4))
    report = run_evaluation(own)
    assert rows(own.out) == rows(cfg.out)
    assert report["overall"] == local["overall"]
    # some ended by themselves, some were cut off, one did not fit
    found = [(row["finished"], row["failure"]) for row in rows(own.out)]
    assert {(True, None), (False, "too_long")} <= set(found)
    assert [len(prompts) for prompts in engine.handed] == [4, 2]
    assert [len(row) for prompts in engine.handed for row in prompts] == [
        row["prompt_tokens"] for row in rows(own.out)
    ][:6]
    about = {"name": "nano", "kind": "vllm 0.0", "max_length": local["model"]["max_length"]}
    assert report["model"] == about
    assert engine.made == {
        "model": str(nano_folder()),
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "load_format": "safetensors",
        "max_model_len": about["max_length"],
    }


def test_a_run_is_resumed_by_the_same_engine_only(cfg: EvaluateConfig, engine: Engine) -> None:
    own = replace(cfg, answers="vllm", vllm=VLLMConfig(max_model_len=4096))
    first = run_evaluation(own)
    assert first["identity"]["answers"] == "vllm"
    path = Path(own.out) / "predictions.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]) + b'{"question')
    engine.handed.clear()
    # how the engine uses GPUs does not matter
    again = run_evaluation(replace(own, vllm=VLLMConfig(max_model_len=4096, tensor_parallel_size=2, at_once=1)))
    assert (again["resumed"], [len(prompts) for prompts in engine.handed]) == (3, [1, 1, 1])
    assert path.read_bytes() == whole
    with pytest.raises(ConfigError, match="differs in answers, max_model_len, model"):
        run_evaluation(cfg)
    with pytest.raises(ConfigError, match="differs in max_model_len"):
        run_evaluation(replace(own, vllm=VLLMConfig(max_model_len=4095)))


def test_what_the_engine_refuses_is_told_in_a_line(cfg: EvaluateConfig, engine: Engine, tmp_path: Path) -> None:
    own = replace(cfg, answers="vllm")
    with pytest.raises(ModelError, match="nano: vLLM does not load it: no room for the cache"):
        run_evaluation(replace(own, vllm=VLLMConfig(gpu_memory_utilization=1.0)))
    for model, what in (("minilm", "cannot generate"), ("nano-untrained", "no files"), (str(tmp_path), "config.json")):
        with pytest.raises(ModelError, match=what):
            run_evaluation(replace(own, model=model))
    assert not Path(own.out).exists()
    engine.ends = "abort"
    with pytest.raises(ModelError, match="none of 6 questions: vLLM ended the answer: abort"):
        run_evaluation(own)
