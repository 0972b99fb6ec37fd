"""A cheap closed-loop load generator: one process, one raw gRPC stream, one bytes object per response.

Responses are not decoded; the last one of a request names the tensor `finish_reason`. A response carries at least one
token, more when the server merged what had to wait, so tokens are counted by the server's own metrics.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_LAST = b"finish_reason"


def request_bytes(
    model: str,
    prompt: str | Sequence[int],
    *,
    max_tokens: int,
    request_id: str = "",
    outputs: Sequence[str] = ("text_output", "finish_reason"),
    **fields: Any,
) -> bytes:
    """A serialised streaming request of the entry model's tensors; the prompt is text or token ids."""
    from tokenrouter.client import _input

    given = "text_input" if isinstance(prompt, str) else "input_ids"
    values = {given: prompt, "max_tokens": max_tokens, "stream": True, **fields}
    message = grpcclient._utils._get_inference_request(
        model_name=model,
        inputs=[_input(name, value) for name, value in values.items()],
        model_version="",
        request_id=request_id,
        outputs=[grpcclient.InferRequestedOutput(name) for name in outputs],
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout=None,
        parameters=None,
    )
    assert isinstance(message, service_pb2.ModelInferRequest)
    return bytes(message.SerializeToString())


@dataclass
class Arrivals:
    """When responses came, in seconds on `time.perf_counter`, their bytes if kept, and how many requests ended."""

    times: list[float] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    finished: int = 0
    errors: list[str] = field(default_factory=list)

    def rate(self, start: float, end: float) -> float:
        """Responses per second in [start, end)."""
        times = np.array(self.times)
        return float(((times >= start) & (times < end)).sum() / (end - start))


class Stream:
    """One gRPC stream that carries any number of requests.

    Args:
        url: host:port of Triton's gRPC endpoint.
        keep: keep the bytes of all responses.
    """

    def __init__(self, url: str, *, keep: bool = False) -> None:
        self._keep = keep
        self._channel = grpc.insecure_channel(url)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = self._channel.stream_stream(_METHOD)(self._requests())
        self.arrivals = Arrivals()
        self.on_finished: Any = None
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def send(self, request: bytes) -> None:
        """Starts a request."""
        self._outgoing.put(request)

    def close(self) -> None:
        """Cancels whatever runs."""
        self._call.cancel()
        self._outgoing.put(None)
        self._thread.join(10)
        self._channel.close()

    def _requests(self) -> Iterator[bytes]:
        while (request := self._outgoing.get()) is not None:
            yield request

    def _receive(self) -> None:
        arrivals = self.arrivals
        try:
            for payload in self._call:
                arrivals.times.append(time.perf_counter())
                if self._keep:
                    arrivals.payloads.append(payload)
                if _LAST in payload:
                    arrivals.finished += 1
                    if self.on_finished is not None:
                        self.on_finished()
        except grpc.RpcError as exc:
            if exc.code() is not grpc.StatusCode.CANCELLED:
                arrivals.errors.append(str(exc))


def closed_loop(
    url: str, requests: list[bytes], *, in_flight: int, warm_up_s: float, seconds: float
) -> tuple[float, Arrivals]:
    """Keeps `in_flight` requests running and measures.

    Returns:
        Responses (tokens) per second after the warm-up, and all arrivals.
    """
    stream = Stream(url)
    upcoming = iter(range(10**9))
    stream.on_finished = lambda: stream.send(requests[next(upcoming) % len(requests)])
    for _ in range(in_flight):
        stream.send(requests[next(upcoming) % len(requests)])
    time.sleep(warm_up_s)
    start = time.perf_counter()
    time.sleep(seconds)
    end = time.perf_counter()
    rate = stream.arrivals.rate(start, end)
    stream.close()
    return rate, stream.arrivals
