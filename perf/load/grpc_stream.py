"""One streamed response over a gRPC call of its own."""

from __future__ import annotations

from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from perf.load.timing import Timing

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def run(channel: grpc.Channel, request: bytes, timing: Timing, *, timeout_s: float, cancel_after: int = 0) -> Timing:
    """Sends a request and waits for its end.

    Args:
        channel: open connection to Triton's gRPC endpoint.
        request: serialised ModelInferRequest with the outputs `output_ids` and `finish_reason`.
        timing: filled and returned; what fails is its `error`.
        timeout_s: after which the call is given up.
        cancel_after: tokens after which the client cancels; 0 for never.
    """
    call = channel.stream_stream(METHOD, response_deserializer=service_pb2.ModelStreamInferResponse.FromString)(
        iter((request,)), timeout=timeout_s
    )
    try:
        for message in call:
            if message.error_message:
                timing.error = message.error_message
            _read(message.infer_response, timing)
            if cancel_after and timing.tokens >= cancel_after and not timing.finish_reason:
                timing.finish_reason = "cancelled"
                return timing
    except grpc.RpcError as exc:
        timing.error = f"{exc.code().name}: {exc.details()}"
    finally:
        call.cancel()
    if not timing.error and not timing.finish_reason:
        timing.error = f"the stream ended after {timing.tokens} tokens without a finish_reason"
    return timing


def _read(response: Any, timing: Timing) -> None:
    for index, output in enumerate(response.outputs):
        if output.name == "output_ids":
            timing.add(output.shape[-1])
        elif output.name == "finish_reason":
            timing.finish_reason = response.raw_output_contents[index][4:].decode()
