"""A chat model that asks nothing: it writes down what would be asked, and what that would cost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remind.core.errors import DataError
from remind.llm.batch import Batch, chat, key_of, recorded_only
from remind.llm.cache import ReplyCache
from remind.llm.endpoints import EndpointConfig
from remind.llm.request import Reply, Request
from remind.llm.structured import placeholder

#: Characters per token where no tokenizer is given; English prose has about that many.
CHARACTERS = 4
#: What a chat template adds to a message, in tokens, about.
_FRAME = 4
#: What a free-text reply reads like in a dry run.
DRY = "(dry run: nothing was asked)"


@dataclass
class Estimate:
    """Sums over the requests of a stage: how many, how many of them the cache holds, tokens, and USD at most.

    completion_tokens and cost_usd are upper bounds: every reply is taken to fill the room it has.
    """

    requests: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0


class DryRun:
    """The file of prompts and the sums of one dry run; its chat models share it.

    Args:
        path: JSONL; an older one is replaced. A line per request that would be sent.
        tokenizer: counts tokens; None: characters / 4.

    Raises:
        DataError: the file cannot be written.
    """

    def __init__(self, path: str | Path, tokenizer: Any = None) -> None:
        self.path = Path(path).expanduser()
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._stages: dict[str, Estimate] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")
        except OSError as error:
            raise DataError(f"cannot be written: {error.strerror}", self.path) from None

    def count(self, text: str) -> int:
        """Tokens of a text, or about how many."""
        if self.tokenizer is None:
            return -(-len(text) // CHARACTERS)
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def note(self, key: str, request: Request, endpoint: EndpointConfig, cached: bool) -> int:
        """Write a request down, unless the cache holds it or the same was noted before; returns its prompt tokens."""
        tokens = sum(self.count(message.text) + _FRAME for message in request.messages)
        with self._lock:
            row = self._stages.setdefault(request.stage, Estimate())
            row.requests += 1
            if cached or key in self._seen:
                row.cached += 1
                return tokens
            self._seen.add(key)
            cost = endpoint.cost(tokens, request.max_tokens)
            row.prompt_tokens += tokens
            row.completion_tokens += request.max_tokens
            row.cost_usd += cost
            line = {
                "stage": request.stage,
                "sample": request.sample,
                "prompt_id": request.prompt_id,
                "endpoint": endpoint.title,
                "messages": chat(request.messages),
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "schema": request.schema,
                "prompt_tokens": tokens,
                "cost_usd_at_most": cost,
            }
            with self.path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return tokens

    def summary(self) -> dict[str, Any]:
        """`stages` and `total` as plain numbers, and `counted_by`: what the tokens were counted with."""
        with self._lock:
            stages = {name: vars(row).copy() for name, row in sorted(self._stages.items())}
        total = {name: sum(row[name] for row in stages.values()) for name in vars(Estimate())}
        counted = f"characters / {CHARACTERS}" if self.tokenizer is None else "tokenizer"
        return {"stages": stages, "total": total, "counted_by": counted, "prompts": str(self.path)}

    def report(self) -> str:
        """The summary as text."""
        summary = self.summary()
        lines = [f"{'stage':<10}{'requests':>9}{'cached':>8}{'prompt':>12}{'reply at most':>15}{'USD at most':>13}"]
        for name, row in (*summary["stages"].items(), ("total", summary["total"])):
            tokens = f"{row['prompt_tokens']:>12}{row['completion_tokens']:>15}"
            lines.append(f"{name:<10}{row['requests']:>9}{row['cached']:>8}{tokens}{row['cost_usd']:>13.4f}")
        lines.append(f"tokens counted by {summary['counted_by']}; nothing was asked; prompts: {self.path}")
        return "\n".join(lines)


class DryChat:
    """A `ChatModel` that asks nothing.

    Replies the cache holds are given out, so that what comes after them is estimated truly. All others are stand-ins:
    a fixed line, or the smallest value of the schema's shape.
    """

    def __init__(self, endpoint: EndpointConfig, run: DryRun, cache: ReplyCache | None = None) -> None:
        endpoint.check()
        self.endpoint, self.run, self.cache = endpoint, run, cache

    @property
    def name(self) -> str:
        return f"dry run of {self.endpoint.identity}"

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        """A stand-in for each request that is not cached; nothing is sent."""
        batch = Batch(requests, self.endpoint, self.cache, None, on_reply)
        known = recorded_only(self.cache, batch.known, lambda request: key_of(request, self.endpoint))
        open_ = set(batch.serve_known(known))
        asked = {batch.keys[index] for index in open_}
        counts = [
            self.run.note(key, request, self.endpoint, key not in asked)
            for key, request in zip(batch.keys, batch.requests, strict=True)
        ]
        for index in sorted(open_):
            schema = batch.requests[index].schema
            value = None if schema is None else placeholder(schema)
            text = DRY if schema is None else json.dumps(value)
            batch.put(index, Reply(text, value, prompt_tokens=counts[index]), [])
        return batch.done()
