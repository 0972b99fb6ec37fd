"""A cheap closed-loop load generator: one process, one raw gRPC stream, one bytes object per message.

While a load runs, a message costs a time stamp and a reference to its bytes; they are decoded afterwards. The last one
of a request names the tensor `finish_reason`. A message carries at least one token, more when the server merged what
had to wait.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from tokenrouter.client import input_array
from tools.errors import CommandError
from tools.json_lines import read_json_lines
from tools.progress import Report

PROMPTS = Path(__file__).resolve().parents[1] / "configs" / "demo" / "problems.jsonl"
DRAIN_S = 1.0
"""After a stage: cancelled requests are gone, and the last numbers are published."""
HANG_S = 120.0
"""Requests of which nothing comes for so long have hung."""

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_LAST = b"finish_reason"
_ERROR = b"\x0a"  # how a message with an error begins: its text is field 1
_POLL_S = 0.05


class LoadError(CommandError):
    """The server cannot be reached or fails requests, or there is nothing to send."""


# --- requests and messages --------------------------------------------------------------------------------------------


class _Prompt(msgspec.Struct):
    prompt: str


def read_prompts(path: Path = PROMPTS) -> list[str]:
    """The field `prompt` of every line of a JSON Lines file.

    Raises:
        CommandError: names the line that is no such object, or the file if it has none.
    """
    prompts = [line.prompt for line in read_json_lines(path, _Prompt)]
    if not prompts:
        raise LoadError(f"{path}: empty; give JSON lines with a field 'prompt'")
    return prompts


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
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    given = "text_input" if isinstance(prompt, str) else "input_ids"
    for name, value in {given: prompt, "max_tokens": max_tokens, "stream": True, **fields}.items():
        add_input(request, name, input_array(name, value))
    for name in outputs:
        request.outputs.add(name=name)
    return bytes(request.SerializeToString())


def add_input(request: service_pb2.ModelInferRequest, name: str, array: npt.NDArray[Any]) -> None:
    """An input tensor of the array's shape and type; text is bytes."""
    kind = np_to_triton_dtype(array.dtype)
    request.inputs.add(name=name, datatype=kind, shape=array.shape)
    request.raw_input_contents.append(serialize_byte_tensor(array).item() if kind == "BYTES" else array.tobytes())


def in_turn(model: str, prompts: Sequence[str], max_tokens: int) -> Callable[[int], bytes]:
    """Requests by number for a `ClosedLoop`: the prompts in turn, seeds 0, 1, 2, ..."""
    return lambda number: request_bytes(model, prompts[number % len(prompts)], max_tokens=max_tokens, seed=number)


def tensors_of(response: service_pb2.ModelInferResponse) -> dict[str, npt.NDArray[Any]]:
    """Output tensors by name, in their shape; text is bytes."""
    tensors = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            array = deserialize_bytes_tensor(raw)
        else:
            array = np.frombuffer(raw, triton_to_np_dtype(output.datatype))
        tensors[output.name] = array.reshape(tuple(output.shape))
    return tensors


# --- one stream -------------------------------------------------------------------------------------------------------


def open_channel(url: str) -> grpc.Channel:
    """A connection of its own to host:port, whatever proxy the environment names."""
    return grpc.insecure_channel(url, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)])


@dataclass
class Arrivals:
    """When messages came, in seconds on `time.perf_counter`, their bytes if kept, and how many requests ended."""

    times: list[float] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    finished: int = 0
    errors: list[str] = field(default_factory=list)


class Stream:
    """One gRPC stream that carries any number of requests.

    Args:
        url: host:port of Triton's gRPC endpoint.
        on_finished: called in the receiving thread for each request that ended.
    """

    def __init__(self, url: str, *, keep: bool = False, on_finished: Callable[[], None] = lambda: None) -> None:
        self._keep = keep
        self._on_finished = on_finished
        self._channel = open_channel(url)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = self._channel.stream_stream(METHOD)(iter(self._outgoing.get, None))
        self.arrivals = Arrivals()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def send(self, request: bytes) -> None:
        self._outgoing.put(request)

    def close(self) -> None:
        """Cancels whatever runs."""
        self._call.cancel()
        self._outgoing.put(None)
        self._thread.join(10)
        self._channel.close()

    def _receive(self) -> None:
        try:
            for payload in self._call:
                self._arrived(payload)
        except grpc.RpcError as exc:
            if exc.code() is not grpc.StatusCode.CANCELLED:
                self.arrivals.errors.append(f"{exc.code().name}: {exc.details()}")

    def _arrived(self, payload: bytes) -> None:
        arrivals = self.arrivals
        arrivals.times.append(time.perf_counter())
        if self._keep:
            arrivals.payloads.append(payload)
        if _LAST in payload:
            arrivals.finished += 1
            self._on_finished()
        elif payload.startswith(_ERROR):
            arrivals.errors.append(service_pb2.ModelStreamInferResponse.FromString(payload).error_message)


