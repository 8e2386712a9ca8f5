"""Chat models: what all of them share, those behind an OpenAI-compatible server, and the chat models of a run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from remind.core.errors import ConfigError, ModelError
from remind.llm.cache import ReplyCache
from remind.llm.endpoints import OPENAI, EndpointConfig, LLMConfig
from remind.llm.ledger import Ledger
from remind.llm.request import ChatModel, Reply, ReplyFailure, Request, Stage
from remind.llm.structured import NotValid, read_value, repair

#: Called with each reply as it comes, which has its request's cache key.
Put = Callable[[Reply], None]

#: Goes into every cache key; raised when keys get another meaning.
_KEYS = 1
#: So many requests of a run that fail alike before any was answered end it.
_ALIKE = 5
#: Longest wait in seconds before a broken reply is asked for again.
_LONGEST_WAIT = 8.0
#: Headers of the client that a server gets. It adds what it finds in the environment (OPENAI_ORG_ID, OPENAI_PROJECT_ID,
#: OPENAI_CUSTOM_HEADERS) and describes the machine; by the last of these it knows how to give the response out.
_HEADERS = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "content-type", "x-stainless-raw-response"}
)
#: More tokens than one request can take.
_MOST_TOKENS = 10**9
#: How servers say that prompt and answer do not fit the model: vLLM, SGLang, llama.cpp, TGI, OpenAI, Gemini, Claude.
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|max_model_len|prompt is too long|input is too long|too many input tokens"
    r"|maximum number of (input )?tokens|max_total_tokens|inputs.{0,20}tokens.{0,40}must be <="
    r"|exceeds? the maximum allowed (input|prompt)",
    re.IGNORECASE,
)
_TOO_LONG_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
#: How they say that they cannot hold a model to a schema.
_NO_SCHEMA = re.compile(r"response_?\s?format|json_?\s?schema|structured|grammar|guided", re.IGNORECASE)


class CachedChat(ABC):
    """Base of the chat models: equal requests asked once, recorded replies, costs, JSON and its repair.

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
        self.endpoint, self.cache, self.ledger = endpoint, cache, ledger or Ledger()

    @property
    def name(self) -> str:
        """Identifies endpoint and model, without any key."""
        return self.endpoint.identity

    @abstractmethod
    def ask(self, asked: Mapping[str, Request], put: Put) -> None:
        """Have the reply to each request, given by cache key, and `put` it, from one thread at a time."""

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        """A reply for each request, in order; errors as in `ChatModel`, and DataError for the cache.

        Requests with the same words are asked once. A reply is committed to the cache before it is given out. One that
        does not fit its request's schema is asked for once more, with the reason.
        """
        own = {"max_tokens": self.endpoint.max_tokens, "temperature": self.endpoint.temperature}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        pending = {place: replace(request, **given) for place, request in enumerate(requests)}
        made: dict[int, list[Reply]] = {place: [] for place in pending}
        replies: dict[int, Reply] = {}
        while pending:
            equal: dict[str, list[int]] = {}
            for place, request in pending.items():
                equal.setdefault(self.key_of(request), []).append(place)
            asked, again = pending, dict[int, Request]()

            def put(reply: Reply, equal: Any = equal, asked: Any = asked, again: Any = again) -> None:
                for place in equal[reply.key]:
                    request = asked[place]
                    made[place].append(reply)
                    whole, reason = _joined(request, made[place])
                    repaired = len(made[place]) > 1 or not reason
                    self.ledger.add(request, reply, self.endpoint, whole.failure if repaired else None)
                    # only the first of equal requests was asked
                    reply = replace(reply, cached=True)
                    if not repaired:
                        again[place] = replace(request, messages=(*request.messages, *repair(whole.text, reason)))
                        continue
                    replies[place] = whole
                    if on_reply is not None:
                        on_reply(place, whole)

            self.ask({key: asked[places[0]] for key, places in equal.items()}, put)
            pending = again
        return [replies[place] for place in range(len(requests))]

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
                schema = {"name": request.stage, "schema": dict(request.schema), "strict": True}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {name: value for name, value in {**body, **endpoint.extra_body}.items() if value is not None}

    def recorded(self, request: Request) -> Reply | None:
        """The reply that the cache holds, with what it cost then."""
        key, matches = self._identity(request)
        reply = None if self.cache is None else self.cache.get(key)
        if reply is None:
            return None
        for text, stand_in in matches.items():
            reply = replace(reply, text=reply.text.replace(stand_in, text))
        return replace(reply, key=key, cached=True)

    def record(self, request: Request, reply: Reply) -> Reply:
        """The reply that has just been made, committed to the cache unless it failed or a server cut it off."""
        key, matches = self._identity(request)
        if self.cache is not None and reply.failure is None and (reply.finished or self.endpoint.local):
            kept = reply.text
            # longest first: one match may be part of another
            for text in sorted(matches, key=len, reverse=True):
                kept = kept.replace(text, matches[text])
            self.cache.put(key, replace(reply, text=kept), self.endpoint.title, request.stage)
        return replace(reply, key=key)

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


