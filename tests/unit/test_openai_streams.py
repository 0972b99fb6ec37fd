"""Answers in front of a scripted Triton: events, failures before and behind the first of them, clients that leave."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import typer
from httpx2 import Response
from tritonclient.grpc import service_pb2

from tests.support.openai_server import served
from tests.support.waiting import PATIENCE_S, until
from tokenrouter.openai_api.__main__ import main
from tools.demo_models.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = build_tokenizer()
TEXT = {"model": "tokenrouter", "prompt": "5+7="}


def answer(text: str, reason: str = "", *, error: str = "") -> bytes:
    """A message of a response, one token a character."""
    found = service_pb2.ModelStreamInferResponse(error_message=error)
    values = {"output_ids": b"".join(token.to_bytes(4, "little") for token in TOKENIZER.encode(text).ids)}
    values |= {"finish_reason": len(reason).to_bytes(4, "little") + reason.encode()} if reason else {}
    for name, raw in values.items():
        found.infer_response.outputs.add(name=name)
        found.infer_response.raw_output_contents.append(raw)
    return bytes(found.SerializeToString())


class FakeTriton(grpc.GenericRpcHandler):
    """Writes three tokens in two messages; refuses a seed of 13 at once and fails at one of 14 in the middle.

    With a seed of 15 it writes nothing, with one of 16 a token, and then waits until the client leaves.
    """

    def __init__(self) -> None:
        self.left = threading.Event()
        self.asked = 0

    def service(self, details: Any) -> Any:
        assert details.method == "/inference.GRPCInferenceService/ModelStreamInfer"
        return grpc.stream_stream_rpc_method_handler(self._generate)

    def _generate(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        request = service_pb2.ModelInferRequest.FromString(next(requests))
        given = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents, strict=True))
        seed = int.from_bytes(given.get("seed", b""), "little")
        if seed == 13:
            yield answer("", error="[INVALID_ARG] seed is 13")
            return
        if seed in (15, 16):
            context.add_callback(self.left.set)
            self.asked += 1
            yield answer("1" * (seed - 15))
            self.left.wait(PATIENCE_S)
            return
        yield answer("12")
        yield answer("", error="[INTERNAL] seed is 14") if seed == 14 else answer("3", "length")


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    return FakeTriton()


@pytest.fixture(scope="module")
def base(triton: FakeTriton) -> Iterator[str]:
    """URL of the server in front of it."""
    server = grpc.server(ThreadPoolExecutor(4), handlers=[triton])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with served(ROOT / "model_repository", f"127.0.0.1:{port}") as url:
        yield url
    server.stop(None).wait()


def posted(base: str, **fields: Any) -> Response:
    response: Response = httpx2.post(f"{base}/v1/completions", json={**TEXT, **fields}, trust_env=False)
    return response


def test_a_whole_answer_and_a_stream(base: str) -> None:
    whole = posted(base).json()
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("123", 3)
    stream = posted(base, stream=True)
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done, nothing = stream.text.split("\n\n")
    texts = [json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks]
    assert (texts, done, nothing) == (["1", "2", "3", ""], "data: [DONE]", "")


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_first_event_has_a_status(base: str, stream: bool) -> None:
    refused = posted(base, seed=13, stream=stream)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "seed is 13")


def test_a_stream_that_fails_says_so_in_its_last_event(base: str) -> None:
    assert posted(base, seed=14).status_code == 500
    failed = posted(base, seed=14, stream=True)
    *_, last, done, _ = failed.text.split("\n\n")
    assert (failed.status_code, failed.text.count('"error"'), done) == (200, 1, "data: [DONE]")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "seed is 14"


@pytest.mark.parametrize(
    ("fields", "awaited"),
    [({"seed": 16, "stream": True}, b"data: {"), ({"seed": 15, "stream": True}, b""), ({"seed": 16}, b"")],
    ids=["stream", "stream without a token", "whole"],
)
def test_a_client_that_leaves_cancels_its_request(
    triton: FakeTriton, base: str, fields: dict[str, Any], awaited: bytes
) -> None:
    triton.left.clear()
    triton.asked = 0
    body = json.dumps({**TEXT, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2])), PATIENCE_S) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        received = b""
        while awaited not in received:
            received += client.recv(1 << 16)
        until(lambda: triton.asked)
    assert triton.left.wait(PATIENCE_S)


@pytest.mark.parametrize("url", ["", ":8001", "127.0.0.1:", "host:0", "host:65536", "host:http", "http://host:8001"])
def test_what_is_no_address_of_triton_ends_the_command(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as raised:
        main(ROOT / "model_repository", url=url)
    assert raised.value.exit_code == 2
    assert capsys.readouterr().err.startswith("error: --url: ")
