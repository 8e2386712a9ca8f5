"""Chat models, behind an OpenAI-compatible server, in this process, or of a dry run; replies that were paid for; and
the chat models of a run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from remind.core.errors import DataError, ModelError
from remind.core.files import sha256_json, write_text
from remind.core.progress import warn
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.ledger import Ledger, table
from remind.llm.request import ChatModel, Message, Put, Reply, ReplyFailure, Request, Stage, completion, folded
from remind.llm.structured import NotValid, placeholder, read_value
from remind.text.thoughts import without_thoughts

if TYPE_CHECKING:
    from remind.models.generate import Generation


#: Seconds to wait for the file while another process writes.
_BUSY = 30.0
_TABLE = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, endpoint TEXT NOT NULL, stage TEXT NOT NULL, text TEXT NOT NULL, finished INTEGER NOT NULL,
    calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL,
    made REAL NOT NULL
) WITHOUT ROWID
"""


class ReplyCache:
    """Replies that were paid for, in one SQLite table that outlives a killed process.

    Threads, processes and forks may share it: each operation opens a connection of its own.

    Args:
        path: made with its folders if absent.

    Raises:
        DataError: the file is not such a cache, or cannot be opened or written. OSError: its folder cannot be made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as db:
            db.execute(_TABLE)

    def get(self, key: str) -> Reply | None:
        """The reply to this request, with what it cost; None: there is none."""
        columns = "text, finished, calls, prompt_tokens, completion_tokens, seconds"
        with self._open() as db:
            row: Any = db.execute(f"SELECT {columns} FROM replies WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        text, finished, calls, prompt, completion, seconds = row
        # older files have -1 where the server did not count
        return Reply(text, None, max(prompt, 0), max(completion, 0), bool(finished), seconds, calls, cached=True)

    def put(self, key: str, reply: Reply, endpoint: str, stage: str) -> None:
        """Record an answered request, committed on return. A second reply is not kept."""
        counts = (reply.calls, reply.prompt_tokens, reply.completion_tokens, reply.seconds, time.time())
        values = (key, endpoint, stage, reply.text, reply.finished, *counts)
        with self._open() as db:
            db.execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    @contextmanager
    def claim(self, key: str) -> Iterator[None]:
        """The time of the block is the caller's alone to ask for this key, over all threads and processes.

        Those who wait look for the reply first. The system frees the claim of a process that dies.
        """
        lock = self.path.with_name(f"{self.path.name}.{key[:16]}.lock")
        with FileLock(lock):
            yield
            # those who wait hold what was removed: the reply is there by now, so that nobody asks beside them
            lock.unlink(missing_ok=True)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection whose transaction is committed at the end of the block, or rolled back on an error."""
        try:
            with closing(sqlite3.connect(self.path, timeout=_BUSY)) as db, db:
                yield db
        except sqlite3.Error as error:
            hint = "" if isinstance(error, sqlite3.OperationalError) else "; name another file"
            raise DataError(f"cannot be used as a cache of replies: {error}{hint}", self.path) from None