def _joined(request: Request, made: Sequence[Reply]) -> tuple[Reply, str]:
    """What a reply and its repair, if there was one, amount to; and why they do not fit the request's schema."""
    now = [one for one in made if not one.cached]
    reply = replace(
        made[-1],
        key="",
        prompt_tokens=sum(one.prompt_tokens for one in made),
        completion_tokens=sum(one.completion_tokens for one in made),
        seconds=sum((one.seconds for one in now), 0.0),
        calls=sum(one.calls for one in now),
        usage_known=all(one.usage_known for one in made),
        cached=not now and made[-1].failure is None,
    )
    if request.schema is None or made[0].failure is not None:
        return reply, ""
    try:
        if reply.failure is not None:
            raise NotValid(f"{reply.message}, when it was to be repaired")
        return replace(reply, value=read_value(reply.text, request.schema, reply.finished)), ""
    except NotValid as error:
        text = reply.text or made[0].text
        return replace(reply, text=text, failure="invalid", message=f"{error} (after one repair)"), str(error)


class OpenAIChat(CachedChat):
    """A `ChatModel` on the `openai` package, whose client waits and retries: with jitter, and as Retry-After says.

    Threads may share it; `endpoint.concurrency` holds over all of them.

    Raises:
        ConfigError: the endpoint is a local one, names no model, or holds a value out of range.
        ModelError: no key in the environment.
    """

    def __init__(self, endpoint: EndpointConfig, cache: ReplyCache | None = None, ledger: Ledger | None = None) -> None:
        super().__init__(endpoint, cache, ledger)
        if endpoint.local:
            raise ConfigError("a chat server needs base_url and model")
        import openai

        self._key = _key(endpoint)
        self._places = threading.BoundedSemaphore(endpoint.concurrency)
        self._reached = False
        self._no_schema: set[str] = set()  # stages whose schema the server refuses
        # what the first requests failed by; None once one was answered
        self._failures: list[str] | None = []
        # of the request that a thread has under way: whether to stop, its tries, and when the last one began
        self._call = threading.local()
        http = openai.DefaultHttpxClient(
            follow_redirects=False,  # the prompt would go to a host that nobody named
            timeout=endpoint.timeout,
            event_hooks={"request": [self._sending]},
        )
        options: dict[str, Any] = {"api_key": self._key or "none", "http_client": http, "timeout": endpoint.timeout}
        self._client = openai.OpenAI(base_url=endpoint.base_url, **options)

    def ask(self, asked: Mapping[str, Request], put: Put) -> None:
        """Ask for all of them, as many at once as the endpoint allows; one that cannot go on ends the whole call."""
        stop = threading.Event()
        with ThreadPoolExecutor(self.endpoint.concurrency, "chat") as pool:
            futures = [pool.submit(self._exchange, request, stop) for request in asked.values()]
            try:
                for future in as_completed(futures):
                    self._note(future.result())
                    put(future.result())
            except BaseException:
                # what is under way is waited for, since it is paid for; what is not yet sent never will be
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _exchange(self, request: Request, stop: threading.Event) -> Reply:
        """The reply that is recorded, or the server's, while no other thread or process asks the same."""
        if recorded := self.recorded(request):
            return recorded
        with self._places:
            if self.cache is None:
                return self.record(request, self._send(request, stop))
            with self.cache.claim(self.key_of(request)):
                return self.recorded(request) or self.record(request, self._send(request, stop))

    def _note(self, reply: Reply) -> None:
        """Raise ModelError where the first requests all fail alike: thousands of others would, too."""
        if reply.failure is None and not reply.cached:
            self._failures = None
        elif reply.failure is not None and self._failures is not None and reply.failure != "too_long":
            self._failures.append(reply.message)
            alike = {re.sub(r"\S*\d\S*", "", message) for message in self._failures}
            if len(self._failures) >= _ALIKE and len(alike) == 1:
                raise ModelError(
                    f"the first {_ALIKE} requests to {self.endpoint.title} all failed alike: {reply.message}"
                )

    def _send(self, request: Request, stop: threading.Event) -> Reply:
        """The server's reply after as many tries as it takes and the endpoint allows, or what the last one said."""
        started, call, retries = time.monotonic(), self._call, self.endpoint.retries
        call.stop, call.tries = stop, 0
        while True:
            reply, again = self._try(request, retries - call.tries)
            if not again or call.tries > retries:
                break
            time.sleep(min(_LONGEST_WAIT, 0.5 * 2**call.tries))
        if reply.failure is not None and call.tries > 1:
            reply = replace(reply, message=f"{reply.message} (after {call.tries} tries)")
        return replace(reply, calls=call.tries, seconds=time.monotonic() - started)

    def _try(self, request: Request, retries: int) -> tuple[Reply, bool]:
        """A reply, and whether to ask again; what the client can tell to be worth it, it has asked again itself."""
        import openai

        body = self.body(request)
        if request.body is None and request.stage in self._no_schema:
            body.pop("response_format", None)
        client = self._client.with_options(max_retries=max(0, retries))
        try:
            with client.chat.completions.with_streaming_response.create(
                model=self.endpoint.model, messages=body["messages"], extra_body=body
            ) as response:
                self._reached = True
                return self._received(response.iter_bytes(), whole=request.body is not None)
        except openai.APIStatusError as error:
            self._reached = True
            failure, message = failure_of(error.status_code, self._without_key(error.response.text))
            refused = request.body is None and "response_format" in body and _NO_SCHEMA.search(message)
            if failure == "refused" and refused:
                self._no_schema.add(request.stage)
                return self._try(request, retries)
            return _failed(failure, message), False
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            if not self._reached and "Connect" in type(cause).__name__:
                place = self.endpoint.base_url
                raise ModelError(f"{place}: connection failed: {cause}; is the server running?") from None
            return self._broken(cause), False
        except (UnicodeError, TypeError) as error:  # a lone surrogate in the text, a value JSON has no word for
            return _failed("refused", f"the request cannot be sent: {error}"), False

    def _received(self, pieces: Iterator[bytes], whole: bool) -> tuple[Reply, bool]:
        """The reply in a body of status 200, failures included, and whether to ask again."""
        content = bytearray()
        try:
            for piece in pieces:
                content += piece
                # the client's own limit is on each read
                if time.monotonic() > self._call.began + self.endpoint.timeout:
                    raise TimeoutError
        except Exception as error:  # httpx's or its successor's, whichever the client is built on
            return self._broken(error), True
        try:
            data = json.loads(self._without_key(content.decode("utf-8", "replace")))
            return _reply(data, json.dumps(data) if whole else "")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return _failed("server", "the reply is not a chat completion"), True

    def _broken(self, error: BaseException) -> Reply:
        if "Timeout" in type(error).__name__:
            return _failed("server", f"no whole reply within {self.endpoint.timeout:g} s")
        return _failed("server", f"no reply: {error or type(error).__name__}")

    def _sending(self, request: Any) -> None:
        """Before each try: count it, and send no header but those that a server needs."""
        if self._call.stop.is_set():
            raise _Stopped
        self._call.tries += 1
        self._call.began = time.monotonic()
        for name in set(request.headers) - _HEADERS:
            del request.headers[name]
        request.headers["host"] = request.url.netloc.decode("ascii")
        request.headers["authorization"] = f"Bearer {self._key or 'none'}"  # servers without keys still want the header

    def _without_key(self, text: str) -> str:
        # in JSON, too, where a quote or a backslash of the key is escaped
        if self._key is None or len(self._key) < 6:
            return text
        return text.replace(self._key, "[key]").replace(json.dumps(self._key)[1:-1], "[key]")


