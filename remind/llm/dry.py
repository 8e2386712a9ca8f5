"""A chat model that asks nothing: it writes down what would be asked, and what that would cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from remind.llm.bodies import completion
from remind.llm.cache import ReplyCache
from remind.llm.client import CachedChat, Put
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger, table
from remind.llm.request import Reply, Request
from remind.llm.structured import placeholder

#: Characters per token; English prose has about that many.
CHARACTERS = 4
#: What a free-text reply reads like in a dry run.
DRY = "(dry run: nothing was asked)"


class DryRun:
    """The file of prompts and the estimated costs of one dry run; its chat models share it.

    Args:
        path: JSONL; an older one is replaced. A line per request that would be sent.
        ledger: gets every stand-in reply at its highest cost: it is taken to fill the room it has.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, ledger: Ledger) -> None:
        self.path, self.ledger = Path(path).expanduser(), ledger
        self.replies: dict[str, Reply] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"")

    def report(self) -> str:
        """The ledger as text: calls, and at most how many tokens and USD they cost."""
        end = f"tokens counted as characters / {CHARACTERS}, replies at their longest; nothing was asked"
        return f"{table(self.ledger.summary(), dry=True)}\n{end}; prompts: {self.path}"


class DryChat(CachedChat):
    """A `ChatModel` that asks nothing.

    Replies the cache holds are given out, so that what comes after them is estimated truly. All others are stand-ins:
    a fixed line, or the smallest value of the schema's shape.
    """

    def __init__(self, endpoint: EndpointConfig, run: DryRun, cache: ReplyCache | None = None) -> None:
        super().__init__(endpoint, cache, run.ledger)
        self.run = run

    def ask(self, asked: Sequence[Request], put: Put) -> None:
        """Put what the cache or this dry run holds, else a stand-in, which is written down."""
        for place, request in enumerate(asked):
            key = self.key_of(request)
            if key in self.run.replies:
                put(place, replace(self.run.replies[key], cached=True))
            elif recorded := self.recorded(request):
                put(place, recorded)
            else:
                self.run.replies[key] = self._noted(request)
                put(place, self.run.replies[key])

    def _noted(self, request: Request) -> Reply:
        body, schema = self.body(request), request.schema
        tokens = len(json.dumps([body["messages"], body.get("tools")])) // CHARACTERS
        text = DRY if schema is None else json.dumps(placeholder(schema, schema))
        if request.body is not None:
            message = {"role": "assistant", "content": "{}" if body.get("response_format") else DRY}
            text = json.dumps(completion(self.endpoint.model, message, "stop", tokens, request.max_tokens))
        about = {name: getattr(request, name) for name in ("stage", "sample", "prompt_id", "system", "dialogue")}
        cost = self.endpoint.cost(tokens, request.max_tokens)
        line = {**about, "endpoint": self.endpoint.title, **body, "prompt_tokens": tokens, "cost_usd_at_most": cost}
        with self.run.path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return Reply(text, None, tokens, request.max_tokens, calls=1)
