"""Clients of a running server for tests: HTTP with and without a stream, raw gRPC streams, metrics, bounded waits."""

from __future__ import annotations

import http.client
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from tokenrouter.triton.tensors import ENTRY_INPUTS
from tools.metrics import Scrape, busy, scrape
from tools.tritonserver.server import TritonServer

T = TypeVar("T")

PATIENCE_S = 30.0
# Triton 2.51 gives every error that a model answers on /generate this status; gRPC carries the error's own code.
RESPONSE_ERROR = 400
_POLL_S = 0.01
_SETTLED_S = 0.4


def until(condition: Callable[[], T], *, within_s: float = PATIENCE_S, what: str = "") -> T:
    """Waits until `condition()` is true and returns it; fails after `within_s`."""
    end = time.monotonic() + within_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= end:
            raise AssertionError(f"not within {within_s:g} s: {what or condition}; last value {found!r}")
        time.sleep(_POLL_S)


# --- HTTP ---------------------------------------------------------------------------------------------------------


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


# --- gRPC ---------------------------------------------------------------------------------------------------------


def tensor(value: Any, kind: str) -> npt.NDArray[Any]:
    """A value or list as an array with the batch dimension."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if kind == "STRING":
        return np.array([[v if isinstance(v, bytes) else v.encode() for v in values]], dtype=np.object_)
    return np.array([values], dtype=triton_to_np_dtype(kind))


def infer_request(
    fields: Mapping[str, Any],
    *,
    model: str = "tokenrouter",
    request_id: str = "",
    outputs: tuple[str, ...] = (),
    timeout_us: int = 0,
    empty_final: bool = True,
) -> service_pb2.ModelInferRequest:
    """A ModelInferRequest. Values that are arrays are sent as they are, others as the declared type in shape [1, n]."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in fields.items():
        kind = ENTRY_INPUTS[name].type if name in ENTRY_INPUTS else "FP32"
        array = value if isinstance(value, np.ndarray) else tensor(value, kind)
        text = array.dtype == np.object_
        own = "BYTES" if text else _TRITON_TYPES[array.dtype.name]
        request.inputs.add(name=name, datatype=own, shape=array.shape)
        request.raw_input_contents.append(serialize_byte_tensor(array).item() if text else array.tobytes())
    for name in outputs:
        request.outputs.add(name=name)
    if empty_final:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    if timeout_us:
        request.parameters["timeout"].int64_param = timeout_us
    return request


_TRITON_TYPES = {
    "bool": "BOOL",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "uint64": "UINT64",
}


@dataclass(frozen=True)
class Message:
    """One message of a gRPC stream.

    Attributes:
        at: when it came, `time.monotonic`.
        request_id: whose it is.
        tensors: outputs by name.
        shapes: their shapes.
        final: whether it carries the FINAL flag.
        error: text, or "".
    """

    at: float
    request_id: str
    tensors: dict[str, Any]
    final: bool
    error: str

    @property
    def text(self) -> str:
        """text_output, or "" of a message without."""
        return self.tensors["text_output"][0].decode() if "text_output" in self.tensors else ""

    @property
    def ids(self) -> list[int]:
        """output_ids."""
        return self.tensors["output_ids"].tolist() if "output_ids" in self.tensors else []

    @property
    def finish_reason(self) -> str:
        """finish_reason, or "" before the end."""
        return self.tensors["finish_reason"][0].decode() if "finish_reason" in self.tensors else ""

    @property
    def routing(self) -> dict[str, Any]:
        """The routing object."""
        routing: dict[str, Any] = json.loads(self.tensors["routing"][0])
        return routing


