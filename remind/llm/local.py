"""A chat model in this process: transformers' greedy generation on a backbone, behind the interface of the servers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from time import monotonic
from typing import TYPE_CHECKING

from remind.core.errors import ModelError
from remind.core.files import sha256_json
from remind.llm.cache import ReplyCache
from remind.llm.client import CachedChat, Put
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.request import Message, Reply, ReplyFailure, Request

if TYPE_CHECKING:
    from remind.models.generate import Generation


class LocalChat(CachedChat):
    """A `ChatModel` on a backbone of its own; greedy, in batches of similar length.

    Replies of one user message are those of `remind.models.generate.generate` on its text. Other roles are written
    into that message, since not every chat template has them.

    Args:
        endpoint: model, device and dtype; `concurrency` is the number of prompts per forward.

    Raises:
        ModelError: the model cannot be loaded or does not generate.
    """

    def __init__(self, endpoint: EndpointConfig, cache: ReplyCache | None = None, ledger: Ledger | None = None) -> None:
        super().__init__(endpoint, cache, ledger)
        from remind.models.backbone import load_backbone, model_folder
        from remind.models.generate import check_generates

        self.backbone = load_backbone(endpoint.model, endpoint.dtype, endpoint.device)
        check_generates(self.backbone)
        given = endpoint.extra_body.get("chat_template_kwargs", {})
        if given and self.backbone.tokenizer.chat_template:
            # templates have no place for values of their own; what is set in front stands for all that is rendered
            values = "".join(f"{{% set {name} = {value!r} %}}" for name, value in given.items())
            self.backbone.tokenizer.chat_template = values + self.backbone.tokenizer.chat_template
        folder = model_folder(self.backbone.name)
        files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder else []
        about = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        self.weights = sha256_json([about, str(self.backbone.dtype), version("transformers")])[:16]

    def ask(self, asked: Sequence[Request], put: Put) -> None:
        """Generate what is not recorded.

        A recorded reply takes its place in the batches, so that a resumed run computes in the same batches as an
        uninterrupted one. Each reply is committed to the cache as its batch ends.

        Raises:
            ModelError: a request with a temperature or with tools.
        """
        from remind.models.generate import generate

        if any(request.temperature or request.body for request in asked):
            raise ModelError("a local model answers greedily and takes no tools; name a chat server")
        for room in sorted({request.max_tokens for request in asked}):
            places = [place for place, request in enumerate(asked) if request.max_tokens == room]
            done = [False] * len(places)
            for n, place in enumerate(places):
                if recorded := self.recorded(asked[place]):
                    done[n] = True
                    put(place, recorded)
            started = monotonic()

            def on_output(n: int, output: Generation, places: Sequence[int] = places) -> None:
                nonlocal started
                put(places[n], self.record(asked[places[n]], _reply(output, monotonic() - started)))
                started = monotonic()

            prompts = [as_prompt(asked[place].messages) for place in places]
            generate(self.backbone, prompts, room, self.endpoint.concurrency, done, on_output)


def as_prompt(messages: Sequence[Message]) -> str:
    """A chat as the text of one user message: instructions first; earlier turns of the chat under their roles."""
    front = [message.text for message in messages if message.role == "system"]
    talk = [message for message in messages if message.role != "system"]
    if len(talk) == 1:
        return "\n\n".join([*front, talk[0].text])
    heads = {"user": "Request", "assistant": "Your reply"}
    return "\n\n".join([*front, *(f"{heads[message.role]}:\n{message.text}" for message in talk)])


def _reply(output: Generation, seconds: float) -> Reply:
    """A generation as a reply. A model that could not be run is as good as a server that gives no reply."""
    if output.failure is None:
        return Reply(output.text, None, output.prompt_tokens, output.new_tokens, output.finished, seconds, calls=1)
    failure: ReplyFailure = "too_long" if output.failure == "too_long" else "server"
    return Reply("", finished=False, seconds=seconds, failure=failure, message=output.message)
