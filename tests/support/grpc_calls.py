"""ModelStreamInfer with any number of requests on one call, and calls that must fail."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.support.waiting import PATIENCE_S, until
from tokenrouter.client import input_array
from tools.load import add_input, open_channel, tensors_of
from tools.tritonserver.server import TritonServer


def infer_request(
    fields: Mapping[str, Any],
    *,
    model: str = "tokenrouter",
    request_id: str = "",
    timeout_us: int = 0,
    empty_final: bool = True,
    parameters: Mapping[str, bool] | None = None,
) -> service_pb2.ModelInferRequest:
    """A ModelInferRequest. Values that are arrays are sent as they are, others as the declared type in shape [1, n]."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in fields.items():
        add_input(request, name, value if isinstance(value, np.ndarray) else input_array(name, value))
    if empty_final:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in (parameters or {}).items():
        request.parameters[name].bool_param = value
    if timeout_us:
        request.parameters["timeout"].int64_param = timeout_us
    return request


@dataclass(frozen=True)
class Message:
    """One message of a gRPC stream.

    Attributes:
        at: when it came, `time.monotonic`.
        request_id: whose it is.
        tensors: outputs by name.
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
    """

    server: TritonServer
    messages: list[Message] = field(default_factory=list)
    status: grpc.StatusCode | None = None
    details: str = ""
    sent_at: float = 0.0

    def __post_init__(self) -> None:
        self._channel = open_channel(self.server.grpc_url)
        self._outgoing: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        stub = GRPCInferenceServiceStub(self._channel)
        self._call = stub.ModelStreamInfer(iter(self._outgoing.get, None))
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
        tensors=tensors_of(inferred),
        final=inferred.parameters["triton_final_response"].bool_param if inferred.parameters else False,
        error=response.error_message,
    )


def unary(server: TritonServer, fields: Mapping[str, Any], **options: Any) -> tuple[grpc.StatusCode, str]:
    """Status and details of a unary ModelInfer, which must fail."""
    with open_channel(server.grpc_url) as connection:
        try:
            GRPCInferenceServiceStub(connection).ModelInfer(infer_request(fields, **options), timeout=PATIENCE_S)
        except grpc.RpcError as exc:
            return exc.code(), exc.details() or ""
    raise AssertionError("the call succeeded")


def grpc_error(server: TritonServer, fields: Mapping[str, Any], **options: Any) -> tuple[str, str]:
    """Triton's code and the text of a streamed request, which must fail.

    A gRPC status (``triton_grpc_error``) is not asked for: Triton 2.51 races with itself then, see docs/security.md.
    """
    with GrpcStream(server) as call:
        call.send(fields, parameters={"return_error_code": True}, **options)
        coded = re.fullmatch(r"\[([A-Z_]+)\] (.*)", call.wait()[-1].error, re.DOTALL)
        assert coded, call.messages
        return coded[1], coded[2]


def grpc_stream(server: TritonServer, fields: Mapping[str, Any], **options: Any) -> list[Message]:
    """All messages of one streamed request."""
    with GrpcStream(server) as call:
        call.send({"stream": True, **fields}, **options)
        return call.wait(options.get("request_id", ""))