# --- closed loop ------------------------------------------------------------------------------------------------------


class ClosedLoop:
    """Keeps `in_flight` requests running: whenever one ends, the next starts. A context manager; cancels at its end.

    Raises LoadError at its end if nothing more comes of the requests that run.

    Args:
        url: host:port of the gRPC endpoint.
        request: the request of a number, from 0 on, or None if there are no more.
        keep: keep all messages, for `messages`; the requests' ids are their numbers then.

    Attributes:
        sent_s: when each request was sent, on `time.perf_counter`.
    """

    def __init__(self, url: str, request: Callable[[int], bytes | None], in_flight: int, *, keep: bool = False) -> None:
        self._url, self._request, self._in_flight = url, request, in_flight
        self._lock = threading.Lock()
        self._stopped = self._exhausted = False
        self.sent_s: list[float] = []
        self._stream = Stream(url, keep=keep, on_finished=self._send)

    def __enter__(self) -> ClosedLoop:
        self._began_s = time.perf_counter()
        for _ in range(self._in_flight):
            self._send()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._stopped = True
        try:
            if kind is None:
                self._await_sign()
        finally:
            self._stream.close()

    def _await_sign(self) -> None:
        """Requests are cancelled while they run; that they do run shows in one more message."""
        arrivals = self._stream.arrivals
        arrived = len(arrivals.times)
        while self.running and not arrivals.errors and len(arrivals.times) == arrived:
            self.check()
            time.sleep(_POLL_S)

    @property
    def arrivals(self) -> Arrivals:
        """What came so far; grows while the loop runs."""
        return self._stream.arrivals

    @property
    def finished(self) -> int:
        return self._stream.arrivals.finished

    @property
    def running(self) -> int:
        return len(self.sent_s) - self.finished

    @property
    def over(self) -> bool:
        """Whether there are no more requests and all have ended."""
        return self._exhausted and not self.running

    def check(self) -> None:
        """Raises LoadError if the server failed a request, the connection broke, or requests hang."""
        if self._stream.arrivals.errors:
            first, _, _ = self._stream.arrivals.errors[0].strip().partition("\n")
            raise LoadError(f"load on {self._url}: {first}")
        latest_s = max([*self.sent_s[-1:], *self._stream.arrivals.times[-1:]], default=0.0)
        if self.running and time.perf_counter() - latest_s > HANG_S:
            raise LoadError(f"load on {self._url}: {self.running} requests hang: nothing came of them for {HANG_S:g} s")

    def ticks(self) -> Iterator[float]:
        """Seconds since the start, about twenty times a second, with a `check` each."""
        while True:
            self.check()
            yield time.perf_counter() - self._began_s
            time.sleep(_POLL_S)

    def messages(self) -> Iterator[tuple[int, float, Mapping[str, npt.NDArray[Any]]]]:
        """Everything that came so far: number of the request, when, and the tensors. Raises LoadError for errors."""
        self.check()
        arrivals = self._stream.arrivals
        for at_s, payload in zip(arrivals.times, arrivals.payloads, strict=True):
            response = service_pb2.ModelStreamInferResponse.FromString(payload).infer_response
            yield int(response.id), at_s, tensors_of(response)

    def _send(self) -> None:
        with self._lock:
            request = None if self._stopped else self._request(len(self.sent_s))
            if request is None:
                self._exhausted = True
                return
            self.sent_s.append(time.perf_counter())
            self._stream.send(request)


def stages(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})


def run_stages(
    url: str,
    request: Callable[[int], bytes],
    *,
    in_flight: Sequence[int],
    seconds: float,
    report: Report,
) -> None:
    """Runs each number in flight for the same time, `seconds` together, so that every batch size is seen.

    Raises:
        LoadError: the server cannot be reached or fails requests.
    """
    for done, n in enumerate(in_flight):
        report(f"load with {n} in flight", done / len(in_flight))
        with ClosedLoop(url, request, n) as loop:
            next(passed for passed in loop.ticks() if passed >= seconds / len(in_flight))
    time.sleep(DRAIN_S)
