"""Chat models behind an OpenAI-compatible server: many requests at once, retried where that can help."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from remind.core.errors import ConfigError, ModelError
from remind.llm.cache import ReplyCache
from remind.llm.chat_models import CachedChat, NotRecorded, Put
from remind.llm.endpoints import OPENAI, EndpointConfig
from remind.llm.ledger import Exchange, Ledger
from remind.llm.request import Reply, ReplyFailure, Request, usage
from remind.llm.transport import Limits, Refused, limit

#: Seconds between looks at a request that another thread or process is asking.
_POLL = 0.2
#: Headers that say how a body is sent.
_TRANSPORT = ("connection", "content-length", "transfer-encoding")
#: Statuses besides 5xx that may pass, and that the package openai retries: time-out, conflict, too many requests.
_PASSING = frozenset({408, 409, 429})
#: How servers say that prompt and answer do not fit the model: vLLM, SGLang, llama.cpp, TGI, OpenAI, Gemini, Claude.
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|max_model_len|prompt is too long|input is too long|too many input tokens"
    r"|maximum number of (input )?tokens|max_total_tokens|inputs.{0,20}tokens.{0,40}must be <="
    r"|exceeds? the maximum allowed (input|prompt)",
    re.IGNORECASE,
)
_TOO_LONG_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
#: A key a server quotes back, masked or not.
_KEY = re.compile(r"\b(?:sk|pk|key|hf|gsk|xai)[-_][\w*.…-]{6,}|\bBearer\s+\S+", re.IGNORECASE)


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
        self._key = _key(endpoint)
        self._places = threading.BoundedSemaphore(endpoint.concurrency)
        self._reached = False
        # of the request that a thread has under way: stop, tries and the reply to the last one
        self._call = threading.local()
        self._client, self._http = self._open()

    def ask(self, requests: Sequence[Request], missing: Sequence[int], put: Put) -> None:
        """Ask all of them, as many at once as the endpoint allows; one that cannot go on ends the whole call."""
        stop = threading.Event()
        with ThreadPoolExecutor(self.endpoint.concurrency, "chat") as pool:
            futures = [pool.submit(put, index, partial(self._exchange, stop)) for index in missing]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                # what is under way is waited for, since it is paid for; what is not yet sent never will be
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _exchange(self, stop: threading.Event, request: Request) -> Exchange:
        """One exchange: with the server, unless another thread or process has asked the same before or does so now."""
        key = self.key_of(request)
        if self.cache is None:
            with self._places:
                return Exchange(key, self._send(request, stop))
        while True:
            # the place is taken first: a claim without one would keep others waiting for nothing
            with self._places, self.cache.claim(key) as mine:
                if mine:
                    try:
                        return self.recorded(request)
                    except NotRecorded:
                        return self.record(request, self._send(request, stop))
            if stop.wait(_POLL):
                raise _Stopped

    def _send(self, request: Request, stop: threading.Event) -> Reply:
        """The server's reply after as many tries as it takes and the endpoint allows, or what the last one said."""
        import openai

        self._call.stop, self._call.tries, self._call.whole = stop, 0, request.body is not None
        started = time.monotonic()
        try:
            with suppress(openai.APIStatusError):
                self._client.post("/chat/completions", body=self.body(request), cast_to=self._http.Response)
            reply = self._call.reply
        except openai.APIConnectionError as error:
            reply = self._unanswered(error.__cause__ or error)
        except Refused as error:
            reply = self._failed("refused", str(error))
        except (UnicodeError, TypeError) as error:  # a lone surrogate in the text, a value JSON has no word for
            reply = self._failed("refused", f"the request cannot be sent: {error}")
        tries = self._call.tries
        if reply.failure is not None and tries > 1:
            reply = replace(reply, message=f"{reply.message} (after {tries} tries)")
        return replace(reply, calls=tries, seconds=time.monotonic() - started)

    def _open(self) -> tuple[Any, Any]:
        """The client, and the HTTP package that it is built on: httpx2, or httpx in older versions."""
        import openai

        endpoint, call = self.endpoint, self._call
        key = self._key or "none"  # servers without keys still want the header
        package = sys.modules[openai.DefaultHttpxClient.__bases__[0].__module__]
        limits = Limits(package.ReadTimeout)
        headers = {
            "accept": "application/json",
            "accept-encoding": "identity",  # what is small on the wire may be huge
            "authorization": f"Bearer {key}",
            "content-type": "application/json",
            "user-agent": f"OpenAI/Python {openai.__version__}",
        }

        def on_request(request: Any) -> None:
            if call.stop.is_set():
                raise _Stopped
            call.tries += 1
            limits.start(endpoint.timeout)
            # the package adds what it finds in the environment (OPENAI_ORG_ID, OPENAI_PROJECT_ID,
            # OPENAI_CUSTOM_HEADERS) and describes the machine; these are all that a server gets
            transport = {name: request.headers[name] for name in _TRANSPORT if name in request.headers}
            request.headers.clear()
            request.headers.update({"host": request.url.netloc.decode("ascii"), **transport, **headers})

        def on_response(response: Any) -> None:
            self._reached = True
            http.cookies.clear()  # a server could fill the memory with them
            response.encoding = "utf-8"  # a server could name a codec that takes hours
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise Refused(f"HTTP {response.status_code}: the reply is compressed, which was not asked for")
            response.read()
            try:
                call.reply = self._read(response)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                # an error of the connection, which the client retries
                raise package.RemoteProtocolError("the reply is not a chat completion") from None
            if call.reply.failure not in (None, "server"):
                response.headers["x-should-retry"] = "false"

        http = openai.DefaultHttpxClient(
            follow_redirects=False,  # the prompt would go to a host that nobody named
            timeout=endpoint.timeout,
            event_hooks={"request": [on_request], "response": [on_response]},
        )
        limit(http, limits)
        options: dict[str, Any] = {"base_url": endpoint.base_url, "api_key": key, "http_client": http}
        return openai.OpenAI(timeout=endpoint.timeout, max_retries=endpoint.retries, **options), package

    def _read(self, response: Any) -> Reply:
        """The reply in an HTTP response, failures included. Raises where a body is no chat completion."""
        if not response.is_success:
            refusal = {"status": response.status_code, **self._details(response.text)}
            failed = self._failed(*failure_of(response.status_code, response.text, response.headers))
            return replace(failed, refusal=refusal)
        # Python refuses integers of thousands of digits
        data = json.loads(response.content, parse_int=lambda digits: int(digits) if len(digits) < 20 else float(digits))
        choice = data["choices"][0]
        text = choice["message"].get("content")
        if isinstance(text, list):
            text = "".join(part.get("text") or "" for part in text)
        # null: all room was spent on thinking, or a filter struck
        if text is not None and not isinstance(text, str):
            raise TypeError
        counts = data.get("usage")
        counts = counts if isinstance(counts, dict) else {}
        spent = usage(counts.get("prompt_tokens"), counts.get("completion_tokens"))
        if self._call.whole:
            text = json.dumps(data)
        # a lone surrogate, which JSON can spell, could be written to no file
        text = self._without_key(text or "").encode("utf-8", "replace").decode("utf-8")
        return Reply(text, finished=choice.get("finish_reason") != "length", **spent)

    def _unanswered(self, error: BaseException) -> Reply:
        """The failure where no try was answered. Raises ModelError where no server was ever reached."""
        kind = type(error).__name__
        if not self._reached and kind in ("ConnectError", "ConnectTimeout"):
            raise ModelError(f"{self.endpoint.base_url}: connection failed: {error}; is the server running?") from None
        if kind.endswith(("Timeout", "TimeoutError")):
            return self._failed("server", f"no whole reply within {self.endpoint.timeout:g} s")
        return self._failed("server", f"no reply: {error or kind}")

    def _failed(self, failure: ReplyFailure, message: str) -> Reply:
        return Reply("", finished=False, failure=failure, message=self._clean(message)[:300])

    def _details(self, body: str) -> dict[str, str | None]:
        """What an error body in OpenAI's form says beside its message."""
        try:
            error = json.loads(body)["error"]
            given = {name: error.get(name) for name in ("type", "param", "code")}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            given = dict.fromkeys(("type", "param", "code"))
        return {name: None if value is None else self._clean(str(value))[:100] for name, value in given.items()}

    def _clean(self, text: str) -> str:
        """On one line, and without keys."""
        return _KEY.sub("[key]", " ".join(self._without_key(text).split()))

    def _without_key(self, text: str) -> str:
        if not self._key or len(self._key) < 6:
            return text
        # in JSON, too, where a quote or a backslash of the key is escaped
        return text.replace(self._key, "[key]").replace(json.dumps(self._key)[1:-1], "[key]")


class _Stopped(BaseException):
    """Another request ended the whole call. No `Exception`, which the client might retry."""


def failure_of(status: int, body: str, headers: Mapping[str, str]) -> tuple[ReplyFailure, str]:
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
    # the quota is spent: no wait helps
    if status == 429 and "insufficient_quota" in codes:
        return "refused", message
    if status in _PASSING or status >= 500:
        after = headers.get("retry-after")
        return "server", message + (f" (Retry-After: {after} s)" if after else "")
    return "refused", message


def _said(body: str) -> tuple[set[str], str]:
    """Codes and message of an error body in any of the shapes servers use."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return set(), "" if "<html" in body.lower() else body
    error = data.get("error", data) if isinstance(data, dict) else None
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
