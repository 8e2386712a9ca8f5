"""One deadline and one byte limit over a whole exchange with a chat server, held where bytes come in and go out."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

#: Bytes that a server may send in an exchange: headers, informational responses and a body of any status.
MAX_BYTES = 8 * 2**20
#: Bytes sent between looks at the clock.
_PIECE = 16384


class Refused(BaseException):
    """A response that is not read to its end. No `Exception`, which the client would retry."""


class Limits(threading.local):
    """What the exchange that a thread has under way may still take.

    Args:
        timed_out: raised when the time is over; an error that the client knows.
    """

    def __init__(self, timed_out: type[Exception]) -> None:
        self.timed_out = timed_out
        self._deadline, self._room = 0.0, 0

    def start(self, seconds: float) -> None:
        self._deadline, self._room = time.monotonic() + seconds, MAX_BYTES

    def seconds(self) -> float:
        """Seconds left, more than 0."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self.timed_out("the exchange took too long")
        return left

    def take(self, received: int) -> None:
        """Count bytes. Raises Refused where they are too many."""
        self._room -= received
        if self._room < 0:
            raise Refused(f"the server sends more than {MAX_BYTES:,} bytes")


def limit(client: Any, limits: Limits) -> None:
    """Hold every connection of an httpx client, those through a proxy included, to the limits."""
    for transport in (client._transport, *client._mounts.values()):
        if transport is not None:
            # httpcore's pools take a network backend, but httpx has no argument for it
            transport._pool._network_backend = _Backend(transport._pool._network_backend, limits)


class _Backend:
    """A network backend of httpcore that opens limited streams."""

    def __init__(self, backend: Any, limits: Limits) -> None:
        self._backend, self._limits = backend, limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, **options: Any) -> _Stream:
        # the addresses of a host are tried in turn, and each gets the time-out
        try:
            addresses = len(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError:  # the backend will say so
            addresses = 1
        seconds = self._limits.seconds() / addresses
        return _Stream(self._backend.connect_tcp(host, port, timeout=seconds, **options), self._limits)


class _Stream:
    """A network stream of httpcore with the time-out of the exchange in place of one for each read and write."""

    def __init__(self, stream: Any, limits: Limits) -> None:
        self._stream, self._limits = stream, limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = self._stream.read(max_bytes, timeout=self._limits.seconds())
        self._limits.take(len(data))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _PIECE):
            self._stream.write(buffer[start : start + _PIECE], timeout=self._limits.seconds())

    def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None) -> _Stream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, self._limits.seconds()), self._limits)
