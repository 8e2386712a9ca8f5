"""An HTTP server on this machine that speaks OpenAI's protocol to memory systems, for `remind.memory.meter`."""

from __future__ import annotations

import base64
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast, get_args
from urllib.parse import unquote

from remind.core.errors import RemindError, named, shown
from remind.llm import bodies
from remind.llm.request import Message, Reply, Role, Stage

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
#: Of a request's body.
MAX_BYTES = 8 * 2**20
#: Seconds that a client may be silent.
_IDLE = 300.0
_HOSTS = ("127.0.0.1", "localhost")
#: Bytes of a request that is refused which are read: a client that cannot send the rest never sees the answer.
_READ_ON = 8 * MAX_BYTES


@dataclass(frozen=True)
class Account:
    """What a request is counted under: the memory system, the dialogue it is at work on, and what it asks for."""

    system: str
    dialogue: str
    stage: Stage


@dataclass(frozen=True)
class Service:
    """What stands behind the server.

    Attributes:
        models: names of the chat model and of the sentence encoder.
        chat: the reply to the body of a chat request, whose text is a whole completion as JSON.
        encode: float32 [n, dimension] of n texts, and their tokens.
    """

    models: tuple[str, str]
    chat: Callable[[Account, Mapping[str, Any]], Reply]
    encode: Callable[[Account, list[str]], tuple[Tensor, int]]


