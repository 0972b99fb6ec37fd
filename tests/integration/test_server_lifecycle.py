"""Models that come, go, die and come again while requests run; the server's own end."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.deaths import kill_model
from tests.support.grpc_calls import GrpcStream, Message
from tests.support.http_calls import HttpStream, answer, refusal
from tests.support.repositories import emulated_spec, write_emulated
from tests.support.servers import shared_memory
from tests.support.waiting import PATIENCE_S, ended, until, wait_idle
from tests.support.watch import WATCH
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

MODELS = ("small", "large")
CONNECT_S = 1.0
ENTRIES = {"tokenrouter": round(1000 * CONNECT_S), "patient": 60_000}
ONLY_SMALL = {"policy": "single", "policy_params": json.dumps({"model": "small"})}
ONLY_LARGE = {"policy": "single", "policy_params": json.dumps({"model": "large"})}


OPTIONS = {"step_ms": 2.0, "max_seq_len": 16_384, "kv_cache_config": {"max_tokens": 200_000}}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two entry models that differ in how long they wait for a model; steps of 2 ms."""
    folder = tmp_path_factory.mktemp("lifecycle") / "repository"
    for name, connect_ms in ENTRIES.items():
        entry = {"name": name, "aliases": {}, "connect_timeout_ms": connect_ms}
        write_emulated(folder, emulated_spec(entry=entry, options=OPTIONS))
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    """A server that loads models on demand; the entry models first."""
    arguments = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in ENTRIES)]
    # Its models come and go, so only tritonserver's own process has to live.
    with WATCH.over(TritonServer(repository, extra_args=arguments, exit_timeout_s=30), models=False) as running:
        yield running


def post(server: TritonServer, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=60)
    try:
        connection.request("POST", path, headers=server.admin_headers)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def load(server: TritonServer, *models: str) -> None:
    for model in models:
        assert post(server, f"/v2/repository/models/{model}/load") == 200


def unload(server: TritonServer, model: str) -> None:
    """Triton answers at once and ends the model's process later."""
    assert post(server, f"/v2/repository/models/{model}/unload") == 200
    until(lambda: model not in server.stub_pids(), what=f"the process of {model} is gone")


@pytest.fixture
def loaded(server: TritonServer) -> TritonServer:
    """The server with all models."""
    load(server, *MODELS)
    assert answer(server, "patient", text_input="ready", max_tokens=5)["text_output"] == "readyready"
    return server


def test_a_request_waits_for_models_that_load_later(server: TritonServer) -> None:
    for model in MODELS:
        unload(server, model)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answer, server, "patient", text_input="early", max_tokens=5)
        load(server, "large")
        assert not waiting.done()
        load(server, "small")
        assert waiting.result(PATIENCE_S)["text_output"] == "earlyearly"


def test_a_model_that_is_not_loaded_is_named(loaded: TritonServer) -> None:
    """After the entry model's time, while the other entry model still waits; who does not need it waits for nothing."""
    unload(loaded, "large")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answer, loaded, "patient", text_input="early", max_tokens=5)
        started = time.monotonic()
        _, message = refusal(loaded, text_input="hello", max_tokens=5)
        took = time.monotonic() - started
        assert "'large' is not connected" in message
        assert "is it loaded" in message
        assert took >= CONNECT_S - 0.1
        assert answer(loaded, text_input="hello", max_tokens=5, **ONLY_SMALL)["text_output"] == "hellohello"
        assert not waiting.done()
        load(loaded, "large")
        assert waiting.result(PATIENCE_S)["text_output"] == "earlyearly"


def texts(messages: list[Message]) -> str:
    return "".join(message.text for message in messages)


def test_unloading_a_model_under_its_requests(loaded: TritonServer) -> None:
    """Requests that hold KV at the model finish first; who comes after it is gone is told which model is missing."""
    kinds = {"routed": {}, "at large": ONLY_LARGE, "at small": ONLY_SMALL}
    with GrpcStream(loaded) as call:
        for i, (name, policy) in enumerate(kinds.items()):
            fields = {"text_input": f"{i}" * 900, "max_tokens": 900, "stream": True, **policy}
            call.send(fields, request_id=name)
        until(lambda: all(call.of(name) for name in kinds), what="all streams")
        unload(loaded, "large")
        for i, name in enumerate(kinds):
            messages = call.wait(name)
            assert not messages[-1].error
            assert texts(messages) == f"{i}" * 900
        until(lambda: "large" not in loaded.stub_pids(), what="the model is gone")
        call.send({"text_input": "late", "max_tokens": 5}, request_id="late")
        assert "'large' is not connected" in call.wait("late")[-1].error
        load(loaded, "large")
    wait_idle(loaded)
    assert answer(loaded, text_input="again", max_tokens=5)["text_output"] == "againagain"