class _Stopped(BaseException):
    """Another request ended the whole call. No `Exception`, which the client might retry."""


def failure_of(status: int, body: str) -> tuple[ReplyFailure, str]:
    """What an HTTP status and its body mean for a request, and the same in words; "server" alone may pass."""
    # redirects are not followed, and where one leads to is no part of the message: it may hold a query
    if 300 <= status < 400:
        return "refused", f"HTTP {status}: the server sends requests elsewhere; name that address as base_url"
    # servers quote the key, masked, when they refuse it
    if status == 401:
        return "refused", "HTTP 401: the server refuses the key"
    codes, said = _said(body)
    message = f"HTTP {status}" + (f": {said}" if said else "")
    too_long = not _TOO_LONG_CODES.isdisjoint(codes)
    # some servers answer a prompt that does not fit with 500
    if status == 413 or (status in (400, 422) and (too_long or _TOO_LONG.search(said))) or (status == 500 and too_long):
        return "too_long", message
    # where the quota is spent no wait helps
    passing = status in (408, 409, 429) and "insufficient_quota" not in codes
    return "server" if passing or status >= 500 else "refused", message


def _reply(data: Any, whole: str) -> tuple[Reply, bool]:
    """The reply in a chat completion, and whether to ask again. Raises where it is none."""
    choices = data.get("choices")
    choice = choices[0] if choices else data
    if error := choice.get("error"):
        code = error.get("code") if isinstance(error, dict) else None
        status = int(str(code)) if str(code).isdigit() else 400
        failure, message = failure_of(status, json.dumps({"error": error}))
        return _failed(failure, message.removeprefix("HTTP 400: ")), failure == "server"
    if choices == []:
        return _failed("server", "the reply has no choices"), True
    said, reason = choice["message"], str(choice.get("finish_reason")).lower()
    text = said.get("content")
    if isinstance(text, list):
        text = "".join(part.get("text") or "" for part in text)
    if text is not None and not isinstance(text, str):
        raise TypeError
    if reason == "error":
        return _failed("server", "the server ended the reply with an error (finish_reason error)"), True
    if refusal := said.get("refusal"):
        return _failed("refused", f"the model refuses: {refusal}"), False
    if reason == "content_filter":
        return _failed("refused", "the server's filter ended the reply (finish_reason content_filter)"), False
    usage = data.get("usage")
    finished = reason not in ("length", "max_tokens")
    spent = _usage(usage if isinstance(usage, dict) else {})
    if not (text or "").strip() and not (whole and said.get("tool_calls")):
        if not finished:
            why = f"the reply is empty: all its room went into thinking (finish_reason {reason})"
            return replace(_failed("invalid", why), **spent), False
        return replace(_failed("server", f"the reply is empty (finish_reason {reason})"), **spent), True
    # a lone surrogate, which JSON can spell, could be written to no file
    text = (whole or str(text)).encode("utf-8", "replace").decode("utf-8")
    return Reply(text, finished=finished, **spent), False


