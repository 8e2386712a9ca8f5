"""Who answers: a model in this process, in batches, or a chat model behind a server. Both greedy."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from remind.llm.request import Message, Reply, Request
from remind.models.generate import Failure, Generation, check_generates, generate
from remind.states import prompts as templates

if TYPE_CHECKING:
    from remind.llm.request import ChatModel
    from remind.models.backbone import Backbone

#: Called with index and output as each becomes known.
OnOutput = Callable[[int, Generation], None]


class Answerer(Protocol):
    """A model that answers prompts.

    Attributes:
        seconds: spent in the model so far.
    """

    seconds: float

    @property
    def key(self) -> str:
        """Identifies the model: a hash of its weights, or endpoint and model."""
        ...

    def about(self) -> dict[str, Any]:
        """For the report: name, kind, max_length."""
        ...

    def answer(
        self, prompts: Sequence[str], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput
    ) -> list[Generation | None]:
        """An output for each prompt; None where it is done already.

        Args:
            ids: of the questions.
        """
        ...


class LocalAnswers:
    """A backbone that generates.

    Args:
        name: as the user gave it.

    Raises:
        ModelError: the backbone does not generate.
    """

    def __init__(self, backbone: Backbone, name: str, max_new_tokens: int, batch_size: int) -> None:
        check_generates(backbone)
        self.backbone, self.name = backbone, name
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.seconds = 0.0

    @property
    def key(self) -> str:
        return model_hash(self.backbone)

    def about(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.backbone.kind, "max_length": self.backbone.max_length}

    def answer(
        self, prompts: Sequence[str], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput
    ) -> list[Generation | None]:
        started = time.perf_counter()
        try:
            return generate(self.backbone, prompts, self.max_new_tokens, self.batch_size, done, on_output)
        finally:
            self.seconds += time.perf_counter() - started


class ChatAnswers:
    """A chat model that is sent each prompt as a user message, at temperature 0."""

    def __init__(self, chat: ChatModel, max_new_tokens: int) -> None:
        self.chat, self.max_new_tokens = chat, max_new_tokens
        self.seconds = 0.0
        self.cached = 0

    @property
    def key(self) -> str:
        return self.chat.name

    def about(self) -> dict[str, Any]:
        return {"name": self.chat.name, "kind": "chat", "max_length": None}

    def answer(
        self, prompts: Sequence[str], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput
    ) -> list[Generation | None]:
        """As the protocol has it.

        Raises:
            ModelError: the endpoint as a whole cannot be used.
        """
        asked = [n for n, skip in enumerate(done) if not skip]
        outputs: list[Generation | None] = [None] * len(prompts)

        def put(place: int, reply: Reply) -> None:
            self.cached += reply.cached
            outputs[asked[place]] = output = _generation(reply)
            on_output(asked[place], output)

        prompt_id = f"answer-{templates.fingerprint('answer')}"
        requests = [
            Request((Message("user", prompts[n]),), "answer", ids[n], prompt_id, self.max_new_tokens) for n in asked
        ]
        started = time.perf_counter()
        try:
            if requests:
                self.chat.complete(requests, put)
        finally:
            self.seconds += time.perf_counter() - started
        return outputs


class Silent:
    """Stands for a model in a dry run: the same words to everything."""

    seconds = 0.0
    key = "none"

    def about(self) -> dict[str, Any]:
        return {"name": "none", "kind": "dry run", "max_length": None}

    def answer(
        self, prompts: Sequence[str], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput
    ) -> list[Generation | None]:
        output = Generation("<answer>nothing was asked</answer><explanation></explanation>", 0, finished=True)
        for n, skip in enumerate(done):
            if not skip:
                on_output(n, output)
        return [None if skip else output for skip in done]


def _generation(reply: Reply) -> Generation:
    failure: Failure | None = reply.failure
    # a server may send half a surrogate pair, which no file could hold
    text = "" if failure else reply.text.encode("utf-8", "replace").decode()
    message = reply.message if failure else ""
    return Generation(
        text, reply.prompt_tokens, reply.completion_tokens, reply.finished and not failure, failure, message
    )


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