#: Goes into every cache key; raised when keys get another meaning.
_KEYS = 1
#: So many requests of a run that fail alike before any was answered end it.
_ALIKE = 5
#: Headers of the client that a server gets. It adds what it finds in the environment (OPENAI_ORG_ID, OPENAI_PROJECT_ID,
#: OPENAI_CUSTOM_HEADERS) and describes the machine; by the last of these it knows how to give the response out.
_HEADERS = {"accept", "accept-encoding", "connection", "content-length", "content-type", "x-stainless-raw-response"}
#: How servers say that prompt and answer do not fit the model: vLLM, SGLang, llama.cpp, TGI, OpenAI, Gemini, Claude.
_TOO_LONG = (
    r"(?i)context[ _-]?(length|window|size)|max_model_len|(prompt|input) is too long|too many input tokens"
    r"|maximum (number of|allowed) (input |prompt )?tokens|inputs.{0,20}tokens.{0,40}must be <="
)
#: How they say what they do not take: schemas, a system's turn, the older name of the limit (see `OpenAIChat._fitted`).
_REFUSED = {
    "schema": r"(?i)response_?\s?format|json_?\s?schema|structured|grammar|guided",
    "system": r"(?i)system.{0,20}(role|messag|prompt)|role.{0,40}system|roles must alternate|only user and assistant",
    "max_tokens": r"(?i)use\W+max_completion_tokens",
}
#: Of errors without a code, those that may pass.
_PASSES = r"rate.?limit|overloaded|unavailable|try again"
#: Why a reply ended, as servers put it: it was cut off, withheld, or broken off.
_CUT = r"length|max_tokens|context"
_WITHHELD = r"filter|safety|sensitive|recitation|refus|prohibit|block"
_BROKEN = r"error|abort|cancel|insufficient|fail|timeout"
#: Characters per token in a dry run; English prose has about that many.
CHARACTERS = 4
#: Tokens of an image in a dry run: as many as most of our settings allow.
IMAGE_TOKENS = 256
#: The image in a message.
_PIXELS = re.compile(r"(?<=;base64,)[\w+/=]+")
#: What a free-text reply reads like in a dry run.
DRY = "(dry run: nothing was asked)"
#: More characters a token than in prose of any script, and fewer tokens than any model's context: a server that counts
#: so few of a prompt has cut it.
_CUT_BY, _LEAST_CONTEXT = 7, 1000


