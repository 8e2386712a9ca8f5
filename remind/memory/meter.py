"""One endpoint for every memory system: its requests go through one cache, one encoder and one set of books.

Foreign packages are given an address on this machine (`Meter.url`) in place of OpenAI's, our own systems a chat model
(`Meter.chat`). Both ways requests are answered and counted by the same code.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import quote

from remind.core.errors import ConfigError, ModelError, shown
from remind.llm import bodies
from remind.llm.client import Chats
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.request import ChatModel, Reply, Request, Stage
from remind.memory.books import Books
from remind.memory.gateway import Account, Gateway, Service, messages, room

if TYPE_CHECKING:
    from torch import Tensor

    from remind.models.encoder import SentenceEncoder

#: Tokens for a reply where a request names no limit: what a local model may write, and a dry run counts on.
ROOM = 1024


class Meter:
    """Answers chat requests by the endpoint and texts by the encoder, and counts them by system, dialogue and stage.

    `with Meter(...) as meter:` serves on a free loopback port until the block ends. Threads may share it.

    The endpoint's model and temperature (0 where it has none) stand in place of those of each request; everything else
    of a request is passed on unchanged. Replies are cached under endpoint, model and request; equal requests are asked
    once, also those under way. Keys come from the environment: those that clients send are not read.

    Args:
        endpoint: a chat server, or a local model, which takes requests without tools and ignores response_format.
        encoder: of all embeddings.
        cache: SQLite file of replies that were paid for; None: none is kept, and equal requests are asked again.
        record: JSON lines of the costs of this run, so that a resumed run adds up; None: those of this process.
        dry_run: file for the prompts that would be sent (JSONL); nothing is sent, and costs are upper bounds.
        normalise: regular expressions. Requests, as JSON in ASCII, that differ in what they match alone are equal to
            the cache; in a recorded reply such text is replaced by the request's own. For packages that write random
            ids into their prompts.

    Attributes:
        model: what answers chat requests.
        ledger: what was asked and what it cost.
        dry: the dry run, if this is one.

    Raises:
        ConfigError: the endpoint names no model or holds a value out of range, or a regular expression is none.
        ModelError: no key in the environment, or a model that cannot be loaded.
        DataError: cache, record or prompts cannot be written.
    """

    def __init__(
        self,
        endpoint: EndpointConfig,
        encoder: SentenceEncoder,
        cache: str | Path | None = None,
        record: str | Path | None = None,
        dry_run: str | Path | None = None,
        normalise: Sequence[str] = (),
    ) -> None:
        self.endpoint, self.encoder = endpoint, encoder
        self._alike = _one_pattern(normalise)
        files = [None if path is None else str(path) for path in (cache, dry_run)]
        config = LLMConfig(memory=endpoint, cache=files[0], dry_run=files[1])
        # what a dry run estimates is no cost
        self.ledger = Books(None if dry_run is not None else record)
        chats = Chats(config, self.ledger)
        model = chats.stage("read")
        assert model is not None
        self.model, self.dry = model, chats.dry
        # a model of this process, and the file of a dry run, are one thread's at a time
        self._turn = threading.RLock() if endpoint.local or chats.dry is not None else nullcontext()
        self._encoding = threading.Lock()
        self._server: Gateway | None = None

    def __enter__(self) -> Meter:
        self._server = Gateway(Service((self.endpoint.model, self.encoder.name), self._reply, self._encode))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="gateway", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        self._server = None

    def url(self, system: str, dialogue: str, stage: Stage) -> str:
        """The address that a client of OpenAI's protocol takes as base_url.

        Raises:
            ConfigError: a name that no address can hold, an unknown stage, or a meter that does not serve.
        """
        if self._server is None:
            raise ConfigError("the meter can be used only inside its with block")
        account = _account(system, dialogue, stage)
        path = "/".join(quote(part, safe="") for part in (account.system, account.dialogue, account.stage))
        return f"http://127.0.0.1:{self._server.server_address[1]}/{path}/v1"

    def chat(self, system: str, dialogue: str, stage: Stage) -> MeteredChat:
        """A chat model of this process, counted and cached as the requests that come in by the address are."""
        return MeteredChat(self, _account(system, dialogue, stage))

    def report(self) -> dict[str, Any]:
        """What was asked and what it cost, as JSON.

        Returns:
            `endpoint`, `encoder`, `dry_run`; `total`; lists `systems` by system, and `rows` by system, dialogue and
            stage, as `Books.groups` has them. Costs are sums over the whole run, of which `now` was paid by this
            process. A reply that several systems ask for is in the sums of each, and once in the total.
        """
        (total,) = self.ledger.groups()
        return {
            "endpoint": self.endpoint.title,
            "encoder": self.encoder.name,
            "dry_run": None if self.dry is None else str(self.dry.path),
            "total": total,
            "systems": self.ledger.groups("system"),
            "rows": self.ledger.groups("system", "dialogue", "stage"),
        }

    def table(self) -> str:
        """The report as lines of text, one for each system and stage, then the total."""
        rows = self.ledger.groups("system", "stage")
        total = [{"system": "total", "stage": "", **one} for one in self.ledger.groups()]
        width = max(len(row["system"]) for row in (*rows, {"system": "system"}, *total))
        heads = ("requests", "cached", "failed", "calls", "prompt", "reply", "USD", "texts", "seconds")
        lines = [f"{'system':<{width}}  {'stage':<10}" + "".join(f"{head:>11}" for head in heads)]
        for row in (*rows, *total):
            failures, texts = sum(row["failures"].values()), row["embeddings"]
            counts = (row["requests"], row["cached"], failures, row["calls"])
            costs = (f"{row['cost_usd']:.4f}", texts["texts"])
            seconds = f"{row['seconds_in_all'] + texts['seconds']:.1f}"
            cells = (*counts, row["prompt_tokens"], row["completion_tokens"], *costs, seconds)
            lines.append(f"{row['system']:<{width}}  {row['stage']:<10}" + "".join(f"{cell:>11}" for cell in cells))
        if self.dry is not None:
            lines.append(f"a dry run: replies and USD are upper bounds; nothing was asked; prompts: {self.dry.path}")
        return "\n".join(lines)

    def complete(
        self, account: Account, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        """As `ChatModel.complete`, counted under the account."""
        system, dialogue, stage = account.system, account.dialogue, account.stage
        counted = [replace(request, system=system, dialogue=dialogue, stage=stage) for request in requests]
        with self._turn:
            return self.model.complete(counted, on_reply)

    def _reply(self, account: Account, body: Mapping[str, Any]) -> Reply:
        """The reply to a chat request, whose text is a completion as JSON. Raises ValueError for a body of no use."""
        local, space = self.endpoint.local, room(body, ROOM)
        if local and (body.get("tools") or body.get("functions")):
            raise ValueError("a local model takes no tools; name a chat server")
        request = Request(messages(body) if local else (), account.stage, max_tokens=space)
        try:
            (reply,) = self.complete(account, [request if local else replace(request, body=body)])
        except ModelError:
            # it ends the work of a system of ours, but a foreign one is only told of it
            under = replace(request, system=account.system, dialogue=account.dialogue)
            self.ledger.add(under, Reply("", failure="server"), self.endpoint)
            raise
        if reply.failure is not None or not local:
            return reply
        message = {"role": "assistant", "content": reply.text}
        counts = (reply.prompt_tokens, reply.completion_tokens)
        whole = bodies.completion(self.endpoint.model, message, "stop" if reply.finished else "length", *counts)
        return replace(reply, text=json.dumps(whole))

    def _encode(self, account: Account, texts: list[str]) -> tuple[Tensor, int]:
        started = monotonic()
        with self._encoding:
            vectors, tokens = self.encoder.encode_apart(texts), sum(self.encoder.count_many(texts))
        place = (account.system, account.dialogue, account.stage, self.encoder.name)
        self.ledger.add_embeddings(*place, len(texts), tokens, monotonic() - started)
        return vectors, tokens


class MeteredChat(ChatModel):
    """A `ChatModel` whose requests a meter answers and counts."""

    def __init__(self, meter: Meter, account: Account) -> None:
        self._meter, self.account = meter, account

    @property
    def name(self) -> str:
        """Identifies endpoint and model, without any key."""
        return self._meter.model.name

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        """As `ChatModel`; what stage a request names is of no matter."""
        return self._meter.complete(self.account, requests, on_reply)


def _account(system: str, dialogue: str, stage: Stage) -> Account:
    if stage not in get_args(Stage):
        raise ConfigError(f"unknown stage {shown(stage)}; it is one of {', '.join(get_args(Stage))}")
    for kind, name in (("system", system), ("dialogue", dialogue)):
        # these two are steps in an address, which clients take
        if name in ("", ".", ".."):
            raise ConfigError(f"a {kind} cannot be named {name!r}")
    return Account(system, dialogue, stage)


def _one_pattern(patterns: Sequence[str]) -> str:
    """One regular expression for all. Raises ConfigError where one is none, or matches the empty text."""
    for pattern in patterns:
        try:
            empty = re.fullmatch(pattern, "") is not None
        except re.error as error:
            raise ConfigError(f"normalise: {shown(pattern)} is not a regular expression: {error}") from None
        if empty:
            raise ConfigError(f"normalise: {shown(pattern)} matches the empty text")
    return "|".join(f"(?:{pattern})" for pattern in patterns)
