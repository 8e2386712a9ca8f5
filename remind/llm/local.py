"""A chat model in this process: transformers' greedy generation on a backbone, behind the interface of the servers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from remind.llm.batch import Asked, Batch, entry_of, key_of, recorded, recorded_only, settle
from remind.llm.cache import ReplyCache, Spent, spent_on
from remind.llm.endpoints import LOCAL, EndpointConfig
from remind.llm.ledger import Ledger, Payment
from remind.llm.request import Message, Reply, ReplyFailure, Request

if TYPE_CHECKING:
    from remind.models.backbone import Backbone
    from remind.models.generate import Generation


class LocalChat:
    """A `ChatModel` on a loaded backbone; greedy, in batches of similar length.

    Replies of one user message are those of `remind.models.generate.generate` on its text. Other roles are written
    into that message, since not every chat template has them.

    Args:
        backbone: a model that generates.
        batch_size: prompts per forward.
        identity: what tells these weights from others of the same name in the cache; None: a hash of the files of the
            folder they came from, which knows nothing of changes made in memory.
        cache, ledger: as for a server; the price is nothing.

    Raises:
        ModelError: the model does not generate.
    """

    def __init__(
        self,
        backbone: Backbone,
        batch_size: int = 8,
        cache: ReplyCache | None = None,
        ledger: Ledger | None = None,
        identity: str | None = None,
        endpoint: EndpointConfig | None = None,
    ) -> None:
        from remind.models.generate import check_generates

        check_generates(backbone)
        self.backbone, self.batch_size, self.cache, self.ledger = backbone, batch_size, cache, ledger
        self.endpoint = endpoint or EndpointConfig(backbone.name, LOCAL)
        self._weights = fingerprint(backbone.name) if identity is None else identity
        self._model = f"{self._weights} {backbone.dtype} transformers {version('transformers')}"

    @property
    def name(self) -> str:
        weights = self._weights
        return self.endpoint.identity + ("" if weights == self.backbone.name else f" {weights}")

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        """A reply for each request, in order; one with a temperature is refused.

        A cached reply takes its place in the batches, so that a resumed run computes in the same batches as an
        uninterrupted one. Each reply is committed to the cache as its batch ends.

        Raises:
            DataError: the cache cannot be written.
        """
        batch = Batch(requests, self.endpoint, self.cache, self.ledger, on_reply, self._model)
        open_ = set(batch.serve_known(recorded_only(self.cache, batch.known, self._key_of)))
        if not open_:
            return batch.done()
        for room in sorted({request.max_tokens for request in batch.requests}):
            group = [i for i, request in enumerate(batch.requests) if request.max_tokens == room]
            self._generate(batch, group, [i in open_ for i in group], room)
        return batch.done()

    def _generate(self, batch: Batch, group: Sequence[int], wanted: Sequence[bool], room: int) -> None:
        started = monotonic()

        def on_output(place: int, output: Generation) -> None:
            nonlocal started
            index = group[place]
            request = batch.requests[index]
            reply = _reply(output, monotonic() - started)
            started = monotonic()
            first = self._record(request, reply)
            batch.put(index, *settle(request, lambda asked: first if asked is request else self._one(asked)))

        greedy = [batch.requests[index].temperature == 0 for index in group]
        for index, want, fine in zip(group, wanted, greedy, strict=True):
            if want and not fine:
                message = "a local model answers greedily; ask with temperature 0"
                batch.put(index, Reply("", finished=False, failure="refused", message=message), [])
        done = [not (want and fine) for want, fine in zip(wanted, greedy, strict=True)]
        self._run([batch.requests[index] for index in group], room, done, on_output)

    def _run(
        self,
        requests: Sequence[Request],
        room: int,
        done: Sequence[bool],
        on_output: Callable[[int, Generation], None],
    ) -> None:
        from remind.models.generate import generate

        if not all(done):
            prompts = [as_prompt(request.messages) for request in requests]
            generate(self.backbone, prompts, room, self.batch_size, done, on_output)

    def _one(self, request: Request) -> Asked:
        """A repair: asked on its own."""
        key = self._key_of(request)
        entry = entry_of(self.cache, key)
        if entry.reply is not None:
            return recorded(key, entry)
        started = monotonic()
        outputs: list[Generation] = []
        self._run([request], request.max_tokens, [False], lambda _, output: outputs.append(output))
        return self._record(request, _reply(outputs[0], monotonic() - started))

    def _record(self, request: Request, reply: Reply) -> Asked:
        key = self._key_of(request)
        if self.cache is not None and reply.failure is None:
            self.cache.put(key, reply, self.endpoint.title, request.stage)
        return Asked(reply, Payment(key, spent_on(reply), Spent()), False)

    def _key_of(self, request: Request) -> str:
        return key_of(request, self.endpoint, self._model)


def as_prompt(messages: Sequence[Message]) -> str:
    """A chat as the text of one user message: instructions first; earlier turns of the chat under their roles."""
    if len(messages) == 1:
        return messages[0].text
    front = [message.text for message in messages if message.role == "system"]
    talk = [message for message in messages if message.role != "system"]
    if len(talk) == 1:
        return "\n\n".join([*front, talk[0].text])
    heads = {"user": "Request", "assistant": "Your reply"}
    return "\n\n".join([*front, *(f"{heads[message.role]}:\n{message.text}" for message in talk)])


def fingerprint(name: str) -> str:
    """Names, sizes and times of the files of a model folder, hashed; the name itself for a hub id."""
    if name == "nano":
        from remind.models.nano import nano_folder

        folder = nano_folder()
    else:
        folder = Path(name).expanduser()
    if not folder.is_dir():
        return name
    lines = [
        f"{file.relative_to(folder)} {file.stat().st_size} {file.stat().st_mtime_ns}"
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _reply(output: Generation, seconds: float) -> Reply:
    """A generation as a reply. A model that could not be run is as good as a server that gives no reply."""
    kinds: dict[str, ReplyFailure] = {"too_long": "too_long", "error": "server"}
    failure = None if output.failure is None else kinds.get(output.failure, "server")
    ran = output.failure != "too_long"
    reply = Reply(output.text, None, output.prompt_tokens, output.new_tokens, output.finished, seconds, int(ran))
    return reply if failure is None else replace(reply, failure=failure, message=output.message, prompt_tokens=0)
