"""What all chat models share, and the chat models of a run."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from remind.core.errors import ConfigError
from remind.llm.cache import ReplyCache
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.ledger import Exchange, Ledger
from remind.llm.request import ChatModel, Reply, Request, Stage
from remind.llm.structured import NotValid, read_value, repair

Put = Callable[[int, Callable[[Request], Exchange]], None]

#: Goes into every key; raised when keys get another meaning.
_KEYS = 1


class CachedChat(ABC):
    """Base of the chat models: keys, recorded replies, equal requests asked once, costs, JSON and its repair.

    Args:
        endpoint: which model, where, and with what limits.
        cache: replies that were paid for; None: every request is asked.
        ledger: where costs are counted.

    Attributes:
        weights: what else identifies the model, such as a hash of local weights.

    Raises:
        ConfigError: the endpoint names no model, or holds a value out of range.
    """

    weights = ""

    def __init__(self, endpoint: EndpointConfig, cache: ReplyCache | None = None, ledger: Ledger | None = None) -> None:
        endpoint.check()
        if not endpoint.model:
            raise ConfigError("no model is named; set the endpoint's model")
        self.endpoint, self.cache, self.ledger = endpoint, cache, ledger

    @property
    def name(self) -> str:
        """Identifies endpoint and model, without any key."""
        return self.endpoint.identity

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        """A reply for each request, in order; errors as in `ChatModel`, and DataError for the cache.

        Requests with the same words are asked once. What the cache holds comes first. A reply is committed to the
        cache before it is given out.
        """
        own = {"max_tokens": self.endpoint.max_tokens, "temperature": self.endpoint.temperature}
        own = {name: value for name, value in own.items() if value is not None}
        requests = [replace(request, **own) for request in requests]  # type: ignore[arg-type]
        equal: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            equal.setdefault(self.key_of(request), []).append(index)
        replies: dict[int, Reply] = {}
        lock = threading.Lock()

        def put(index: int, exchange: Callable[[Request], Exchange]) -> None:
            reply, exchanges = checked(requests[index], exchange)
            with lock:
                for place in equal[self.key_of(requests[index])]:
                    replies[place] = reply
                    if self.ledger is not None:
                        self.ledger.add(requests[place], reply, exchanges, self.endpoint)
                    if on_reply is not None:
                        on_reply(place, reply)
                    reply, exchanges = _again(reply), []

        missing = []
        for index, *_ in equal.values():
            try:
                put(index, self.recorded)
            except NotRecorded:
                missing.append(index)
        self.ask(requests, missing, put)
        return [replies[index] for index in range(len(requests))]

    @abstractmethod
    def ask(self, requests: Sequence[Request], missing: Sequence[int], put: Put) -> None:
        """For each missing request call `put` with its index and with what makes an exchange, also of a repair."""

    def key_of(self, request: Request) -> str:
        """Cache key: a hash of endpoint, model, messages and everything that shapes the reply; no key of a user in it.

        Stage, sample and prompt id are not part of it: the same words are paid for once.
        """
        return self._identity(request)[0]

    def body(self, request: Request) -> dict[str, Any]:
        """The JSON that a server is sent."""
        endpoint = self.endpoint
        if request.body is not None:
            body = {**request.body, "model": endpoint.model, "temperature": request.temperature}
            if endpoint.max_tokens is not None:
                body |= {"max_tokens": endpoint.max_tokens, "max_completion_tokens": None}
        else:
            body = {"model": endpoint.model, "messages": request.chat}
            body |= {"max_tokens": request.max_tokens, "temperature": request.temperature}
            if endpoint.structured and request.schema is not None:
                schema = {"name": request.stage, "schema": dict(request.schema)}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {name: value for name, value in {**body, **endpoint.extra_body}.items() if value is not None}

    def recorded(self, request: Request) -> Exchange:
        """The exchange that the cache holds. Raises NotRecorded."""
        key, matches = self._identity(request)
        reply = None if self.cache is None else self.cache.get(key)
        if reply is None:
            raise NotRecorded
        for text, stand_in in matches.items():
            reply = replace(reply, text=reply.text.replace(stand_in, text))
        return Exchange(key, reply, cached=True)

    def record(self, request: Request, reply: Reply) -> Exchange:
        """The exchange that has just been made, committed to the cache unless it failed."""
        key, matches = self._identity(request)
        if self.cache is not None and reply.failure is None:
            # before others can find it, so that they do not count it as paid for earlier
            if self.ledger is not None:
                self.ledger.paid(request, key)
            # longest first: one match may be part of another
            kept = reply
            for text in sorted(matches, key=len, reverse=True):
                kept = replace(kept, text=kept.text.replace(text, matches[text]))
            self.cache.put(key, kept, self.endpoint.title, request.stage)
        return Exchange(key, reply)

    def _identity(self, request: Request) -> tuple[str, dict[str, str]]:
        """The cache key, and its placeholder for each text that `request.alike` matches."""
        parts: list[Any]
        if request.body is not None:
            parts = [_KEYS, self.endpoint.title, self.weights, "body", self.body(request)]
        else:
            messages = [[message.role, message.text] for message in request.messages]
            shape = [request.max_tokens, float(request.temperature), request.schema]
            structured = self.endpoint.structured and request.schema is not None
            parts = [_KEYS, self.endpoint.title, self.weights, messages, *shape, structured, self.endpoint.extra_body]
        # escaped: a lone surrogate in a dialogue has no bytes of its own
        text = json.dumps(parts, sort_keys=True)
        matches: dict[str, str] = {}
        if request.alike:
            # numbered, so that a request in which two of them are the same text equals no other
            text = re.sub(request.alike, lambda match: matches.setdefault(match[0], f"<<same-{len(matches)}>>"), text)
        return hashlib.sha256(text.encode()).hexdigest(), matches


class NotRecorded(Exception):
    """The cache does not hold what is asked for."""


def _again(reply: Reply) -> Reply:
    """The reply for a further request with the same words: nothing is asked for it."""
    if reply.failure in (None, "invalid"):
        return replace(reply, cached=True, calls=0, seconds=0.0)
    return replace(reply, calls=0, prompt_tokens=0, completion_tokens=0, seconds=0.0)


def checked(request: Request, ask: Callable[[Request], Exchange]) -> tuple[Reply, list[Exchange]]:
    """Ask, check the reply against the request's schema, and ask once more if it does not fit.

    Returns:
        The reply, with the tokens of both exchanges, and the exchanges.
    """
    exchanges = [ask(request)]
    first = exchanges[0].reply
    if request.schema is None or first.failure is not None:
        return _joined(exchanges), exchanges
    try:
        return replace(_joined(exchanges), value=read_value(first.text, request.schema, first.finished)), exchanges
    except NotValid as error:
        reason = str(error)
    exchanges.append(ask(replace(request, messages=(*request.messages, *repair(first.text, reason)))))
    reply = _joined(exchanges)
    if reply.failure == "too_long":
        reply = replace(reply, text=first.text, failure="invalid", message=f"{reason}; no room to ask again")
    elif reply.failure is None:
        try:
            reply = replace(reply, value=read_value(reply.text, request.schema, reply.finished))
        except NotValid as error:
            reply = replace(reply, failure="invalid", message=f"{error} (after one repair)")
    return reply, exchanges


def _joined(exchanges: Sequence[Exchange]) -> Reply:
    """The last reply, with the tokens of all exchanges, and the calls and seconds of those made now."""
    made = [one.reply for one in exchanges if not one.cached]
    return replace(
        exchanges[-1].reply,
        prompt_tokens=sum(one.reply.prompt_tokens for one in exchanges),
        completion_tokens=sum(one.reply.completion_tokens for one in exchanges),
        seconds=sum((one.seconds for one in made), 0.0),
        calls=sum(one.calls for one in made),
        usage_known=all(one.reply.usage_known for one in exchanges),
        cached=not made,
    )


class Chats:
    """The chat models of a run, one per endpoint, opened when first asked for; they share cache and ledger.

    Attributes:
        ledger: what was asked and what it cost.
        dry: the dry run, if this is one.
    """

    def __init__(self, cfg: LLMConfig, ledger: Ledger | None = None) -> None:
        from remind.llm.dry import DryRun

        self.cfg, self.ledger = cfg, ledger or Ledger()
        self.dry = None if cfg.dry_run is None else DryRun(cfg.dry_run)
        self._cache: ReplyCache | None = None
        self._open: list[tuple[EndpointConfig, ChatModel]] = []

    def stage(self, stage: Stage) -> ChatModel | None:
        """The chat model for a stage; None: it has no endpoint, and the offline stand-in does it.

        Raises:
            ConfigError: an endpoint without a model, or with a value out of range.
            ModelError: no key in the environment, a missing package, or a model that cannot be loaded or does not
                generate.
            DataError: the cache cannot be used.
        """
        endpoint = self.cfg.endpoint(stage)
        if endpoint is None:
            return None
        for opened, model in self._open:
            if opened == endpoint:
                return model
        if self._cache is None and self.cfg.cache is not None:
            self._cache = ReplyCache(self.cfg.cache)
        if self.dry is not None:
            from remind.llm.dry import DryChat

            model = DryChat(endpoint, self.dry, self._cache)
        elif endpoint.local:
            from remind.llm.local import LocalChat

            model = LocalChat(endpoint, self._cache, self.ledger)
        else:
            from remind.llm.client import OpenAIChat

            model = OpenAIChat(endpoint, self._cache, self.ledger)
        self._open.append((endpoint, model))
        return model
