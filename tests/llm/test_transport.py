"""One deadline and one byte limit over an exchange, against servers that speak HTTP badly on purpose."""

from __future__ import annotations

import gzip
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, repeat

import pytest
from chat_samples import ask, chat
from fault_proxy import Raw, completion

from remind.llm import transport

Speak = Callable[[socket.socket], Iterator[bytes]]
BAD = b"HTTP/1.1 400 Bad Request\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"


def slowly(head: bytes, piece: bytes) -> Speak:
    """The head, then the piece every twentieth of a second, for ten seconds."""

    def speak(peer: socket.socket) -> Iterator[bytes]:
        yield head
        for _ in range(200):
            yield piece
            time.sleep(0.05)

    return speak


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
        (BAD + b"Content-Length: 100000\r\n\r\n", b" "),
        (BAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
        (BAD + b"X-Long: ", b"x"),
        (b"", HINTS),
    ],
    ids=["body", "error body", "size of a chunk", "header", "informational"],
)
def test_one_deadline_holds_over_the_whole_response(head: bytes, piece: bytes) -> None:
    with Raw(slowly(head, piece)) as server:
        started = time.monotonic()
        [reply] = chat(server.url, timeout=0.3, retries=0).complete([ask("hello")])
    assert (reply.failure, reply.message) == ("server", "no whole reply within 0.3 s")
    assert time.monotonic() - started < 3


def test_the_deadline_holds_while_the_request_is_sent() -> None:
    def read(peer: socket.socket) -> Iterator[bytes]:
        for _ in range(200):
            time.sleep(0.01)
            peer.recv(2**16)
            yield b""

    with Raw(read, window=2**17) as server:
        started = time.monotonic()
        [reply] = chat(server.url, timeout=0.5, retries=0).complete([ask("x" * 2**24)])
    assert (reply.failure, reply.message) == ("server", "no whole reply within 0.5 s")
    assert time.monotonic() - started < 3.5


def test_the_deadline_holds_over_all_addresses_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        place = listener.getsockname()
        # the system answers no further connection once the queue is full
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(place)
        address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", place)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 10)
        model = chat(f"http://example.test:{place[1]}/v1", timeout=0.5, retries=0)
        model._reached = True  # else it is an error of the whole call
        started = time.monotonic()
        [reply] = model.complete([ask("hello")])
        assert (reply.failure, reply.message) == ("server", "no whole reply within 0.5 s")
        assert time.monotonic() - started < 3
        for one in waiting:
            one.close()


@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request", "503 Busy", "103 Early Hints"])
def test_endless_responses_are_cut_off_and_not_asked_for_again(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_BYTES", 2**20)
    head = b"" if status[0] == "1" else f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    piece = HINTS if status[0] == "1" else b"10000\r\n" + b" " * 65536 + b"\r\n"
    sent = []

    def endless(peer: socket.socket) -> Iterator[bytes]:
        yield head
        for one in repeat(piece):
            sent.append(len(one))
            yield one

    with Raw(endless) as server:
        [reply] = chat(server.url, timeout=20).complete([ask("hello")])
    assert (reply.failure, reply.calls) == ("refused", 1)
    assert reply.message == "the server sends more than 1,048,576 bytes"
    assert sum(sent) < 2**25  # what the sockets hold besides


def test_nothing_is_decompressed() -> None:
    bomb = gzip.compress(b" " * 2**24)
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    with Raw(lambda _: iter([head, bomb])) as server:
        [reply] = chat(server.url).complete([ask("hello")])
    assert (reply.failure, reply.calls) == ("refused", 1)
    assert reply.message == "HTTP 400: the reply is compressed, which was not asked for"
    assert b"accept-encoding: identity\r\n" in server.heads[0]


def test_the_server_does_not_choose_the_codec() -> None:
    """Python's decoder for punycode takes time that grows with the square."""
    body = b"a" * 2**17 + b"-" + b"9" * 2**17
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=punycode\r\nContent-Length: %d\r\n\r\n"
    with Raw(lambda _: iter([head % len(body), body])) as server:
        started = time.monotonic()
        [reply] = chat(server.url).complete([ask("hello")])
    assert time.monotonic() - started < 4
    assert (reply.failure, reply.message[:14]) == ("refused", "HTTP 400: aaaa")


def test_cookies_are_not_kept() -> None:
    body = completion("well")
    head = b"HTTP/1.1 200 OK\r\nSet-Cookie: a=%s\r\nContent-Length: %d\r\n\r\n" % (b"x" * 4000, len(body))
    with Raw(lambda _: iter([head, body])) as server:
        model = chat(server.url)
        assert model.complete([ask("hello")])[0].text == "well"
    assert not model._client._client.cookies


def test_each_of_many_exchanges_has_limits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the connections, and what one exchange took leaves the others what is theirs."""
    monkeypatch.setattr(transport, "MAX_BYTES", 2**17)
    good = completion("x" * 50_000)
    turn = count()

    def speak(peer: socket.socket) -> Iterator[bytes]:
        kind = next(turn) % 4
        if kind < 2:
            return iter([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(good) + good])
        return slowly(BAD, HINTS if kind == 2 else b"X")(peer)

    with Raw(speak) as server:
        started = time.monotonic()
        replies = chat(server.url, timeout=0.6, retries=0, concurrency=6).complete([ask(str(n)) for n in range(24)])
    assert Counter(reply.failure for reply in replies) == {None: 12, "server": 12}
    assert {len(reply.text) for reply in replies} == {0, 50_000}
    assert max(reply.seconds for reply in replies) < 2
    assert time.monotonic() - started < 8
