"""`perf.openai`: the load over HTTP finds ends and errors whatever the network cuts, and what becomes of windows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

from perf.load.event_loop import EventLoop
from perf.openai import rows
from tests.support.waiting import until
from tools.load import LoadError

EVENTS = [b'data: {"choices":[]}\n\n'] * 3 + [b"data: [DONE]\n\n"]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def in_chunks(*bodies: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"


@contextmanager
def answering(answer: bytes, size: int) -> Iterator[tuple[int, list[Any]]]:
    """A server's port; the bodies that it got. It answers all the same, so many bytes at a time."""
    bodies: list[Any] = []

    class Connection(StreamRequestHandler):
        disable_nagle_algorithm = True

        def handle(self) -> None:
            with suppress(ConnectionError):
                while length := self._length():
                    bodies.append(json.loads(self.rfile.read(length)))
                    for at in range(0, len(answer), size):
                        self.wfile.write(answer[at : at + size])

        def _length(self) -> int:
            lines = list(iter(self.rfile.readline, b"\r\n")) if self.rfile.peek(1) else []  # type: ignore[attr-defined]
            return sum(int(line[15:]) for line in lines if line.startswith(b"Content-Length:"))

    with ThreadingTCPServer(("127.0.0.1", 0), Connection) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1], bodies
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_responses_are_counted_whole_whatever_is_cut(size: int) -> None:
    with (
        answering(in_chunks(*EVENTS[:2], b"".join(EVENTS[2:])), size) as (port, bodies),
        EventLoop(port, lambda number: {"number": number}, 2) as load,
    ):
        until(lambda: len(load.chunks) >= 6)
    assert set(load.chunks) == {3}
    assert len(load.first_token_s) >= 6
    assert sorted(body["number"] for body in bodies) == list(range(len(bodies)))
    assert all(body["stream"] for body in bodies)


@pytest.mark.parametrize(
    "answer",
    [in_chunks(EVENTS[0], b'data: {"error":{"message":"no"}}\n\n', EVENTS[-1]), b"HTTP/1.1 503 no\r\n\r\n"],
)
def test_a_failed_response_ends_the_load(answer: bytes) -> None:
    def failing(port: int) -> None:
        with EventLoop(port, lambda _: {}, 1) as load:
            until(lambda: load.errors)

    with answering(answer, 1 << 16) as (port, _), pytest.raises(LoadError, match="no"):
        failing(port)


def test_windows_become_medians_and_neighbours_are_compared() -> None:
    def figures(rate: float, first_ms: float) -> dict[str, float]:
        return {"tokens_per_second": rate, "first_token_ms": first_ms}

    direct = [figures(100, 10), figures(200, 30), figures(300, 20)]
    ours = [figures(90, 11), figures(190, 33), figures(240, 21)]
    plain, beside = rows({"direct": direct, "/v1": ours})
    assert plain == {"way": "direct", "tokens_per_second": 200, "first_token_ms": 20}
    assert beside["tokens_per_second"] == 190
    assert (beside["ratio"], beside["later_ms"]) == (0.9, 1)
