"""Answers of a model that vLLM runs: many prompts at once, greedy, from the same tokens as local answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from remind.build.plan import model_hash
from remind.core import optional
from remind.core.errors import ModelError, brief
from remind.evaluation.answerers import Answerer, OnOutput
from remind.evaluation.config import EvaluateConfig
from remind.models.backbone import describe, max_length
from remind.models.chat import Content, paths_of
from remind.models.generate import Generation, end_tokens, text_of, too_long, until_end
from remind.models.images import Pictures, ids_of

T = TypeVar("T")


class VLLMAnswers(Answerer):
    """A model that vLLM loads and runs. The order of sums in it depends on what else is in the engine, so that now and
    then an answer is another one than a local model's, or than that of another run.

    Args:
        cfg: names the model as the user gave it.

    Raises:
        ConfigError: images as pixels for a model that takes none.
        ModelError: no such model, one without files or that does not generate, the package vllm is missing, or the
            engine does not start.
    """

    def __init__(self, cfg: EvaluateConfig) -> None:
        # without it, vLLM reports to its makers that it is used
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        engine, name, config = optional("vllm", "answers vllm"), cfg.model, cfg.vllm
        if name == "nano-untrained":
            raise ModelError(f"{name} has no files that vLLM could load; name a folder or hub id")
        known = describe(name)
        if known.adapters is not None:
            raise ModelError(f"{name} holds adapters; export the run as a whole model for vLLM")
        if known.kind == "encoder":
            raise ModelError(f"{name} ({known.kind}) cannot generate answers; name a causal model")
        self.pictures = Pictures(known, cfg.image_tokens, cfg.image_root) if cfg.images == "pixels" else None
        self.name, self.max_new_tokens, self.at_once = name, cfg.max_new_tokens, config.at_once
        self.limit = config.max_model_len or max_length(known.config, known.tokenizer, known.kind)
        self.tokenizer, self.stops = known.tokenizer, end_tokens(known.tokenizer, _own(known.folder, known.config))
        settings = {
            "model": known.folder,
            "dtype": cfg.dtype,
            "max_model_len": self.limit,
            "seed": 0,
            # as everywhere: no code of the model's folder, nothing unpickled
            "trust_remote_code": False,
            "load_format": "safetensors",
            "tensor_parallel_size": config.tensor_parallel_size,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        self.engine = self._tried("does not load it", lambda: engine.LLM(**settings))
        self.sampling = engine.SamplingParams(temperature=0.0, max_tokens=cfg.max_new_tokens, stop_token_ids=self.stops)
        version = getattr(engine, "__version__", "")
        # by now the files of a hub id are here
        super().__init__(model_hash(name), name, f"vllm {version}".strip(), self.limit)

    def answer(self, prompts: Sequence[Content], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput) -> None:
        pending = [n for n, skip in enumerate(done) if not skip]
        for start in range(0, len(pending), self.at_once):
            rows: dict[int, list[int]] = {}
            given = []
            for n in pending[start : start + self.at_once]:
                tokens = ids_of(self.tokenizer, prompts[n], self.pictures)
                one: dict[str, Any] = {"prompt_token_ids": tokens}
                if self.pictures is not None and (paths := paths_of(prompts[n])):
                    # the engine puts the tokens of an image in place of the one that stands for it
                    one["prompt_token_ids"] = self.pictures.ids(self.tokenizer, prompts[n], whole=False)
                    one["multi_modal_data"] = {"image": self.pictures.shown(paths)}
                refused = too_long(len(tokens), self.max_new_tokens, self.limit)
                if refused is None:
                    rows[n] = tokens
                    given.append(one)
                else:
                    on_output(n, refused)
            if not rows:
                continue
            run = partial(self.engine.generate, given, self.sampling, use_tqdm=False)
            outputs = self._tried("stopped", run)
            for (n, row), output in zip(rows.items(), outputs, strict=True):
                on_output(n, self._generation(row, output.outputs[0]))

    def _generation(self, row: list[int], completion: Any) -> Generation:
        # the text of our own tokenizer, whose rules for spaces are those of local answers
        new = until_end(completion.token_ids, self.stops)
        if completion.finish_reason not in ("stop", "length"):
            message = f"vLLM ended the answer: {completion.finish_reason}"
            return Generation("", len(row), failure="error", message=message)
        return Generation(text_of(self.tokenizer, new), len(row), len(new), completion.finish_reason == "stop")

    def _tried(self, problem: str, act: Callable[[], T]) -> T:
        try:
            return act()
        except Exception as error:  # of many types, some from processes of the engine
            raise ModelError(f"{self.name}: vLLM {problem}: {brief(error)}") from None


def _own(folder: str, config: Any) -> Any:
    """The generation_config of a model, as transformers would load it with the weights."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig.from_model_config(config)
