"""Who answers: a model in this process, in batches, or a chat model behind a server. Both greedy.

A model that vLLM runs is in `vllm_answers`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.processes import WHOLE, Shard
from remind.llm.request import Message, Reply, Request
from remind.models.backbone import Backbone, backbone_of
from remind.models.chat import Content
from remind.models.generate import Generation, check_generates, generate
from remind.states import prompts as templates

if TYPE_CHECKING:
    from remind.evaluation.config import EvaluateConfig
    from remind.llm.request import ChatModel
    from remind.models.images import ImageFiles, Pictures

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
        super().__init__(model_hash(backbone), name, backbone.kind, backbone.max_length)
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


def model_hash(backbone: Backbone) -> str:
    """Hash over the weights as loaded, the tokenizer and the chat template, wherever they came from."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(backbone.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    digest.update(backbone.tokenizer.backend_tokenizer.to_str().encode())
    digest.update(str(backbone.tokenizer.chat_template).encode())
    return digest.hexdigest()
