"""A closed loop of streamed completions over HTTP that costs little: raw bytes on connections that stay open.

What `tools.load.ClosedLoop` does over gRPC, with the same effort: every chunk is looked at as bytes, none is decoded.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import uvloop

from tools.load import LoadError

_HOST = "127.0.0.1"
_OK = b"HTTP/1.1 200 "
_CHUNK = b"data: {"
_ERROR = b'data: {"error"'
_DONE = b"data: [DONE]\n\n\r\n0\r\n\r\n"
"""The last event, and how a body in chunks ends."""
_POLL_S = 0.05


class EventLoop:
    """Keeps `in_flight` streams running, one connection each, from `__enter__` to `__exit__`; a context manager.

    Raises LoadError at its end if a response was no whole stream of chunks without an error.

    Args:
        port: of the OpenAI-compatible server.
        body: of the request of a number, from 0 on; `stream` is set.
        in_flight: connections.

    Attributes:
        first_token_s: of every request that got one: from the request to the first bytes of a chunk.
        chunks: of the responses that have ended, the number of each.
        errors: of requests that failed; their connections send no more.
        stopping: whether it is at its end.
    """

    def __init__(self, port: int, body: Callable[[int], Mapping[str, Any]], in_flight: int) -> None:
        self._port, self._body, self._in_flight = port, body, in_flight
        self._numbers = 0
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.first_token_s: list[float] = []
        self.chunks: list[int] = []
        self.errors: list[str] = []

    def request(self) -> bytes:
        """The next request, whole."""
        body = json.dumps({**self._body(self._numbers), "stream": True}).encode()
        self._numbers += 1
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def __enter__(self) -> EventLoop:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.stopping.set()
        self._thread.join()
        if kind is None and self.errors:
            raise LoadError(f"load on port {self._port}: {self.errors[0]}")

    def _run(self) -> None:
        uvloop.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        connect = asyncio.get_running_loop().create_connection
        made = [connect(lambda: _Client(self), _HOST, self._port) for _ in range(self._in_flight)]
        ends = await asyncio.gather(*made)
        while not self.stopping.is_set():
            await asyncio.sleep(_POLL_S)
        for transport, _ in ends:
            transport.close()


class _Client(asyncio.Protocol):
    """One connection: the next request when a response has ended."""

    def __init__(self, load: EventLoop) -> None:
        self._load = load
        self._received: list[bytes] = []
        self._tail = b""  # of what came, as long as an end is
        self._sent_s: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._send()

    def data_received(self, data: bytes) -> None:
        seen = self._tail + data
        if self._sent_s is not None and _CHUNK in seen:
            self._load.first_token_s.append(time.perf_counter() - self._sent_s)
            self._sent_s = None
        self._received.append(data)
        self._tail = seen[-len(_DONE) :]
        if self._tail == _DONE:
            self._over(b"".join(self._received))
        elif not data.startswith(_OK) and len(self._received) == 1 and not _OK.startswith(data):
            self._failed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._load.stopping.is_set():
            self._load.errors.append(f"the server hung up{f': {exc}' if exc else ''}")

    def _over(self, response: bytes) -> None:
        if _ERROR in response:
            self._failed(response)
            return
        self._load.chunks.append(response.count(_CHUNK))
        self._send()

    def _failed(self, response: bytes) -> None:
        self._load.errors.append(response.decode(errors="replace"))
        self._transport.abort()

    def _send(self) -> None:
        self._received, self._tail = [], b""
        self._transport.write(self._load.request())
        self._sent_s = time.perf_counter()
