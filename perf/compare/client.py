"""The closed loop of a load over one raw gRPC stream.

While it runs, a response of the server costs the client a time stamp and a reference to its bytes; they are decoded
when the window is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from tritonclient.grpc import service_pb2

from perf.load.requests import Load, Request, Response, Run
from tools.load import Stream, request_bytes

_POLL_S = 0.05
_OUTPUTS = ("output_ids", "finish_reason")


def run(url: str, model: str, load: Load, report: Callable[[str], None] = lambda text: None) -> Run:
    """Runs a load against a model of a server; requests that are left over at the end are cancelled.

    Args:
        url: host:port of the gRPC endpoint.
        model: the entry model, or a subserver that is called directly.
        load: what to send.
        report: told the progress.

    Raises:
        RuntimeError: a request failed.
    """
    loop = _Loop(url, model, load)
    try:
        return loop.run(report)
    finally:
        loop.close()


class _Loop:
    def __init__(self, url: str, model: str, load: Load) -> None:
        self._model = model
        self._load = load
        self._responses: list[Response] = []
        self._stream = Stream(url, keep=True, on_finished=self._next)
        self._stopped = False

    def run(self, report: Callable[[str], None]) -> Run:
        load, begin = self._load, time.perf_counter()
        for _ in range(load.in_flight):
            self._send()
        while not load.over(time.perf_counter() - begin, self._whole):
            report(f"{self._whole} responses")
            time.sleep(_POLL_S)
            self._check()
        end = time.perf_counter()
        self.close()
        self._decode()
        return Run(self._responses, begin + load.warm_up_s, end)

    def close(self) -> None:
        """Cancels what is left."""
        if not self._stopped:
            self._stopped = True
            self._stream.close()

    def _check(self) -> None:
        """Looks at the newest response only: a server that refuses requests refuses them all."""
        arrivals = self._stream.arrivals
        if arrivals.payloads and (error := _decoded(arrivals.payloads[-1]).error_message):
            raise RuntimeError(error)
        if arrivals.errors:
            raise RuntimeError(arrivals.errors[0])

    @property
    def _whole(self) -> int:
        return max(0, self._stream.arrivals.finished - self._load.in_flight)

    def _next(self) -> None:
        if not self._stopped:
            self._send()

    def _send(self) -> None:
        request = self._load.request(len(self._responses))
        payload = _bytes(self._model, request)
        self._responses.append(Response(request=request))
        self._stream.send(payload)

    def _decode(self) -> None:
        arrivals = self._stream.arrivals
        for at_s, payload in zip(arrivals.times, arrivals.payloads, strict=True):
            message = _decoded(payload)
            if message.error_message:
                raise RuntimeError(message.error_message)
            answer = message.infer_response
            response = self._responses[int(answer.id)]
            for tensor, content in zip(answer.outputs, answer.raw_output_contents, strict=True):
                if tensor.name == "output_ids" and content:
                    response.arrived(at_s, np.frombuffer(content, np.int32).tolist())
                response.ended |= tensor.name == "finish_reason"


def _decoded(payload: bytes) -> service_pb2.ModelStreamInferResponse:
    return service_pb2.ModelStreamInferResponse.FromString(payload)


def _bytes(model: str, request: Request) -> bytes:
    return request_bytes(
        model,
        request.input_ids,
        max_tokens=request.max_tokens,
        request_id=str(request.index),
        outputs=_OUTPUTS,
        seed=request.seed,
    )
