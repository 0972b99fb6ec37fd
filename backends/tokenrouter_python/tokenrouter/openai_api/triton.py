"""The one client of Triton in this server: streams of generated tokens, readiness, the metrics page."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as grpcclient
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tokenrouter.client import infer_input
from tokenrouter.openai_api.errors import ApiError, from_triton
from tokenrouter.openai_api.tokens import Token

_CODED = re.compile(r"\[([A-Z_]+)\] (.*)", re.DOTALL)
_CODES = {"INVALID_ARG": grpc.StatusCode.INVALID_ARGUMENT, "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE}
_WORDS = {
    "has no available versions": grpc.StatusCode.UNAVAILABLE,
    "is not found": grpc.StatusCode.NOT_FOUND,
    "erver is stopping": grpc.StatusCode.UNAVAILABLE,
    "erver exiting": grpc.StatusCode.UNAVAILABLE,
}
"""What Triton's core says of a model or a server that is away."""
_CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A Triton that was restarted is found again within a second; gRPC alone waits up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@dataclass(slots=True)
class Delta:
    """One response of the stream: new tokens, and with the last one why the response ended and what it was made of."""

    tokens: list[Token]
    finish_reason: str = ""
    totals: dict[str, Any] = field(default_factory=dict)


class Triton:
    """Calls models of one Triton server.

    Args:
        url: host:port of the gRPC endpoint.
    """

    def __init__(self, url: str) -> None:
        self._client = grpcclient.InferenceServerClient(url, channel_args=_CHANNEL)

    async def close(self) -> None:
        await self._client.close()

    async def ready(self, models: list[str]) -> list[str]:
        """Which of these models are not ready; all of them if the server does not answer."""
        try:
            return [name for name in models if not await self._client.is_model_ready(name)]
        except InferenceServerException:
            return models

    async def generate(self, model: str, parameters: Mapping[str, str], **fields: Any) -> AsyncIterator[Delta]:
        """Streams one response. Leaving the iterator cancels the request.

        Args:
            model: Triton's name of the model.
            parameters: of the request, beside its tensors.
            fields: input tensors by name; None is left out.

        Raises:
            ApiError: Triton or the model refused or failed.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        outputs = ["output_ids", "finish_reason"]
        outputs += ["output_log_probs"] if given.get("return_log_probs") else []
        outputs += ["routing"] if given.get("return_routing") else []

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": model,
                "inputs": [infer_input(name, value) for name, value in {**given, "stream": True}.items()],
                "outputs": [grpcclient.InferRequestedOutput(name) for name in outputs],
                "parameters": {**parameters, "return_error_code": True},
            }

        call = self._client.stream_infer(requests())
        failure: ApiError | None = None
        try:
            async for result, error in call:
                if error is None:
                    yield _delta(result.get_response())
                else:  # the stream ends by itself: to cancel it just then is a race inside Triton
                    failure = _failure(str(error.message()))
            if failure is not None:
                raise failure
        except grpc.aio.AioRpcError as exc:
            raise from_triton(exc.code(), exc.details() or exc.code().name) from exc
        finally:
            call.cancel()


def _failure(text: str) -> ApiError:
    """An error out of a stream: ours begins with its code, Triton's own are known by their words.

    Triton would end the stream with a gRPC status if it were asked to (`triton_grpc_error`), but 2.51 races with itself
    there and ends by a segmentation fault, after some 2,300 refused requests.
    """
    if coded := _CODED.fullmatch(text):
        name, text = coded.groups()
        return from_triton(_CODES.get(name, grpc.StatusCode.INTERNAL), text)
    return from_triton(next((code for words, code in _WORDS.items() if words in text), grpc.StatusCode.INTERNAL), text)


def _delta(response: service_pb2.ModelInferResponse) -> Delta:
    raw = dict(zip((output.name for output in response.outputs), response.raw_output_contents, strict=True))
    tokens = [Token(int(token)) for token in np.frombuffer(raw.get("output_ids", b""), np.int32)]
    if "output_log_probs" in raw:
        for token, log_prob in zip(tokens, np.frombuffer(raw["output_log_probs"], np.float32), strict=False):
            token.log_prob = float(log_prob)
    routing: dict[str, Any] = json.loads(raw["routing"][4:]) if "routing" in raw else {}
    _name_writers(tokens, routing.pop("runs", []))
    return Delta(tokens, raw["finish_reason"][4:].decode() if "finish_reason" in raw else "", routing)


def _name_writers(tokens: list[Token], runs: list[dict[str, Any]]) -> None:
    writers = [run["model"] for run in runs for _ in range(run["end"] - run["start"])]
    for token, writer in zip(tokens, writers, strict=False):
        token.writer = writer