def test_a_model_that_is_loaded_later_holds_no_connection_of_clients(loaded: TritonServer) -> None:
    """tritonserver starts its process while clients are connected, and closes none of its descriptors in it."""
    unload(loaded, "large")
    with socket.create_connection(("127.0.0.1", loaded.ports.http), timeout=PATIENCE_S) as client:
        client.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        load(loaded, "large")
        client.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while client.recv(1 << 16):  # a TimeoutError if the end does not come
            pass


def test_a_killed_model_process(loaded: TritonServer) -> None:
    """kill -9 of a model's process in mid-request.

    Hand-offs do not pass through Triton, so Triton notices with the next call that goes to the model directly, or with
    a load; it starts the process again, and the responses go on with the same tokens.
    """
    with GrpcStream(loaded) as call:
        call.send({"text_input": "k" * 900, "max_tokens": 900, "stream": True}, model="patient", request_id="patient")
        call.send({"text_input": "h" * 900, "max_tokens": 900, "stream": True}, request_id="hasty")
        until(lambda: call.of("patient") and call.of("hasty"), what="both streams")
        kill_model(loaded.stub_pids()["large"], "large", loaded.metrics_url)
        assert "'large' is not connected" in call.wait("hasty")[-1].error
        unload(loaded, "large")
        load(loaded, "large")
        messages = call.wait("patient")
        assert not messages[-1].error
        assert texts(messages) == "k" * 900
    wait_idle(loaded)


def test_a_server_that_stops_under_load_lets_its_requests_finish(loaded: TritonServer) -> None:
    """Last but one: it ends the server of this file, after all that has happened to it."""
    lengths, finished, errors, code = stopped_under_load(loaded, tokens=400)
    assert lengths == [400] * 8
    assert finished == [True] * 8
    assert errors == [""] * 8
    assert code == 0


def test_a_server_that_stops_under_load_breaks_off_what_takes_too_long(repository: Path) -> None:
    """When the grace period is over, responses end with an error: nobody takes the part for the whole."""
    with TritonServer(repository, exit_timeout_s=2) as server:
        _, finished, errors, code = stopped_under_load(server, tokens=4000)
    assert finished == [False] * 8
    assert all("the server is stopping" in error for error in errors), errors
    assert code == 0
    assert "Segmentation fault" not in server.log_text()


def stopped_under_load(server: TritonServer, tokens: int) -> tuple[list[int], list[bool], list[str], int | None]:
    """SIGTERM while eight streams run, and nothing is left of the server.

    Returns:
        How many tokens each stream got, whether its end came, with which error, and the server's exit code.
    """
    directory, regions = server.run_dir, shared_memory(server.run_dir)
    pids = [server.pid, *server.stub_pids().values()]
    fields = [{"text_input": f"{i}" * tokens, "max_tokens": tokens, "stream": True} for i in range(8)]
    with GrpcStream(server) as call, ExitStack() as stack:
        for i in range(4):
            call.send(fields[i], request_id=f"{i}")
        streams = [stack.enter_context(HttpStream(server, fields[i])) for i in range(4, 8)]
        answers = [iter(stream) for stream in streams]
        begun = [[next(events)] for events in answers]
        until(lambda: all(call.of(f"{i}") for i in range(4)), what="four gRPC streams")
        with ThreadPoolExecutor(6) as pool:
            stopping = pool.submit(server.stop)
            hanging_up = pool.submit(_hang_up, call)
            rest = list(pool.map(_drain, answers, streams))
            hanging_up.result()
            code = stopping.result()
        until(lambda: call.status, what="the end of the gRPC stream")
        messages = [call.of(f"{i}") for i in range(4)]
    assert all(map(ended, pids))
    assert not directory.exists()
    assert regions
    assert not any(region.exists() for region in regions)
    whole = [events + more for events, more in zip(begun, rest, strict=True)]
    lengths = [len("".join(event.get("text_output", "") for event in events)) for events in whole]
    finished = ["finish_reason" in events[-1] for events in whole]
    lengths += [len(texts(some)) for some in messages]
    finished += [any(message.finish_reason for message in some) for some in messages]
    errors = [events[-1].get("error", "") for events in whole] + [some[-1].error for some in messages]
    return lengths, finished, errors, code


def _hang_up(call: GrpcStream) -> None:
    """Closes the call when its four requests are over or it broke: Triton waits for open calls, too."""
    until(lambda: call.status or all(call.over(f"{i}") for i in range(4)), what="the end of four requests")
    if call.status is None:
        call.close()


def _drain(events: Iterator[dict[str, Any]], stream: HttpStream) -> list[dict[str, Any]]:
    """What still comes, until the end or until the connection breaks; then closes it, as Triton waits for that."""
    seen: list[dict[str, Any]] = []
    with suppress(OSError, http.client.HTTPException):
        seen.extend(events)
    stream.close()
    return seen