def _usage(counts: Any) -> dict[str, Any]:
    """The fields of a reply for the counts that a server gives, whatever they are."""
    prompt, completion = counts.get("prompt_tokens"), counts.get("completion_tokens")
    known = all(type(one) in (int, float) and 0 <= one <= _MOST_TOKENS and one % 1 == 0 for one in (prompt, completion))
    return {"prompt_tokens": prompt, "completion_tokens": completion} if known else {"usage_known": False}


def _failed(failure: ReplyFailure, message: str) -> Reply:
    return Reply("", finished=False, failure=failure, message=" ".join(message.split())[:300])


def _said(body: str) -> tuple[set[str], str]:
    """Codes and message of an error body, in any of the shapes that servers use."""
    try:
        error = json.loads(body)
    except (ValueError, RecursionError):
        return set(), "" if "<html" in body.lower() else body
    if isinstance(error, dict):
        error = error.get("error", error)
    if not isinstance(error, dict):
        return set(), str(error or "")
    return {str(error.get("code")), str(error.get("type"))}, str(error.get("message") or error.get("detail") or "")


def _key(endpoint: EndpointConfig) -> str | None:
    if not endpoint.needs_key:
        return None
    key = os.environ.get(endpoint.key_env or "", "").strip()
    if not key:
        where = "" if endpoint.base_url == OPENAI else f" for {endpoint.base_url}"
        raise ModelError(f"no key{where}: set the environment variable {endpoint.key_env}")
    if not key.isascii() or not key.isprintable():
        raise ModelError(f"the key in {endpoint.key_env} holds a character no key has; is it cut or quoted wrongly?")
    return key


class Chats:
    """The chat models of a run, one per endpoint, opened when first asked for; they share cache and ledger.

    Attributes:
        ledger: what was asked and what it cost; in a dry run what it would cost.
        dry: the dry run, if this is one.
    """

    def __init__(self, cfg: LLMConfig, ledger: Ledger | None = None) -> None:
        from remind.llm.dry import DryRun

        self.cfg, self.ledger = cfg, ledger or Ledger()
        self.dry = None if cfg.dry_run is None else DryRun(cfg.dry_run, self.ledger)
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
            model = OpenAIChat(endpoint, self._cache, self.ledger)
        self._open.append((endpoint, model))
        return model
