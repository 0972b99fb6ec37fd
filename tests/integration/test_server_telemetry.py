"""Spans of a real server at a receiver of OTLP over HTTP, which decodes them with OpenTelemetry's own protobuf."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest

from tests.support.http_calls import answer
from tests.support.openai_server import served
from tests.support.repositories import byte_tokenizer, emulated_spec, write_emulated
from tests.support.waiting import until
from tokenrouter.client import infer_input
from tokenrouter.direct_http import http_open
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

PARENT = "b7ad6b7169203331"
BODY = {"text_input": "spans", "max_tokens": 12, "policy": "random", "seed": 3, "return_routing": True}


class Receiver:
    """Spans by trace id, as they come."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Any]] = {}
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    raise AssertionError("nobody asked for gzip")
                told = trace_service.ExportTraceServiceRequest.FromString(body)
                for resource in told.resource_spans:
                    service = {each.key: each.value.string_value for each in resource.resource.attributes}
                    assert (self.path, service["service.name"]) == ("/v1/traces", "tokenrouter")
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            spans.setdefault(span.trace_id.hex(), []).append(span)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def of(self, number: int) -> list[Any]:
        """All spans of a trace, once its request's own is there."""
        name = "tokenrouter.request"
        until(lambda: any(span.name == name for span in self.spans.get(trace(number), [])), what=f"trace {number}")
        return self.spans[trace(number)]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def trace(number: int) -> str:
    return f"{number:032x}"


def header(number: int, flags: str = "01") -> str:
    return f"00-{trace(number)}-{PARENT}-{flags}"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced") / "repository"
    return write_emulated(folder, emulated_spec(options={"max_seq_len": 512}), byte_tokenizer())


@pytest.fixture(scope="module")
def server(receiver: Receiver, repository: Path) -> Iterator[TritonServer]:
    endpoint = f"http://127.0.0.1:{receiver.server.server_port}"
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with TritonServer(repository, env=env, exit_timeout_s=4) as running:
        yield running


def asked(url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with http_open(request, timeout=60) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def generated(server: TritonServer, **fields: str) -> dict[str, Any]:
    """The routing of a response; Triton forwards no headers of /generate, so a trace stands in the body."""
    found: dict[str, Any] = json.loads(answer(server, **BODY, **fields)["routing"])
    return found


def facts(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def check(spans: list[Any], routing: dict[str, Any]) -> None:
    """One span for the request under its caller's, and in it those of its visits and hand-offs."""
    (root,) = [span for span in spans if span.parent_span_id.hex() == PARENT]
    inside = [span for span in spans if span is not root]
    assert all(span.parent_span_id == root.span_id for span in inside)
    names = [span.name for span in inside]
    assert names.count("queue") == 1
    assert names.count("hand-off") == routing["handoffs"]
    assert sum(name.startswith("visit ") for name in names) == routing["handoffs"] + 1
    for model, tokens in routing["tokens"].items():
        visits = [facts(span) for span in inside if span.name == f"visit {model}"]
        assert sum(each["tokenrouter.tokens"] for each in visits) == tokens
        assert facts(root)[f"tokenrouter.tokens.{model}"] == tokens
    for span in spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano


def test_a_trace_comes_over_http_grpc_and_v1(server: TritonServer, receiver: Receiver, repository: Path) -> None:
    routing = generated(server, traceparent=header(1), tracestate="vendor=1")
    check(receiver.of(1), routing)
    grpc = pytest.importorskip("tritonclient.grpc")
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda **_: None, headers={"traceparent": header(2)})
        fields = {**BODY, "stream": False}
        client.async_stream_infer("tokenrouter", [infer_input(name, value) for name, value in fields.items()])
        check(receiver.of(2), routing)
    with served(repository, server.grpc_url) as base:
        body = {"model": "tokenrouter", "prompt": "spans", "policy": "random", "seed": 3, "max_tokens": 12}
        whole = {**body, "temperature": 0, "return_routing": True}
        reply = asked(f"{base}/v1/completions", whole, traceparent=header(3))["choices"][0]["routing"]
    check(receiver.of(3), {**routing, "tokens": {m: reply["writers"].count(m) for m in routing["tokens"]}})


def test_headers_that_are_malformed_or_not_sampled_do_no_harm(server: TritonServer, receiver: Receiver) -> None:
    for wrong in (header(4, "00"), header(5)[:-1], f"ff-{trace(6)}-{PARENT}-01", "x" * 5000, "-"):
        assert generated(server, traceparent=wrong)["handoffs"] > 0
    assert answer(server, **BODY, traceparent=7)["routing"]
    generated(server)
    generated(server, traceparent=header(8))
    receiver.of(8)
    assert not {trace(number) for number in (4, 5, 6, 7)} & receiver.spans.keys()


def test_requests_go_on_when_the_receiver_is_away(server: TritonServer, receiver: Receiver) -> None:
    receiver.server.shutdown()
    receiver.server.server_close()
    for number in range(9, 14):
        assert generated(server, traceparent=header(number))["handoffs"] > 0
