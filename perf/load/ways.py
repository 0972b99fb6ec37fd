"""The ways in: one known request over gRPC, Triton's HTTP, or `/v1`, streamed or whole, read to its end."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
from tritonclient.grpc import service_pb2

from perf.load.known import KnownAnswer, Reply
from tools.load import METHOD, open_channel, request_bytes, tensors_of

_OUTPUTS = ("output_ids", "finish_reason")
_HOST = "127.0.0.1"
_READ = 1 << 16


@dataclass(frozen=True)
class Endpoints:
    """Ports of a server on this machine; `openai` is 0 where `/v1` is not served."""

    http: int
    grpc: int
    openai: int = 0
    entry: str = "tokenrouter"


Way: TypeAlias = Callable[[Endpoints, KnownAnswer, float, bool], Reply]
"""Endpoints, what to ask, the client's patience in seconds, whether to stream."""


def over_grpc(to: Endpoints, known: KnownAnswer, patience_s: float, stream: bool) -> Reply:
    """One ModelStreamInfer call on a connection of its own."""
    fields = {**known.tensors, "stream": stream}
    request = request_bytes(to.entry, known.prompt, outputs=_OUTPUTS, **fields)
    reply = Reply()
    with open_channel(f"{_HOST}:{to.grpc}") as channel:
        call = channel.stream_stream(METHOD)(iter((request,)), timeout=patience_s)
        try:
            for payload in call:
                _read_message(service_pb2.ModelStreamInferResponse.FromString(payload), reply)
        except grpc.RpcError as exc:
            reply.timed_out = exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            reply.error = reply.error or f"{exc.code().name}: {exc.details()}"
    return reply


def _read_message(message: Any, reply: Reply) -> None:
    reply.error = reply.error or message.error_message
    tensors = tensors_of(message.infer_response)
    if (ids := tensors.get("output_ids")) is not None:
        reply.tokens += ids.ravel().tolist()
    if (reason := tensors.get("finish_reason")) is not None:
        reply.finish_reason = reason.ravel()[0].decode()


def over_http(to: Endpoints, known: KnownAnswer, patience_s: float, stream: bool) -> Reply:
    """Triton's /generate and /generate_stream."""
    path = f"/v2/models/{to.entry}/generate{'_stream' if stream else ''}"
    body = {"text_input": known.prompt, **known.tensors, "stream": stream}
    return _posted(to.http, path, body, patience_s, _read_generate)


def _read_generate(event: Mapping[str, Any], reply: Reply) -> None:
    reply.error = reply.error or str(event.get("error", ""))
    ids = event.get("output_ids", [])
    reply.tokens += ids if isinstance(ids, list) else [ids]
    reply.finish_reason = reply.finish_reason or str(event.get("finish_reason", ""))


def over_v1(to: Endpoints, known: KnownAnswer, patience_s: float, stream: bool) -> Reply:
    """The OpenAI-compatible completions."""
    body = {"model": to.entry, "prompt": known.prompt, **known.fields, "stream": stream}
    return _posted(to.openai, "/v1/completions", {**body, "return_routing": True}, patience_s, _read_completion)


def _read_completion(event: Mapping[str, Any], reply: Reply) -> None:
    if error := event.get("error"):
        reply.error = reply.error or str(error.get("message", error) if isinstance(error, dict) else error)
    for choice in event.get("choices", ()):
        reply.tokens += (choice.get("routing") or {}).get("token_ids", [])
        reply.finish_reason = reply.finish_reason or str(choice.get("finish_reason") or "")


def _posted(
    port: int, path: str, body: Mapping[str, Any], patience_s: float, read: Callable[[Mapping[str, Any], Reply], None]
) -> Reply:
    reply = Reply()
    until = time.monotonic() + patience_s
    with closing(http.client.HTTPConnection(_HOST, port, timeout=patience_s)) as connection:
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            for event in _events(response):
                read(event, reply)
                if time.monotonic() > until:
                    raise TimeoutError("the response takes longer than the client's patience")
            if response.status != http.client.OK:
                reply.error = reply.error or f"status {response.status}"
        except TimeoutError as exc:
            reply.timed_out, reply.error = True, str(exc)
        except (OSError, http.client.HTTPException, ValueError) as exc:
            reply.error = reply.error or f"{type(exc).__name__}: {exc}"
    return reply


def _events(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """JSON objects of a stream of events, or the only one of a whole answer."""
    if response.headers.get_content_type() != "text/event-stream":
        yield _object(response.read())
        return
    for line in _lines(response):
        if line.startswith(b"data:") and (content := line[5:].strip()) != b"[DONE]":
            yield _object(content)


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Unlike iteration over the response, it raises when the connection breaks before the last chunk."""
    rest = b""
    while data := response.read1(_READ):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    yield rest


def _object(text: bytes) -> Mapping[str, Any]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {"error": f"no object: {found!r}"}


WAYS: Mapping[str, tuple[Way, bool]] = MappingProxyType(
    {
        "gRPC, streamed": (over_grpc, True),
        "gRPC, whole": (over_grpc, False),
        "HTTP, streamed": (over_http, True),
        "HTTP, whole": (over_http, False),
        "/v1, streamed": (over_v1, True),
        "/v1, whole": (over_v1, False),
    }
)