class Gateway(ThreadingHTTPServer):
    """Serves `/{system}/{dialogue}/{stage}/v1/...` on a free loopback port: chat/completions, embeddings and models."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, service: Service) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, service))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that die or give up are no errors; the others are logged."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("a request could not be answered")


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.body = status, bodies.error(message, kind)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE
    # headers and body go out apart, and the second would wait for the client's receipt of the first
    disable_nagle_algorithm = True

    def __init__(self, service: Service, *arguments: Any) -> None:
        self.service = service
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, serve: Callable[[Account, str], tuple[int, bytes]]) -> None:
        length = self.headers.get("Content-Length", "")
        self._unread = int(length) if length.isascii() and length.isdigit() and len(length) < 16 else 0
        try:
            status, content = serve(*self._route())
        except _Refused as refused:
            status, content = refused.status, json.dumps(refused.body).encode()
        except RemindError as error:
            status, content = 502, json.dumps(bodies.error(str(error), "server_error")).encode()
        except OSError:
            raise
        except Exception as error:
            _log.exception("a request could not be answered")
            status, content = 500, json.dumps(bodies.error(type(error).__name__, "server_error")).encode()
        with suppress(ConnectionError):
            self._read(min(self._unread, _READ_ON))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status >= 400:
                # all tries were made here: the package openai would send the request again
                self.send_header("x-should-retry", "false")
                # what was not read of the request would be taken for the next one
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content)

    def _route(self) -> tuple[Account, str]:
        # a page in a browser can reach this port under a host name of its own
        if self.headers.get("Host", "").partition(":")[0] not in _HOSTS:
            raise _Refused(403, f"requests are served only for {' and '.join(_HOSTS)}")
        _, *parts = self.path.partition("?")[0].split("/")
        if len(parts) < 5 or parts[3] != "v1":
            raise _Refused(404, f"unknown path {named(self.path)}; it is /{{system}}/{{dialogue}}/{{stage}}/v1/...")
        system, dialogue, stage = map(unquote, parts[:3])
        if stage not in get_args(Stage):
            raise _Refused(404, f"unknown stage {shown(stage)}; it is one of {', '.join(get_args(Stage))}")
        if not system or not dialogue:
            raise _Refused(404, "the path names no system, or no dialogue")
        return Account(system, dialogue, stage), "/".join(parts[4:])  # type: ignore[arg-type]

    def _get(self, account: Account, name: str) -> tuple[int, bytes]:
        if name != "models":
            raise _Refused(404, f"unknown path {named(self.path)}; GET serves models")
        data = [{"id": one, "object": "model", "created": 0, "owned_by": "remind"} for one in self.service.models]
        return 200, json.dumps({"object": "list", "data": data}).encode()

    def _post(self, account: Account, name: str) -> tuple[int, bytes]:
        if name not in ("chat/completions", "embeddings"):
            raise _Refused(404, f"unknown path {named(self.path)}; POST serves chat/completions and embeddings")
        body = self._body()
        return self._chat(account, body) if name == "chat/completions" else self._embed(account, body)

    def _body(self) -> dict[str, Any]:
        # no page in a browser can send this type without being asked for leave, which is not given
        if self.headers.get_content_type() != "application/json":
            raise _Refused(415, "the body must have content type application/json")
        if not self._unread:
            raise _Refused(411, "the request must have a body and its Content-Length")
        if self._unread > MAX_BYTES:
            raise _Refused(413, f"the body has more than {MAX_BYTES:,} bytes")
        try:
            body = json.loads(self._read(self._unread), parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise _Refused(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise _Refused(400, "the body must be a JSON object")
        return body

    def _read(self, size: int) -> bytes:
        self._unread -= size
        return self.rfile.read(size)

    def _chat(self, account: Account, body: dict[str, Any]) -> tuple[int, bytes]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise _Refused(400, "messages must be a list of objects, at least one")
        if body.get("stream"):
            raise _Refused(400, "replies are not streamed here; send stream: false")
        try:
            reply = self.service.chat(account, body)
        except ValueError as error:
            raise _Refused(400, str(error)) from None
        if reply.failure is not None:
            status, said = failed(reply)
            return status, json.dumps(said).encode()
        return 200, reply.text.encode()

    def _embed(self, account: Account, body: dict[str, Any]) -> tuple[int, bytes]:
        texts, form = body.get("input"), body.get("encoding_format") or "float"
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            hint = "ids of tokens are not read (langchain_openai: check_embedding_ctx_length=False)"
            raise _Refused(400, f"input must be a text or a list of texts, at least one; {hint}")
        if form not in ("float", "base64"):
            raise _Refused(400, f"encoding_format must be float or base64, not {shown(form)}")
        vectors, tokens = self.service.encode(account, texts)
        if body.get("dimensions") not in (None, vectors.shape[1]):
            raise _Refused(400, f"dimensions must be {vectors.shape[1]}, those of the encoder, or left out")
        rows = vectors.numpy().astype("<f4")
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": row.tolist() if form == "float" else base64.b64encode(row.tobytes()).decode(),
            }
            for index, row in enumerate(rows)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        result = {"object": "list", "data": data, "model": self.service.models[1], "usage": usage}
        return 200, json.dumps(result).encode()

    def log_message(self, *_: Any) -> None:
        """Requests are counted and not logged: their headers may hold keys."""


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def failed(reply: Reply) -> tuple[int, dict[str, Any]]:
    """Status and body that tell a client of a failed reply; the status is the server's own where it gave one."""
    given = re.match(r"HTTP ([45]\d\d)", reply.message)
    status = int(given[1]) if given else 502 if reply.failure == "server" else 400
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = "context_length_exceeded" if reply.failure == "too_long" else None
    return status, bodies.error(reply.message or str(reply.failure), kind, code=code)


def room(body: Mapping[str, Any], otherwise: int) -> int:
    """Tokens that the body leaves for a reply. Raises ValueError for what is not a number of tokens."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := body.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number above 0, not {shown(value)}")
            return value
    return otherwise


def messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of the body for a model that takes text alone. Raises ValueError for anything else in them."""
    result = []
    for message in body["messages"]:
        role = "system" if message.get("role") == "developer" else message.get("role")
        parts = message.get("content")
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        if role not in get_args(Role) or not isinstance(parts, list):
            raise ValueError(f"a local model takes no message with role {shown(role)} and content {shown(parts)}")
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a local model takes text only")
        result.append(Message(cast(Role, role), "".join(cast(list[str], texts))))
    return tuple(result)
