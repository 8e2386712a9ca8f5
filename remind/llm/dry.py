"""A chat model that asks nothing: it writes down what would be asked, and what that would cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from remind.core.errors import DataError
from remind.llm.bodies import completion
from remind.llm.cache import ReplyCache
from remind.llm.client import CachedChat, Put
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.request import Reply, Request
from remind.llm.structured import placeholder

#: Characters per token; English prose has about that many.
CHARACTERS = 4
#: What a chat template adds to a message, in tokens, about.
_TEMPLATE_TOKENS = 4
#: What a free-text reply reads like in a dry run.
DRY = "(dry run: nothing was asked)"


class DryRun:
    """The file of prompts and the estimated costs of one dry run; its chat models share it.

    Args:
        path: JSONL; an older one is replaced. A line per request that would be sent.
        ledger: gets every stand-in reply at its highest cost: it is taken to fill the room it has.

    Attributes:
        replies: the stand-in replies by cache key.

    Raises:
        DataError: the file cannot be written.
    """

    def __init__(self, path: str | Path, ledger: Ledger) -> None:
        self.path, self.ledger = Path(path).expanduser(), ledger
        self.replies: dict[str, Reply] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")
        except OSError as error:
            raise DataError(f"cannot be written: {error.strerror}", self.path) from None

    def summary(self) -> dict[str, Any]:
        """As `Ledger.summary`; what would be paid is under `now`: upper bounds of completion_tokens and cost_usd."""
        return self.ledger.summary()

    def report(self) -> str:
        """The summary as text."""
        summary = self.summary()
        lines = [f"{'stage':<10}{'requests':>9}{'cached':>8}{'prompt':>12}{'reply at most':>15}{'USD at most':>13}"]
        for name, row in (*summary["stages"].items(), ("total", summary["total"])):
            now, counts = row["now"], f"{row['requests']:>9}{row['cached']:>8}"
            tokens = f"{now['prompt_tokens']:>12}{now['completion_tokens']:>15}"
            lines.append(f"{name:<10}{counts}{tokens}{now['cost_usd']:>13.4f}")
        lines.append(f"tokens counted as characters / {CHARACTERS}; nothing was asked; prompts: {self.path}")
        return "\n".join(lines)


class DryChat(CachedChat):
    """A `ChatModel` that asks nothing.

    Replies the cache holds are given out, so that what comes after them is estimated truly. All others are stand-ins:
    a fixed line, or the smallest value of the schema's shape.
    """

    def __init__(self, endpoint: EndpointConfig, run: DryRun, cache: ReplyCache | None = None) -> None:
        super().__init__(endpoint, cache, run.ledger)
        self.run = run

    @property
    def name(self) -> str:
        return f"dry run of {self.endpoint.identity}"

    def ask(self, asked: Mapping[str, Request], put: Put) -> None:
        """Put what the cache or this dry run holds, else a stand-in, which is written down."""
        for key, request in asked.items():
            if key in self.run.replies:
                put(replace(self.run.replies[key], cached=True))
            else:
                put(self.recorded(request) or self._stand_in(key, request))

    def _stand_in(self, key: str, request: Request) -> Reply:
        body = self.body(request)
        if request.body is None:
            text = DRY if request.schema is None else json.dumps(placeholder(request.schema))
            tokens = sum(-(-len(message.text) // CHARACTERS) + _TEMPLATE_TOKENS for message in request.messages)
        else:
            tokens = -(-len(json.dumps([body.get("messages"), body.get("tools")], ensure_ascii=False)) // CHARACTERS)
            message, reason = _message(request.body)
            text = json.dumps(completion(self.endpoint.model, message, reason, tokens, request.max_tokens))
        about = {"stage": request.stage, "sample": request.sample, "prompt_id": request.prompt_id}
        about |= {"system": request.system, "dialogue": request.dialogue} if request.system else {}
        cost = self.endpoint.cost(tokens, request.max_tokens)
        line = {**about, "endpoint": self.endpoint.title, **body, "prompt_tokens": tokens, "cost_usd_at_most": cost}
        with self.run.path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.run.replies[key] = Reply(text, prompt_tokens=tokens, completion_tokens=request.max_tokens, key=key)
        return self.run.replies[key]


def _message(body: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A message such as the body asks for, and why it ends: a call of the tool it insists on, JSON, or a fixed line."""
    tools = [tool["function"] for tool in body.get("tools") or [] if tool.get("type") == "function"]
    choice, form = body.get("tool_choice"), body.get("response_format") or {}
    if isinstance(choice, Mapping):
        tools = [tool for tool in tools if tool["name"] == choice.get("function", {}).get("name")]
    if tools and choice not in (None, "auto", "none"):
        arguments = json.dumps(placeholder(tools[0].get("parameters") or {}))
        call = {"id": "call_0", "type": "function", "function": {"name": tools[0]["name"], "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
    schema = form.get("json_schema", {}).get("schema", {})
    text = DRY if form.get("type", "text") == "text" else json.dumps(placeholder(schema))
    return {"role": "assistant", "content": text}, "stop"
