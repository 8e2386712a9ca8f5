"""What all chat models share: keys of requests, replies already there, requests asked twice, books, JSON and repair."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remind.llm.cache import Entry, ReplyCache, Spent, spent_on
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger, Payment
from remind.llm.request import Message, Reply, Request
from remind.llm.structured import NotValid, read_value, repair

#: Goes into every key; raised when keys get another meaning.
_KEYS = 1


@dataclass(frozen=True)
class Asked:
    """One exchange with the model.

    Attributes:
        reply: as it came, or as it was recorded; `calls` and tokens are what it cost then.
        payment: what it cost now and before.
        cached: whether it was there already.
    """

    reply: Reply
    payment: Payment
    cached: bool


def effective(request: Request, endpoint: EndpointConfig) -> Request:
    """The request with the endpoint's own max_tokens and temperature, where it sets them."""
    return replace(
        request,
        max_tokens=request.max_tokens if endpoint.max_tokens is None else endpoint.max_tokens,
        temperature=request.temperature if endpoint.temperature is None else endpoint.temperature,
    )


def key_of(request: Request, endpoint: EndpointConfig, model: str = "") -> str:
    """Cache key: a hash of endpoint, model, messages and everything that shapes the reply; no key of a user in it.

    Stage, sample and prompt id are not part of it: the same words are paid for once.

    Args:
        model: what else identifies the model, such as the hash of local weights.
    """
    parts = [
        _KEYS,
        endpoint.title,
        model,
        [[message.role, message.text] for message in request.messages],
        request.max_tokens,
        float(request.temperature),
        request.schema,
        endpoint.structured and request.schema is not None,
        endpoint.extra_body,
    ]
    # escaped: a lone surrogate in a dialogue has no bytes of its own
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def entry_of(cache: ReplyCache | None, key: str) -> Entry:
    """What the cache knows of a key; an empty entry if nothing."""
    found = cache.lookup([key]) if cache is not None else {}
    return found.get(key, Entry(None, Spent()))


def recorded(key: str, entry: Entry) -> Asked:
    """An exchange that was paid for before."""
    assert entry.reply is not None
    return Asked(entry.reply, Payment(key, Spent(), entry.spent), True)


def settle(request: Request, ask: Callable[[Request], Asked]) -> tuple[Reply, list[Payment]]:
    """Ask, check the reply against the request's schema, and ask once more if it does not fit.

    Returns:
        The reply, with the tokens of both exchanges, and what was paid for each.
    """
    first = ask(request)
    if request.schema is None or first.reply.failure is not None:
        return joined([first]), [first.payment]
    try:
        value = read_value(first.reply.text, request.schema, first.reply.finished)
        return replace(joined([first]), value=value), [first.payment]
    except NotValid as error:
        reason = str(error)
    second = ask(replace(request, messages=(*request.messages, *repair(first.reply.text, reason))))
    payments = [first.payment, second.payment]
    reply = joined([first, second])
    if second.reply.failure == "too_long":
        message = f"{reason}; no room to ask again"
        return replace(reply, text=first.reply.text, failure="invalid", message=message), payments
    if second.reply.failure is not None:
        return reply, payments
    try:
        return replace(reply, value=read_value(second.reply.text, request.schema, second.reply.finished)), payments
    except NotValid as error:
        return replace(reply, failure="invalid", message=f"{error} (after one repair)"), payments


def joined(asked: Sequence[Asked]) -> Reply:
    """The last reply, with what all exchanges cost; calls count those made now."""
    spent = sum((spent_on(part.reply) for part in asked), Spent())
    cached = all(part.cached for part in asked)
    return replace(
        asked[-1].reply,
        prompt_tokens=spent.prompt_tokens,
        completion_tokens=spent.completion_tokens,
        seconds=0.0 if cached else sum(part.payment.now.seconds for part in asked),
        calls=sum(part.payment.now.calls for part in asked),
        cached=cached,
    )


class Batch:
    """The requests of one `complete` call on their way.

    Args:
        known: what the cache knows of the keys.
        model: as in `key_of`.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        endpoint: EndpointConfig,
        cache: ReplyCache | None,
        ledger: Ledger | None,
        on_reply: Callable[[int, Reply], None] | None,
        model: str = "",
    ) -> None:
        self.requests = [effective(request, endpoint) for request in requests]
        self.keys = [key_of(request, endpoint, model) for request in self.requests]
        self._endpoint, self._ledger, self._on_reply = endpoint, ledger, on_reply
        self._replies: list[Reply | None] = [None] * len(requests)
        self._lock = threading.Lock()
        self._same: dict[str, list[int]] = {}
        for index, key in enumerate(self.keys):
            self._same.setdefault(key, []).append(index)
        self.known: Mapping[str, Entry] = {} if cache is None else cache.lookup(list(self._same))

    def serve_known(self, ask: Callable[[Request], Asked]) -> list[int]:
        """Give out the replies that are there; returns one index of each request that is to be asked.

        Args:
            ask: gives a recorded exchange or raises KeyError.
        """
        open_ = []
        for key, (index, *_) in self._same.items():
            if (entry := self.known.get(key)) is None or entry.reply is None:
                open_.append(index)
                continue
            try:
                reply, payments = settle(self.requests[index], ask)
            except KeyError:
                open_.append(index)
            else:
                self.put(index, reply, payments)
        return open_

    def put(self, index: int, reply: Reply, payments: Sequence[Payment]) -> None:
        """Note a reply, for every request that asks the same; callbacks come one at a time."""
        with self._lock:
            for number, place in enumerate(self._same[self.keys[index]]):
                mine = reply if number == 0 else _again(reply)
                self._replies[place] = mine
                if self._ledger is not None:
                    paid = payments if number == 0 else [Payment(part.key, Spent(), Spent()) for part in payments]
                    self._ledger.add(self.requests[place], mine, paid, self._endpoint)
                if self._on_reply is not None:
                    self._on_reply(place, mine)

    def done(self) -> list[Reply]:
        """All replies, in order."""
        assert all(reply is not None for reply in self._replies)
        return [reply for reply in self._replies if reply is not None]


def _again(reply: Reply) -> Reply:
    """The reply for a further request with the same words: nothing was asked for it."""
    if reply.failure in (None, "invalid"):
        return replace(reply, cached=True, calls=0, seconds=0.0)
    return replace(reply, calls=0, prompt_tokens=0, completion_tokens=0, seconds=0.0)


def recorded_only(cache: ReplyCache | None, batch_known: Mapping[str, Entry], key: Callable[[Request], str]) -> Any:
    """An `ask` for `Batch.serve_known`: answers from what is recorded, KeyError for the rest."""

    def ask(request: Request) -> Asked:
        wanted = key(request)
        entry = batch_known.get(wanted) or entry_of(cache, wanted)
        if entry.reply is None:
            raise KeyError(wanted)
        return recorded(wanted, entry)

    return ask


def chat(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as servers and chat templates take them."""
    return [{"role": message.role, "content": message.text} for message in messages]
