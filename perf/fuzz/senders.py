"""Sends one malformed request and notes how it was answered; a sender belongs to one thread."""

from __future__ import annotations

import http.client
import random
import re
import time
from collections.abc import Callable
from typing import Protocol

import grpc
from tritonclient.grpc import service_pb2

from perf.fuzz.answers import Answers
from perf.fuzz.grpc import grpc_request
from perf.fuzz.http import HttpRequest
from tools.load import open_channel

_HOST = "127.0.0.1"
_LOST = re.compile("(?i)socket closed|connect|goaway|broken pipe")
"""What gRPC itself says of a connection that broke, with the status that Triton gives for an unknown model."""


class Sender(Protocol):
    """Sends one request; `close` ends its connection."""

    def __call__(self, draw: random.Random) -> None:
        """One request that is drawn."""
        ...

    def close(self) -> None: ...


class HttpSender:
    """Over one connection while the server keeps it open, as clients do."""

    def __init__(
        self, port: int, make: Callable[[random.Random], HttpRequest], answers: Answers, patience_s: float
    ) -> None:
        self._make, self._answers = make, answers
        self._connection = http.client.HTTPConnection(_HOST, port, timeout=patience_s)

    def __call__(self, draw: random.Random) -> None:
        """One request. What the server closes without a word on a new connection is no answer."""
        request = self._make(draw)
        kept = self._connection.sock is not None
        began_s = time.monotonic()
        try:
            status = self._status(request)
        except (http.client.HTTPException, OSError) as exc:
            self._connection.close()
            try:
                status = self._status(request) if kept and not isinstance(exc, TimeoutError) else _unanswered(exc)
            except (http.client.HTTPException, OSError) as again:
                self._connection.close()
                status = _unanswered(again)
        answered = status.isdigit()
        self._answers.note(request.kind, status, time.monotonic() - began_s, answered=answered)

    def close(self) -> None:
        self._connection.close()

    def _status(self, request: HttpRequest) -> str:
        try:
            self._connection.request(request.method, request.path, request.body, request.headers)
        except (BrokenPipeError, ConnectionResetError):
            # The server has answered before it read everything; what it said can still be read.
            if self._connection.sock is None:
                raise
        response = self._connection.getresponse()
        response.read()
        return str(response.status)


def _unanswered(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


class GrpcSender:
    """Over one connection."""

    def __init__(self, port: int, answers: Answers, patience_s: float) -> None:
        self._answers, self._patience_s = answers, patience_s
        self._channel = open_channel(f"{_HOST}:{port}")

    def __call__(self, draw: random.Random) -> None:
        """One call; Triton answers a fault in a stream by a message with an error, others by the call's status."""
        request = grpc_request(draw)
        began_s = time.monotonic()
        try:
            if request.streams:
                call = self._channel.stream_stream(request.method)(iter((request.payload,)), timeout=self._patience_s)
                status = self._in_stream(call)
            else:
                self._channel.unary_unary(request.method)(request.payload, timeout=self._patience_s)
                status = "served"
            answered = True
        except grpc.RpcError as exc:
            status = exc.code().name
            answered = exc.code() is not grpc.StatusCode.DEADLINE_EXCEEDED and not _LOST.search(exc.details() or "")
        self._answers.note(request.kind, status, time.monotonic() - began_s, answered=answered)

    def _in_stream(self, call: grpc.Call) -> str:
        errors = [
            error
            for payload in call
            if (error := service_pb2.ModelStreamInferResponse.FromString(payload).error_message)
        ]
        return "error in the stream" if errors else "served"

    def close(self) -> None:
        self._channel.close()
