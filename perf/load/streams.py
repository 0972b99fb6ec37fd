"""One streamed response: over a gRPC call of its own, or over Triton's generate_stream (server-sent events)."""

from __future__ import annotations

import http.client
import json
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from perf.load.timing import Timing
from tools.load import METHOD


def over_grpc(
    channel: grpc.Channel, request: bytes, timing: Timing, *, timeout_s: float, cancel_after: int = 0
) -> Timing:
    """Sends a request and waits for its end. Fills the timing and returns it; what fails is its `error`.

    Args:
        channel: open connection to Triton's gRPC endpoint.
        request: serialised ModelInferRequest with the outputs `output_ids` and `finish_reason`.
        timing: of this request.
        timeout_s: after which the call is given up.
        cancel_after: tokens after which the client cancels; 0 for never.
    """
    call = channel.stream_stream(METHOD, response_deserializer=service_pb2.ModelStreamInferResponse.FromString)(
        iter((request,)), timeout=timeout_s
    )
    try:
        for message in call:
            timing.error = timing.error or message.error_message
            _read_tensors(message.infer_response, timing)
            if cancel_after and timing.tokens >= cancel_after and not timing.finish_reason:
                timing.finish_reason = "cancelled"
                return timing
    except grpc.RpcError as exc:
        timing.error = f"{exc.code().name}: {exc.details()}"
    finally:
        call.cancel()
    return timing.end()


def _read_tensors(response: Any, timing: Timing) -> None:
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "output_ids":
            timing.add(output.shape[-1])
        elif output.name == "finish_reason":
            timing.finish_reason = content[4:].decode()  # after its length


def over_http(connection: http.client.HTTPConnection, model: str, body: bytes, timing: Timing) -> Timing:
    """The same with a JSON object of the tensors. The connection's timeout bounds every read; it can be used again."""
    try:
        connection.request("POST", f"/v2/models/{model}/generate_stream", body)
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data:") or response.status != http.client.OK:
                _read_event(json.loads(line.removeprefix(b"data:")), timing)
    except (OSError, http.client.HTTPException, ValueError) as exc:
        connection.close()
        timing.error = f"{type(exc).__name__}: {exc}"
    return timing.end()


def _read_event(event: dict[str, Any], timing: Timing) -> None:
    timing.error = timing.error or str(event.get("error", ""))
    ids = event.get("output_ids", [])
    timing.add(len(ids) if isinstance(ids, list) else 1)
    timing.finish_reason = timing.finish_reason or str(event.get("finish_reason", ""))