@dataclass
class GrpcStream:
    """One ModelStreamInfer call that carries any number of requests; a thread collects what comes.

    Args:
        server: the server.
        real_errors: asks for gRPC status codes, which end the stream (``triton_grpc_error``).
    """

    server: TritonServer
    real_errors: bool = False
    messages: list[Message] = field(default_factory=list)
    status: grpc.StatusCode | None = None
    details: str = ""
    sent_at: float = 0.0

    def __post_init__(self) -> None:
        self._channel = channel(self.server)
        self._outgoing: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        stub = GRPCInferenceServiceStub(self._channel)
        metadata = [("triton_grpc_error", "true")] if self.real_errors else []
        self._call = stub.ModelStreamInfer(iter(self._outgoing.get, None), metadata=metadata)
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def send(self, fields: Mapping[str, Any], **options: Any) -> None:
        """Starts a request; see `infer_request`. `sent_at` is when."""
        request = infer_request(fields, **options)
        self.sent_at = time.monotonic()
        self._outgoing.put(request)

    def of(self, request_id: str = "") -> list[Message]:
        """What came for a request so far."""
        return [message for message in list(self.messages) if message.request_id == request_id]

    def over(self, request_id: str = "") -> bool:
        """Whether a request has ended."""
        return any(message.final for message in self.of(request_id))

    def wait(self, request_id: str = "", *, within_s: float = PATIENCE_S) -> list[Message]:
        """All messages of a request once it has ended."""
        until(lambda: self.over(request_id) or self.status, within_s=within_s, what=f"end of request {request_id!r}")
        return self.of(request_id)

    def cancel(self) -> None:
        """Cancels the call and with it all its requests."""
        self._call.cancel()

    def end(self) -> None:
        """No more requests; the call ends with the last of those that run."""
        self._outgoing.put(None)

    def close(self) -> None:
        """Ends the call in order and waits for its end."""
        self.end()
        self._thread.join(PATIENCE_S)
        self._call.cancel()
        self._channel.close()

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.cancel()
        self.close()

    def _collect(self) -> None:
        try:
            for response in self._call:
                self.messages.append(_message(response))
            self.status = grpc.StatusCode.OK
        except grpc.RpcError as exc:
            self.details = exc.details() or ""
            self.status = exc.code()


def _message(response: service_pb2.ModelStreamInferResponse) -> Message:
    inferred = response.infer_response
    return Message(
        at=time.monotonic(),
        request_id=inferred.id,
        tensors=_tensors(inferred),
        final=inferred.parameters["triton_final_response"].bool_param if inferred.parameters else False,
        error=response.error_message,
    )


def _tensors(response: service_pb2.ModelInferResponse) -> dict[str, Any]:
    tensors = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            array = deserialize_bytes_tensor(raw)
        else:
            array = np.frombuffer(raw, dtype=triton_to_np_dtype(output.datatype))
        tensors[output.name] = array.reshape(tuple(output.shape))
    return tensors


def channel(server: TritonServer) -> grpc.Channel:
    """A gRPC connection of its own."""
    return grpc.insecure_channel(server.grpc_url, options=[("grpc.use_local_subchannel_pool", 1)])


def unary(server: TritonServer, fields: Mapping[str, Any], **options: Any) -> tuple[grpc.StatusCode, str]:
    """Status and details of a unary ModelInfer, which must fail."""
    with channel(server) as connection:
        try:
            GRPCInferenceServiceStub(connection).ModelInfer(infer_request(fields, **options), timeout=PATIENCE_S)
        except grpc.RpcError as exc:
            return exc.code(), exc.details() or ""
    raise AssertionError("the call succeeded")


def grpc_error(server: TritonServer, fields: Mapping[str, Any], **options: Any) -> tuple[grpc.StatusCode, str]:
    """Status and details of a streamed request, which must fail."""
    with GrpcStream(server, real_errors=True) as call:
        call.send(fields, **options)
        until(lambda: call.status, what="the end of the stream")
        assert call.status is not None
        return call.status, call.details


def grpc_stream(server: TritonServer, fields: Mapping[str, Any], **options: Any) -> list[Message]:
    """All messages of one streamed request."""
    with GrpcStream(server) as call:
        call.send({"stream": True, **fields}, **options)
        return call.wait(options.get("request_id", ""))


# --- metrics ------------------------------------------------------------------------------------------------------


def metrics(server: TritonServer) -> Scrape:
    """A look at /metrics."""
    return scrape(server.metrics_url)


def wait_idle(server: TritonServer, *, within_s: float = PATIENCE_S) -> float:
    """Waits until no model holds or runs anything; returns the seconds it took.

    Gauges are published a little later than things happen, so one look may see the time before the work: they have to
    stay at 0.
    """
    started = idle_since = time.monotonic()

    def settled() -> bool:
        nonlocal idle_since
        if busy(metrics(server)):
            idle_since = time.monotonic()
        return time.monotonic() - idle_since > _SETTLED_S

    until(settled, within_s=within_s, what="all gauges at 0")
    return idle_since - started
