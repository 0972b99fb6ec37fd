"""Calls of /generate and /generate_stream, with and without a stream."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from tests.support.waiting import PATIENCE_S
from tools.tritonserver.server import TritonServer

RESPONSE_ERROR = 400
"""Triton 2.51 gives every error that a model answers on /generate this status; gRPC carries the error's own code."""


def generate(
    server: TritonServer, body: Mapping[str, Any] | bytes, *, model: str = "tokenrouter", timeout_s: float = PATIENCE_S
) -> tuple[int, dict[str, Any]]:
    """One call of /generate: status and JSON answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=timeout_s)
    try:
        connection.request("POST", f"/v2/models/{model}/generate", _payload(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}")
    finally:
        connection.close()


def answer(server: TritonServer, model: str = "tokenrouter", **body: Any) -> dict[str, Any]:
    """The JSON answer of /generate, which must succeed."""
    status, reply = generate(server, body, model=model)
    assert status == 200, reply
    return reply


def refusal(server: TritonServer, model: str = "tokenrouter", **body: Any) -> tuple[int, str]:
    """Status and message of /generate, which must fail."""
    status, reply = generate(server, body, model=model)
    assert status != 200, reply
    return status, reply["error"]


class HttpStream:
    """One open call of /generate_stream; iterates over its JSON events."""

    def __init__(
        self,
        server: TritonServer,
        body: Mapping[str, Any],
        *,
        model: str = "tokenrouter",
        timeout_s: float = PATIENCE_S,
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=timeout_s)
        self._connection.request("POST", f"/v2/models/{model}/generate_stream", _payload(body))
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        """The response; waits for its header, which comes with the first event."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self.response:
            if line.startswith(b"data:"):
                yield json.loads(line[5:])

    def close(self) -> None:
        """Closes the socket, whatever has been read, with a reset as a killed client's kernel does."""
        if self._connection.sock is not None:
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def __enter__(self) -> HttpStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def stream(server: TritonServer, model: str = "tokenrouter", **body: Any) -> list[dict[str, Any]]:
    """All events of one call of /generate_stream with `stream` true unless given."""
    with HttpStream(server, {"stream": True, **body}, model=model) as events:
        return list(events)


def _payload(body: Mapping[str, Any] | bytes) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()
