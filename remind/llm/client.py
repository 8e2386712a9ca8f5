"""Chat models behind an OpenAI-compatible server: many requests at once, tried again where that can help."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from remind.core.errors import ConfigError, ModelError
from remind.llm.batch import Asked, Batch, chat, entry_of, key_of, recorded, recorded_only, settle
from remind.llm.cache import Entry, ReplyCache, Spent, spent_on
from remind.llm.endpoints import OPENAI, EndpointConfig
from remind.llm.ledger import Ledger, Payment
from remind.llm.request import Reply, Request
from remind.llm.retry import PATIENCE, Trouble, clean, of_status, wait

#: Tries for a server that was never reached.
_FIRST_CONTACT = 3
#: Seconds between looks at a request that another process is asking, at first and at most.
_LOOK = (0.1, 1.0)
#: Headers that say how a body is sent, and the one by which the package openai knows how to read the reply.
_TRANSPORT = ("accept-encoding", "connection", "content-length", "transfer-encoding", "x-stainless-raw-response")


class OpenAIChat:
    """A `ChatModel` on the `openai` package.

    Threads may share it; `endpoint.concurrency` holds over all of them.

    Args:
        endpoint: which model, where, and with what limits.
        cache: replies that were paid for; None: every request is asked.
        ledger: where costs are counted.

    Raises:
        ConfigError: the endpoint is a local one, names no model, or holds a value out of range.
        ModelError: no key in the environment, or the package openai is missing.
    """

    def __init__(self, endpoint: EndpointConfig, cache: ReplyCache | None = None, ledger: Ledger | None = None) -> None:
        endpoint.check()
        if endpoint.local or not endpoint.model:
            raise ConfigError("a chat server needs base_url and model")
        self.endpoint, self.cache, self.ledger = endpoint, cache, ledger
        self._key = _key(endpoint)
        self._client = _client(endpoint, self._key)
        self._places = threading.BoundedSemaphore(endpoint.concurrency)
        self._reached = False
        self._rng = random.Random()

    @property
    def name(self) -> str:
        return self.endpoint.identity

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        """A reply for each request, in order.

        Requests with the same words are asked once, whatever their temperature. What the cache holds comes first. A
        reply is committed to the cache before it is given out.

        Raises:
            ModelError: the server cannot be reached at all.
            DataError: the cache cannot be written.
        """
        batch = Batch(requests, self.endpoint, self.cache, self.ledger, on_reply)
        open_ = batch.serve_known(recorded_only(self.cache, batch.known, self._key_of))
        if not open_:
            return batch.done()
        stop = threading.Event()

        def work(index: int) -> None:
            batch.put(index, *settle(batch.requests[index], lambda request: self._ask(request, stop)))

        with ThreadPoolExecutor(min(len(open_), self.endpoint.concurrency), "chat") as pool:
            futures = [pool.submit(work, index) for index in open_]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                # what is under way is waited for, since it is paid for; what is not yet sent never will be
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return batch.done()

    def _key_of(self, request: Request) -> str:
        return key_of(request, self.endpoint)

    def _ask(self, request: Request, stop: threading.Event) -> Asked:
        """One exchange: from the cache, or from another process that asks the same, or from the server."""
        key = self._key_of(request)
        if self.cache is None:
            with self._places:
                reply = self._tries(request, stop)
            return Asked(reply, Payment(key, spent_on(reply), Spent()), False)
        before = entry_of(self.cache, key)
        pause = _LOOK[0]
        while before.reply is None:
            # the place is taken first: a lease without one would keep others waiting for nothing
            with self._places:
                found = self.cache.claim(key)
                if found is True:
                    return self._pay(request, key, before, stop)
            if found is False and stop.wait(pause):
                raise _Stopped
            pause = min(1.5 * pause, _LOOK[1])
            before = entry_of(self.cache, key)
        return recorded(key, before)

    def _pay(self, request: Request, key: str, before: Entry, stop: threading.Event) -> Asked:
        assert self.cache is not None
        reply = None
        try:
            reply = self._tries(request, stop)
            if reply.failure is None:
                self.cache.put(key, reply, self.endpoint.title, request.stage)
        finally:
            if reply is None or reply.failure is not None:
                self.cache.release(key, Spent() if reply is None else spent_on(reply))
        return Asked(reply, Payment(key, spent_on(reply), before.spent), False)

    def _tries(self, request: Request, stop: threading.Event) -> Reply:
        """Try until there is a reply, or no more tries, or none that could help."""
        body = self._body(request)
        started, calls, tries = time.monotonic(), 0, 0
        while True:
            if stop.is_set():
                raise _Stopped
            tries += 1
            try:
                reply = self._try(body)
                return replace(reply, calls=calls + 1, seconds=time.monotonic() - started)
            except Trouble as error:
                trouble = error
            calls += trouble.reached
            self._reached = self._reached or trouble.reached
            last = tries > self.endpoint.retries
            if trouble.again and not self._reached and (last or tries >= _FIRST_CONTACT):
                raise ModelError(f"{self.endpoint.base_url}: {trouble.message}; is the server running?")
            if last or not trouble.again:
                break
            if trouble.after is not None and trouble.after > PATIENCE:
                trouble.message += f" (it asks to wait {trouble.after:.0f} s)"
                break
            if stop.wait(wait(tries, trouble.after, self._rng)):
                raise _Stopped
        message = trouble.message + (f" (after {tries} tries)" if tries > 1 else "")
        return Reply(
            "",
            seconds=time.monotonic() - started,
            calls=calls,
            failure=trouble.failure,
            message=message,
            finished=False,
        )

    def _body(self, request: Request) -> dict[str, Any]:
        """The JSON that is sent."""
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": chat(request.messages),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
        }
        if self.endpoint.structured and request.schema is not None:
            schema = {"name": request.stage, "schema": dict(request.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {name: value for name, value in {**body, **self.endpoint.extra_body}.items() if value is not None}

    def _try(self, body: Mapping[str, Any]) -> Reply:
        """One HTTP request. Raises Trouble."""
        import openai

        further = {name: value for name, value in body.items() if name not in ("model", "messages")}
        deadline = time.monotonic() + self.endpoint.timeout
        try:
            # streamed, so that a server which drips its reply cannot hold a try beyond its time
            with self._client.chat.completions.with_streaming_response.create(
                model=body["model"], messages=body["messages"], extra_body=further
            ) as response:
                self._reached = True
                content = b""
                for piece in response.iter_bytes():
                    content += piece
                    if time.monotonic() > deadline:
                        raise self._trouble(f"no whole reply within {self.endpoint.timeout:g} s")
        except Trouble:
            raise
        except openai.APIStatusError as error:
            raise of_status(error.status_code, error.body, error.response.headers, self._key) from None
        except openai.APITimeoutError as error:
            reached = type(error.__cause__).__name__ != "ConnectTimeout"
            raise self._trouble(f"no reply within {self.endpoint.timeout:g} s", reached) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            reached = type(cause).__name__ != "ConnectError"
            raise self._trouble(f"connection failed: {cause}", reached) from None
        except (UnicodeError, TypeError) as error:  # a lone surrogate in the text, a value JSON has no word for
            raise Trouble("refused", clean(f"the request cannot be sent: {error}", self._key), reached=False) from None
        except Exception as error:  # while the body is read the transport's own errors come through
            raise self._trouble(f"the reply broke off: {type(error).__name__}: {error}") from None
        return self._read(content)

    def _read(self, content: bytes) -> Reply:
        """The reply in a body. Raises Trouble where it is none."""
        try:
            data = json.loads(content)
            choice = data["choices"][0]
            text = choice["message"].get("content")
            if isinstance(text, list):
                text = "".join(part.get("text") or "" for part in text)
            usage = data.get("usage") or {}
            counts = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
            # null: all room was spent on thinking, or a filter struck
            if text is not None and not isinstance(text, str):
                raise TypeError
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise self._trouble("the reply is not a chat completion") from None
        if self._key and len(self._key) >= 6:
            text = (text or "").replace(self._key, "[key]")
        # a lone surrogate, which JSON can spell, could be written to no file
        text = (text or "").encode("utf-8", "replace").decode("utf-8")
        return Reply(text, None, counts[0], counts[1], choice.get("finish_reason") != "length")

    def _trouble(self, message: str, reached: bool = True) -> Trouble:
        return Trouble("server", clean(message, self._key), again=True, reached=reached)


class _Stopped(Exception):
    """Another request ended the whole call."""


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


def _client(endpoint: EndpointConfig, key: str | None) -> Any:
    try:
        import openai
    except ImportError:
        raise ModelError("chat servers need the package openai: pip install 'remind-toolkit[llm]'") from None
    # servers without keys still want the header
    key = key or "none"
    fixed = {
        "accept": "application/json",
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "user-agent": f"OpenAI/Python {openai.__version__}",
    }

    def settle_headers(request: Any) -> None:
        # the package adds what it finds in the environment (OPENAI_ORG_ID, OPENAI_PROJECT_ID, OPENAI_CUSTOM_HEADERS)
        # and tells of the machine; whatever it may take up some day, these are all that a server gets
        kept = {name: request.headers[name] for name in _TRANSPORT if name in request.headers}
        request.headers.clear()
        request.headers.update({"host": request.url.netloc.decode("ascii"), **kept, **fixed})

    # a redirect would take the prompt to a host that nobody named
    http = openai.DefaultHttpxClient(
        follow_redirects=False, timeout=endpoint.timeout, event_hooks={"request": [settle_headers]}
    )
    return openai.OpenAI(
        base_url=endpoint.base_url, api_key=key, timeout=endpoint.timeout, max_retries=0, http_client=http
    )
