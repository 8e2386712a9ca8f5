"""Who answers: a model in this process, in batches, one that vLLM runs, or a chat model behind a server. All greedy."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.build.plan import model_hash
from remind.core import optional
from remind.core.errors import ModelError, unusable
from remind.core.processes import WHOLE, Shard
from remind.evaluation.config import EvaluateConfig
from remind.llm.request import Message, Reply, Request
from remind.models.backbone import Backbone, backbone_of, describe, max_length, weights_hash
from remind.models.chat import Content, paths_of
from remind.models.generate import Generation, check_generates, end_tokens, generate, text_of, too_long, until_end
from remind.models.images import Pictures, ids_of
from remind.states import prompts as templates

if TYPE_CHECKING:
    from remind.llm.request import ChatModel
    from remind.models.images import ImageFiles

#: Called with index and output as each becomes known.
OnOutput = Callable[[int, Generation], None]


class Answerer(ABC):
    """A model that answers prompts.

    Attributes:
        key: identifies the model: a hash of its weights, or endpoint and model.
        about: name, kind and max_length, for the report.
    """

    def __init__(self, key: str, name: str, kind: str, max_length: int | None = None) -> None:
        self.key = key
        self.about = {"name": name, "kind": kind, "max_length": max_length}

    #: `ImageFiles` or `Pictures` of the images it is shown; None: it takes text alone.
    pictures: Any = None
    #: Renders prompts; None: that is done elsewhere.
    tokenizer: Any = None

    @abstractmethod
    def answer(self, prompts: Sequence[Content], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput) -> None:
        """Give an output for each prompt that is not `done`.

        Args:
            ids: of the questions.

        Raises:
            ModelError: an endpoint that cannot be used as a whole.
        """


class LocalAnswers(Answerer):
    """A backbone that generates.

    Args:
        name: as the user gave it.
        shard: the part of the batches that this process answers.
        pictures: shows images as pixels; None: prompts have none.

    Raises:
        ModelError: the backbone does not generate.
    """

    def __init__(
        self,
        backbone: Backbone,
        name: str,
        max_new_tokens: int,
        batch_size: int,
        shard: Shard = WHOLE,
        pictures: Pictures | None = None,
    ) -> None:
        check_generates(backbone)
        super().__init__(weights_hash(backbone), name, backbone.kind, backbone.max_length)
        self.backbone, self.max_new_tokens, self.batch_size = backbone, max_new_tokens, batch_size
        self.shard, self.pictures, self.tokenizer = shard, pictures, backbone.tokenizer

    def answer(self, prompts: Sequence[Content], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput) -> None:
        new, size = self.max_new_tokens, self.batch_size
        generate(self.backbone, prompts, new, size, done, on_output, self.shard, self.pictures)


class ChatAnswers(Answerer):
    """A chat model that is sent each prompt as a user message, at temperature 0.

    Args:
        pictures: which images it is sent, in base64; None: prompts have none.
    """

    def __init__(self, chat: ChatModel, max_new_tokens: int, pictures: ImageFiles | None = None) -> None:
        super().__init__(chat.name, chat.name, "chat")
        self.chat, self.max_new_tokens, self.pictures = chat, max_new_tokens, pictures

    def answer(self, prompts: Sequence[Content], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput) -> None:
        prompt_id = templates.prompt_id("answer")
        pending = [n for n, skip in enumerate(done) if not skip]
        requests = [
            Request((Message("user", self._sent(prompts[n])),), "answer", ids[n], prompt_id, self.max_new_tokens)
            for n in pending
        ]
        if requests:

            def put(place: int, reply: Reply) -> None:
                said = ("", False) if reply.failure else (reply.text, reply.finished)
                counts = reply.prompt_tokens, reply.completion_tokens
                on_output(pending[place], Generation(said[0], *counts, said[1], reply.failure, reply.message))

            self.chat.complete(requests, put)

    def _sent(self, prompt: Content) -> Content:
        if isinstance(prompt, str) or self.pictures is None:
            return prompt
        # a token of Qwen3-VL shows 32 x 32 pixels; other servers count in their own way
        size = {"max_pixels": (self.pictures.most or 256) * 32**2}
        return [{**part, **size} if part["type"] == "image" else part for part in prompt]


class FixedAnswers(Answerer):
    """The same words, or the same failure, in place of a model: for dry runs, timings and contexts without answers."""

    def __init__(self, kind: str, output: Generation) -> None:
        super().__init__("none", "none", kind)
        self.output = output

    def answer(self, prompts: Sequence[Content], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput) -> None:
        for n, skip in enumerate(done):
            if not skip:
                on_output(n, self.output)


def answerer_of(given: Any, processing_class: Any, cfg: EvaluateConfig) -> Answerer | None:
    """An answerer, a chat model, a Hugging Face model or a backbone as an answerer; None of a name or folder."""
    if given is None or isinstance(given, str | Path | Answerer):
        return given if isinstance(given, Answerer) else None
    if hasattr(given, "complete"):
        return ChatAnswers(given, cfg.max_new_tokens)
    backbone = given if isinstance(given, Backbone) else backbone_of(given, processing_class)
    return LocalAnswers(backbone, backbone.name, cfg.max_new_tokens, cfg.batch_size)


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
        self.tokenizer, self.stops = known.tokenizer, end_tokens(known.tokenizer, _own(known.name, known.config))
        settings = {
            "model": known.name,
            "dtype": cfg.dtype,
            "max_model_len": self.limit,
            "seed": 0,
            # as everywhere: no code of the model's folder, nothing unpickled
            "trust_remote_code": False,
            "load_format": "safetensors",
            "tensor_parallel_size": config.tensor_parallel_size,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        with unusable(f"{name}: vLLM does not load it"):
            self.engine = engine.LLM(**settings)
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
            with unusable(f"{self.name}: vLLM stopped"):
                outputs = self.engine.generate(given, self.sampling, use_tqdm=False)
            for (n, row), output in zip(rows.items(), outputs, strict=True):
                on_output(n, self._generation(row, output.outputs[0]))

    def _generation(self, row: list[int], completion: Any) -> Generation:
        # the text of our own tokenizer, whose rules for spaces are those of local answers
        new = until_end(completion.token_ids, self.stops)
        if completion.finish_reason not in ("stop", "length"):
            message = f"vLLM ended the answer: {completion.finish_reason}"
            return Generation("", len(row), failure="error", message=message)
        return Generation(text_of(self.tokenizer, new), len(row), len(new), completion.finish_reason == "stop")


def _own(folder: str, config: Any) -> Any:
    """The generation_config of a model, as transformers would load it with the weights."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig.from_model_config(config)