class CachedChat(ABC):
    """Base of the chat models: equal requests asked once, recorded replies, costs, JSON.

    Args:
        endpoint: which model, where, and with what limits.
        cache: replies that were paid for; None: every request is asked.
        ledger: where costs are counted.

    Attributes:
        weights: what else identifies the model, such as a hash of local weights.
    """

    weights = ""

    def __init__(self, endpoint: EndpointConfig, cache: ReplyCache | None = None, ledger: Ledger | None = None) -> None:
        self.endpoint, self.cache, self.ledger = endpoint, cache, ledger or Ledger()

    @property
    def name(self) -> str:
        """Identifies endpoint and model, without any key."""
        return f"{self.endpoint.identity} {self.weights}".rstrip()

    @abstractmethod
    def ask(self, asked: Sequence[Request], put: Put) -> None:
        """Have the reply to each request, and `put` it, from one thread at a time."""

    def complete(self, requests: Sequence[Request], on_reply: Put | None = None) -> list[Reply]:
        """A reply for each request, in order; errors as in `ChatModel`, and DataError for the cache.

        A reply is committed to the cache before it is given out; with a cache the same words are asked once.
        """
        place = self.endpoint
        asked = []
        for one in requests:
            room = (place.max_tokens or one.max_tokens) + place.thought_tokens
            warmth = one.temperature if place.temperature is None else place.temperature
            asked.append(replace(one, max_tokens=room, temperature=warmth))
        replies: dict[int, Reply] = {}

        def put(n: int, reply: Reply) -> None:
            schema = asked[n].schema
            reply = replace(reply, key=self.key_of(asked[n]))
            if schema is not None and reply.failure is None:
                try:
                    reply = replace(reply, value=read_value(reply.text, schema, reply.finished))
                except NotValid as error:
                    reply = replace(reply, failure="invalid", message=str(error))
            replies[n] = reply
            self.ledger.add(asked[n], reply, place)
            if on_reply is not None:
                on_reply(n, reply)

        self.ask(asked, put)
        return [replies[n] for n in range(len(asked))]

    def key_of(self, request: Request) -> str:
        """Cache key: a hash of endpoint, model, messages and everything that shapes the reply; no key of a user in it.

        Stage, sample and prompt id are not part of it: the same words are paid for once.
        """
        parts: list[Any] = [_KEYS, self.endpoint.title, self.weights]
        if request.body is not None:
            parts += ["body", self.body(request)]
        else:
            parts += [[[message.role, message.key] for message in request.messages], request.max_tokens]
            parts += [float(request.temperature), request.schema, request.schema is not None, self.endpoint.extra_body]
        # escaped: a lone surrogate in a dialogue has no bytes of its own
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def body(self, request: Request) -> dict[str, Any]:
        """The JSON that a server is sent."""
        endpoint = self.endpoint
        body = dict(request.body or {"messages": request.chat, "max_tokens": request.max_tokens})
        if request.body is not None and (endpoint.max_tokens or endpoint.thought_tokens):
            body |= {"max_tokens": request.max_tokens, "max_completion_tokens": None}
        if request.schema is not None:
            schema = {"name": request.stage, "schema": dict(request.schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        body |= {"model": endpoint.model, "temperature": request.temperature, **endpoint.extra_body}
        return {name: value for name, value in body.items() if value is not None}

    def recorded(self, request: Request) -> Reply | None:
        """The reply that the cache holds, with what it cost then."""
        return None if self.cache is None else self.cache.get(self.key_of(request))

    def record(self, request: Request, reply: Reply) -> Reply:
        """The reply that has just been made, committed to the cache unless it failed or a server cut it off."""
        if self.cache is not None and reply.failure is None and (reply.finished or self.endpoint.local):
            self.cache.put(self.key_of(request), reply, self.endpoint.title, request.stage)
        return reply


class OpenAIChat(CachedChat):
    """A `ChatModel` on the `openai` package, whose client waits and retries: with jitter, and as Retry-After says.

    Threads may share it; `endpoint.concurrency` holds over all of them.

    Raises:
        ModelError: no key in the environment.
    """

    def __init__(self, endpoint: EndpointConfig, cache: ReplyCache | None = None, ledger: Ledger | None = None) -> None:
        super().__init__(endpoint, cache, ledger)
        import openai

        self._key = _key(endpoint)
        self._pool = ThreadPoolExecutor(endpoint.concurrency, "chat")
        #: What the first requests failed by; None once one was answered.
        self._failures: list[str] | None = []
        #: Of `_REFUSED`, what the server has been found not to take.
        self._refused: set[str] = set()
        self._told = False
        hooks: Any = {"request": [self._sending], "response": [self._received]}
        # redirects: the prompt would go to a host that nobody named
        http = openai.DefaultHttpxClient(follow_redirects=False, event_hooks=hooks)
        limits: Any = {"max_retries": endpoint.retries, "timeout": endpoint.timeout}
        self._client = openai.OpenAI(api_key=self._key, base_url=endpoint.base_url, http_client=http, **limits)

    def ask(self, asked: Sequence[Request], put: Put) -> None:
        """Ask for all of them, as many at once as the endpoint allows; one that cannot go on ends the whole call."""
        futures = {self._pool.submit(self._exchange, request): place for place, request in enumerate(asked)}
        try:
            for future in as_completed(futures):
                self._note(future.result())
                put(futures[future], future.result())
        finally:
            # after an error: what is not yet sent never will be, what is under way is waited for, since it is paid for
            wait([future for future in futures if not future.cancel()])

    def _exchange(self, request: Request) -> Reply:
        """The reply that is recorded, or the server's, while no other thread or process asks the same."""
        if recorded := self.recorded(request):
            return recorded
        with nullcontext() if self.cache is None else self.cache.claim(self.key_of(request)):
            return self.recorded(request) or self._checked(request, self._send(request))

    def _checked(self, request: Request, reply: Reply) -> Reply:
        """The reply, recorded unless the server has read a part of the prompt alone, which is told once."""
        text = "".join(message.text for message in request.messages if isinstance(message.text, str))
        if not _LEAST_CONTEXT <= reply.prompt_tokens < len(text) / _CUT_BY:
            return self.record(request, reply)
        if not self._told:
            self._told = True
            what = f"{reply.prompt_tokens:,} tokens of a prompt of {len(text):,} characters"
            remedy = "raise its context (Ollama: num_ctx); replies to cut prompts are not cached"
            warn(f"{self.endpoint.title} cuts prompts without a word: it has read {what}; {remedy}")
        return reply

    def _note(self, reply: Reply) -> None:
        """Raise ModelError where the first requests all fail alike: thousands of others would, too."""
        if reply.failure is None and not reply.cached:
            self._failures = None
        elif reply.failure is not None and self._failures is not None and reply.failure != "too_long":
            self._failures.append(reply.message)
            alike = {re.sub(r"\S*\d\S*", "", message) for message in self._failures}
            if len(self._failures) >= _ALIKE and len(alike) == 1:
                why = reply.message + ("" if "/v" in self.endpoint.base_url else "; most servers are at base_url/v1")
                raise ModelError(f"the first {_ALIKE} requests to {self.endpoint.title} all failed alike: {why}")

    def _send(self, request: Request) -> Reply:
        """The server's reply, or what the last of as many tries as the endpoint allows has said."""
        import openai

        body, whole, started = self._fitted(self.body(request)), request.body is not None, time.monotonic()
        create = self._client.chat.completions.with_streaming_response.create
        try:
            with create(model=self.endpoint.model, messages=body["messages"], extra_body=body) as response:
                data, reply = response.http_response.extensions["read"]
                if whole and reply.failure is None:
                    # who asks for a whole reply reads it by rules of its own
                    if (said := without_thoughts(reply.text)) != reply.text:
                        data["choices"][0]["message"]["content"] = said
                    reply = replace(reply, text=json.dumps(data))
                elif reply.failure is None and not reply.text:
                    reply = _failed("refused", "the model calls a tool, and it was given none")
        except openai.APIStatusError as error:
            reply = failure_of(error.status_code, error.body)
            # llama.cpp says with 500 that a chat template takes no system's turn
            if reply.failure != "too_long":
                self._refused |= {name for name, words in _REFUSED.items() if re.search(words, reply.message)}
                if self._fitted(self.body(request)) != body:
                    return self._send(request)
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            if self._failures is not None and "Connect" in type(cause).__name__:
                why = f"connection failed: {cause}; is the server running?"
                raise ModelError(f"{self.endpoint.base_url}: {why}") from None
            reply = _failed("server", f"no usable reply: {cause or type(cause).__name__}")
        text, message = reply.text, reply.message
        if len(self._key) > 6:  # no word, such as the "none" of servers without keys; a server may say it back
            text, message = text.replace(self._key, "[key]"), message.replace(self._key, "[key]")
        return replace(reply, text=text, message=message[:300], calls=1, seconds=time.monotonic() - started)

    def _fitted(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body without what the server does not take, in the form that it takes instead."""
        if "schema" in self._refused:
            body.pop("response_format", None)
        if "system" in self._refused:
            body["messages"] = folded(body["messages"])
        if "max_tokens" in self._refused and "max_tokens" in body:
            body["max_completion_tokens"] = body.pop("max_tokens")
        return body

    def _sending(self, request: Any) -> None:
        """Before each try: send no header but those that a server needs."""
        for name in set(request.headers) - _HEADERS:
            del request.headers[name]
        request.headers["host"] = request.url.netloc.decode("ascii")
        request.headers["authorization"] = f"Bearer {self._key}"

    def _received(self, response: Any) -> None:
        """After each try: read the reply within the time limit. One that is broken counts as a broken connection, which
        the client repeats."""
        # what was merely accepted has no reply yet
        if not 200 <= response.status_code < 300:
            return
        # of the HTTP package that this version of the client is on
        broken = import_module(type(response).__module__.partition(".")[0]).ReadError
        content, deadline = bytearray(), time.monotonic() + self.endpoint.timeout
        for piece in response.iter_bytes():
            content += piece
            # the client's own limit is on each read
            if time.monotonic() > deadline:
                raise broken(f"nothing whole within {self.endpoint.timeout:g} s", request=response.request)
        data: Any = None
        try:
            if content.lstrip().startswith(b"<"):
                reply = _failed("refused", "a web page came in place of a reply")
            else:
                data = json.loads(content)
                reply = _reply(data)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise broken("it is not a chat completion", request=response.request) from None
        if reply.failure == "server":
            raise broken(reply.message, request=response.request)
        response.extensions["read"] = data, reply


def failure_of(status: int, body: Any) -> Reply:
    """What an HTTP status (0: there is none) and its body mean for a request; "server" alone may pass."""
    # redirects are not followed, and where one leads to is no part of the message: it may hold a query
    if 300 <= status < 400:
        return _failed("refused", f"HTTP {status}: the server sends requests elsewhere; name that address as base_url")
    # servers quote the key, masked, when they refuse it
    if status == 401:
        return _failed("refused", "HTTP 401: the server refuses the key")
    message = f"HTTP {status}: {_said(body)}".removesuffix(": ") if status else _said(body)
    # some servers answer a prompt that does not fit with 500
    if status == 413 or (status in (0, 400, 422, 500) and re.search(_TOO_LONG, str(body))):
        return _failed("too_long", message)
    return _failed("server" if status in (408, 409, 429) or status >= 500 else "refused", message)


def _reply(data: Any) -> Reply:
    """The reply in a chat completion. Raises where it is none."""
    choices = data.get("choices")
    error = choices[0].get("error") if choices else data
    if error:
        code = re.search(r"'(?:code|status)': '?(\d{3})\b", str(error))
        if not _said(error):
            raise LookupError("neither a choice nor a reason")
        if not code and re.search(_PASSES, str(error), re.IGNORECASE):
            return _failed("server", _said(error))
        return failure_of(int(code[1]) if code else 0, error)
    said, reason = choices[0]["message"], str(choices[0].get("finish_reason")).lower()
    text = said.get("content") or ""
    if isinstance(text, list):
        text = "".join(part.get("text") or "" for part in text)
    if said.get("refusal") or re.search(_WITHHELD, reason):
        return _failed("refused", f"the model refuses: {said.get('refusal') or f'finish_reason {reason}'}")
    if re.search(_BROKEN, reason):
        return _failed("server", f"the server broke the reply off (finish_reason {reason})")
    counts = data.get("usage") or {}
    prompt, completion = counts.get("prompt_tokens"), counts.get("completion_tokens")
    if not (isinstance(prompt, int) and isinstance(completion, int)):
        prompt = completion = 0
    finished = not re.search(_CUT, reason)
    if not without_thoughts(text).strip() and not said.get("tool_calls"):
        thought = text.strip() or said.get("reasoning_content") or said.get("reasoning")
        why = f"the reply {'is a thought alone' if thought else 'is empty'} (finish_reason {reason})"
        hint = "; give it thought_tokens" if thought and not finished else ""
        return _failed("server" if finished else "invalid", why + hint, prompt, completion)
    return Reply(text, None, prompt, completion, finished)


def _failed(failure: ReplyFailure, message: str, prompt: int = 0, completion: int = 0) -> Reply:
    return Reply("", None, prompt, completion, finished=False, failure=failure, message=" ".join(message.split()))


def _said(error: Any) -> str:
    """The message of an error, in any of the shapes that servers use."""
    while isinstance(error, Mapping):
        given = (error.get(name) for name in ("message", "detail", "error", "msg"))
        error = next((one for one in given if one and one is not True), "")
    return "" if "<html" in str(error).lower() else str(error)


def _key(endpoint: EndpointConfig) -> str:
    """The key from the environment; "none" where none is needed, since servers without keys still want the header."""
    if not endpoint.needs_key:
        return "none"
    key = os.environ.get(endpoint.key_env or "", "").strip()
    if not key:
        raise ModelError(f"no key for {endpoint.base_url}: set the environment variable {endpoint.key_env}")
    if not re.fullmatch(r"[ !#-\[\]-~]+", key):
        raise ModelError(f"the key in {endpoint.key_env} holds a character no key has; is it cut or quoted wrongly?")
    return key


class LocalChat(CachedChat):
    """A `ChatModel` on a backbone of its own; greedy, in batches of similar length.

    Replies of one user message are those of `remind.models.generate.generate` on its text. Other roles are written
    into that message, since not every chat template has them.

    Args:
        endpoint: model, device and dtype; `concurrency` is the number of prompts per forward.

    Raises:
        ModelError: the model cannot be loaded or does not generate.
    """

    def __init__(self, endpoint: EndpointConfig, cache: ReplyCache | None = None, ledger: Ledger | None = None) -> None:
        super().__init__(endpoint, cache, ledger)
        from remind.models.backbone import load_backbone, weights_hash
        from remind.models.generate import check_generates

        self.backbone = load_backbone(endpoint.model, endpoint.dtype, endpoint.device)
        check_generates(self.backbone)
        tokenizer, given = self.backbone.tokenizer, endpoint.extra_body.get("chat_template_kwargs", {})
        if tokenizer.chat_template:
            # what is set in front of a template stands for all that is rendered with it
            values = "".join(f"{{% set {name} = {value!r} %}}" for name, value in given.items())
            tokenizer.chat_template = values + tokenizer.chat_template
        self.weights = sha256_json([weights_hash(self.backbone), version("transformers")])[:16]

    def ask(self, asked: Sequence[Request], put: Put) -> None:
        """Generate what is not recorded.

        A recorded reply takes its place in the batches, so that a resumed run computes in the same batches as an
        uninterrupted one. Each reply is committed to the cache as its batch ends.

        Raises:
            ModelError: a request with a temperature, tools or images.
        """
        from remind.models.generate import generate

        texts = all(isinstance(message.text, str) for request in asked for message in request.messages)
        if not texts or any(request.temperature or request.body for request in asked):
            raise ModelError("a local model answers greedily and takes no tools and images; name a chat server")
        for room in sorted({request.max_tokens for request in asked}):
            places = [place for place, request in enumerate(asked) if request.max_tokens == room]
            held = [self.recorded(asked[place]) for place in places]
            for place, reply in zip(places, held, strict=True):
                if reply is not None:
                    put(place, reply)
            started = time.monotonic()

            def on_output(n: int, output: Generation, places: Sequence[int] = places) -> None:
                nonlocal started
                # a model that could not be run is as good as a server that gives no reply
                failure: Any = "server" if output.failure == "error" else output.failure
                counts, took = (output.prompt_tokens, output.new_tokens), time.monotonic() - started
                reply = Reply(output.text, None, *counts, output.finished, took, 1, False, "", failure, output.message)
                put(places[n], self.record(asked[places[n]], reply))
                started = time.monotonic()

            prompts = [as_prompt(asked[place].messages) for place in places]
            done = [reply is not None for reply in held]
            generate(self.backbone, prompts, room, self.endpoint.concurrency, done, on_output)


def as_prompt(messages: Sequence[Message]) -> str:
    """A chat as the text of one user message: instructions first; earlier turns of the chat under their roles."""
    heads = {"user": "Request:\n", "assistant": "Your reply:\n"}
    if [message.role for message in messages if message.role != "system"] == ["user"]:
        heads = {}
    ordered = sorted(messages, key=lambda message: message.role != "system")
    return "\n\n".join(heads.get(message.role, "") + str(message.text) for message in ordered)


@dataclass
class DryRun:
    """A run that asks nothing.

    Args:
        path: JSONL, a line for each request that would be sent.
        ledger: gets every stand-in reply at its highest cost: it is taken to fill the room it has.
    """

    path: Path
    ledger: Ledger

    def report(self) -> str:
        """The ledger as text: calls, and at most how many tokens and USD they cost."""
        end = f"tokens counted as characters / {CHARACTERS}, replies at their longest; nothing was asked"
        return f"{table(self.ledger.summary(), dry=True)}\n{end}; prompts: {self.path}"


class DryChat(CachedChat):
    """A `ChatModel` that asks nothing: it writes down what would be asked, and what that would cost.

    Replies the cache holds are given out, so that what comes after them is estimated truly. All others are stand-ins:
    a fixed line, or the smallest value of the schema's shape.
    """

    def __init__(self, endpoint: EndpointConfig, run: DryRun, cache: ReplyCache | None = None) -> None:
        super().__init__(endpoint, cache, run.ledger)
        self.path = run.path
        self._held: dict[str, Reply] = {}

    def ask(self, asked: Sequence[Request], put: Put) -> None:
        """Put what the cache or this dry run holds, else a stand-in, which is written down."""
        for place, request in enumerate(asked):
            key = self.key_of(request)
            if reply := self._held.get(key) or self.recorded(request):
                put(place, replace(reply, cached=True))
            else:
                self._held[key] = self._noted(request)
                put(place, self._held[key])

    def _noted(self, request: Request) -> Reply:
        body, schema, room = self.body(request), request.schema, request.max_tokens
        said, images = _PIXELS.subn("", json.dumps([body["messages"], body.get("tools")]))
        body["messages"] = json.loads(said)[0]
        tokens = len(said) // CHARACTERS + images * IMAGE_TOKENS
        text = DRY if schema is None else json.dumps(placeholder(schema))
        if request.body is not None:
            message = {"role": "assistant", "content": "{}" if body.get("response_format") else DRY}
            text = json.dumps(completion(self.endpoint.model, message, "stop", tokens, room))
        about = {name: getattr(request, name) for name in ("stage", "sample", "prompt_id", "system", "dialogue")}
        cost = {"prompt_tokens": tokens, "cost_usd_at_most": self.endpoint.cost(tokens, room)}
        with self.path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(
                json.dumps({**about, "endpoint": self.endpoint.title, **body, **cost}, ensure_ascii=False) + "\n"
            )
        return Reply(text, None, tokens, room, calls=1)


class Chats:
    """The chat models of a run, one per endpoint, opened when first asked for; they share cache and ledger.

    Attributes:
        ledger: what was asked and what it cost; in a dry run what it would cost.
        dry: the dry run, if this is one.
    """

    def __init__(self, cfg: LLMConfig) -> None:
        self.cfg, self.ledger = cfg, Ledger()
        self.dry: DryRun | None = None
        if cfg.dry_run is not None:
            self.dry = DryRun(Path(cfg.dry_run).expanduser(), self.ledger)
            write_text(self.dry.path, "")
        self._open: dict[str, ChatModel] = {}

    def stage(self, stage: Stage) -> ChatModel | None:
        """The chat model for a stage; None: it has no endpoint, and the offline stand-in does it.

        Raises:
            ModelError: no key in the environment, a missing package, or a model that cannot be loaded or does not
                generate.
            DataError: the cache cannot be used.
        """
        endpoint = self.cfg.endpoint(stage)
        if endpoint is None:
            return None
        if opened := self._open.get(repr(endpoint)):
            return opened
        cache = None if self.cfg.cache is None else ReplyCache(self.cfg.cache)
        if self.dry is not None:
            model: ChatModel = DryChat(endpoint, self.dry, cache)
        else:
            model = (LocalChat if endpoint.local else OpenAIChat)(endpoint, cache, self.ledger)
        self._open[repr(endpoint)] = model
        return model
