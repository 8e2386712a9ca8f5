"""A small chat server that spoils a share of the calls, by a seed, and counts hits."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = ("rate", "broken", "slow", "cut", "malformed")
Answer = Callable[[dict[str, Any]], tuple[int, dict[str, str], bytes | Iterable[bytes]]]


def completion(text: str, prompt_tokens: int = 10, completion_tokens: int = 3, reason: str = "stop") -> bytes:
    """A chat completion as servers send it."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return json.dumps({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def tell_back(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, completion("you said: " + body["messages"][-1]["content"])


def error(status: int, message: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """An answer of that status, with an error body in OpenAI's shape."""
    return status, headers, json.dumps({"error": {"message": message, "code": None}}).encode()


class Proxy:
    """`with Proxy() as proxy:` serves on a free loopback port until the block ends.

    Args:
        answer: status, headers and body of a right answer; by default the last message, told back.
        share: of the tries that are spoiled, by a fault drawn from `faults` with `seed`.
        delay: seconds every right answer takes.

    Attributes:
        hits: tries that came in.
        paid: for each chat (as JSON) how often it was answered with a whole, right reply.
        faults: how often each fault was injected.
        heads, bodies: headers and JSON of every try.
        busy, most_busy: tries under way at once, now and at most.
    """

    def __init__(
        self, answer: Answer = tell_back, share: float = 0.0, seed: int = 0, delay: float = 0.0, faults: Any = FAULTS
    ) -> None:
        self.answer, self.share, self.delay, self.kinds = answer, share, delay, faults
        self.paid: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.heads: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.hits = self.busy = self.most_busy = 0
        self.rng, self.lock = random.Random(seed), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, proxy: Proxy, *arguments: Any) -> None:
        self.proxy = proxy
        super().__init__(*arguments)

    def do_POST(self) -> None:
        proxy, whole = self.proxy, False
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with proxy.lock:
            proxy.hits += 1
            proxy.heads.append({name.lower(): value for name, value in self.headers.items()})
            proxy.bodies.append(body)
            proxy.busy += 1
            proxy.most_busy = max(proxy.most_busy, proxy.busy)
            fault = proxy.rng.choice(proxy.kinds) if proxy.rng.random() < proxy.share else None
            proxy.faults.update([fault] if fault else [])
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                whole = self._serve(body, fault)
        finally:
            with proxy.lock:
                proxy.busy -= 1
                proxy.paid.update([json.dumps(body["messages"])] if whole else [])

    def _serve(self, body: dict[str, Any], fault: str | None) -> bool:
        """Answer; returns whether the reply was whole and right."""
        spoiled = {
            "rate": error(429, "slow down", **{"Retry-After": "0.2"}),
            "broken": (500, {}, b"<html>internal error</html>"),
            "malformed": (200, {}, b'{"choices": [{"message": {"con'),
            "slow": (200, {}, completion("too late")),
        }
        time.sleep(3.0 if fault == "slow" else 0 if fault in spoiled else self.proxy.delay)
        status, heads, content = spoiled[fault] if fault in spoiled else self.proxy.answer(body)
        pieces = [content] if isinstance(content, bytes) else content
        length = str(len(content)) if isinstance(content, bytes) else "1000"
        self.send_response(status)
        for head in {"Content-Type": "application/json", "Content-Length": length, **heads}.items():
            self.send_header(*head)
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece[: len(piece) // 2] if fault == "cut" else piece)
            self.wfile.flush()
        self.close_connection = fault == "cut" or self.close_connection
        return fault is None and status == 200

    def log_message(self, *_: Any) -> None:
        pass
