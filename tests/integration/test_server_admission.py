"""Who may come in: the queue, its limits and time-outs, and KV that is reserved before a request starts."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.grpc_calls import GrpcStream, grpc_error, grpc_stream
from tests.support.http_calls import RESPONSE_ERROR, answer, generate, refusal
from tests.support.servers import LARGE_POOL, QUEUE_LIMIT_S
from tests.support.waiting import metric, until
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

PROMPT = "abcdefgh" * 200
FOREVER = 100_000
SHORT = {"text_input": "abc", "max_tokens": 4, "policy": "single"}


class LongRequest:
    """A request that runs until it is cancelled, in steps of 1 ms; a context manager that waits until it runs."""

    def __init__(self, server: TritonServer, model: str) -> None:
        self._server, self._model = server, model
        self.stream = GrpcStream(server)

    def __enter__(self) -> GrpcStream:
        fields = {"text_input": PROMPT, "max_tokens": FOREVER, "stream": True, "policy": "single", "end_id": -1}
        self.stream.send(fields, model=self._model, request_id="long")
        until(lambda: self.stream.of("long"), what="the long request runs")
        return self.stream

    def __exit__(self, *exc: object) -> None:
        assert not self.stream.over("long")
        self.stream.__exit__(None, *exc)


def test_an_overloaded_server_refuses_what_the_queue_does_not_hold_and_serves_the_rest(shared: TritonServer) -> None:
    body = {**SHORT, "exclude_input_in_output": True}
    with ThreadPoolExecutor(40) as pool:
        with LongRequest(shared, "narrow"):
            calls = [pool.submit(generate, shared, body, model="narrow") for _ in range(40)]
            until(lambda: sum(call.done() for call in calls) == 36, what="all but four are refused")
        answers = [call.result() for call in calls]
    statuses = [status for status, _ in answers]
    assert statuses.count(200) == 4
    assert statuses.count(RESPONSE_ERROR) == 36
    assert all(reply["text_output"] == "abc" for status, reply in answers if status == 200)
    assert all("Exceeds maximum queue size" in reply["error"] for status, reply in answers if status != 200)


def test_overload_over_grpc_is_unavailable(shared: TritonServer) -> None:
    with LongRequest(shared, "narrow"), GrpcStream(shared) as call:
        for i in range(4):
            call.send(SHORT, model="narrow", request_id=str(i))
        until(lambda: metric(shared, "queued", model="narrow") == 4, what="four wait")
        status, details = grpc_error(shared, SHORT, model="narrow")
        assert status == "UNAVAILABLE"
        assert "Exceeds maximum queue size" in details


def test_a_waiting_request_is_refused_at_its_time_limit(shared: TritonServer) -> None:
    """Not before, and while the one that it waits for still runs."""

    def timed(_: int) -> tuple[float, str]:
        started = time.monotonic()
        _, error = refusal(shared, "reject", **SHORT)
        return time.monotonic() - started, error

    with LongRequest(shared, "reject"), ThreadPoolExecutor(3) as pool:
        for waited, error in pool.map(timed, range(3)):
            assert "Request timeout expired" in error
            assert waited >= QUEUE_LIMIT_S


def test_the_running_request_is_not_touched_by_the_queues_limit(shared: TritonServer) -> None:
    steps = round(1.5e3 * QUEUE_LIMIT_S)
    fields = {"text_input": PROMPT, "max_tokens": steps, "stream": True, "policy": "single", "end_id": -1}
    messages = grpc_stream(shared, fields, model="reject")
    assert messages[-2].finish_reason == "length"
    assert messages[-2].at - messages[0].at > QUEUE_LIMIT_S


def test_delayed_requests_are_served_after_all_others(shared: TritonServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        with LongRequest(shared, "delay") as long:
            late = [pool.submit(answer, shared, "delay", **SHORT) for _ in range(2)]
            until(lambda: metric(shared, "queued", model="delay") == 2, what="two wait")
            since = time.monotonic()
            until(lambda: time.monotonic() > since + 1.5 * QUEUE_LIMIT_S, what="the queue's limit is over")
            assert not any(future.done() for future in late)
            assert not long.over("long")
        assert all(future.result()["text_output"] == "abcabc" for future in late)


@pytest.mark.parametrize("model", ["tokenrouter", "narrow"])
def test_a_requests_own_limit_covers_waiting_and_running(shared: TritonServer, model: str) -> None:
    fields = {"text_input": PROMPT, "max_tokens": FOREVER, "stream": True, "policy": "single", "end_id": -1}
    messages = grpc_stream(shared, fields, model=model, timeout_us=800_000)
    last = [message for message in messages if message.tensors][-1]
    assert last.finish_reason == "timeout"
    assert 20 < sum(len(message.ids) for message in messages) < FOREVER


@pytest.mark.parametrize("model", ["tokenrouter", "ensemble", "small"])
def test_a_limit_in_the_body_of_generate(shared: TritonServer, model: str) -> None:
    """Triton's HTTP front end makes a custom parameter of it, and none of its own."""
    reply = answer(shared, model, text_input=PROMPT, max_tokens=FOREVER, end_id=-1, timeout=800_000)
    assert reply["finish_reason"] == "timeout"
    assert 20 < len(reply["output_ids"]) < FOREVER


def test_priorities_decide_who_is_next_over_http_and_grpc(shared: TritonServer) -> None:
    slow = {"text_input": PROMPT, "max_tokens": 150, "policy": "single", "end_id": -1}
    with ThreadPoolExecutor(1) as pool, GrpcStream(shared) as call:
        with LongRequest(shared, "narrow"):
            for priority in (0, 2):
                call.send({**slow, "priority": priority}, model="narrow", request_id=f"later-{priority}")
                until(lambda at=priority // 2 + 1: metric(shared, "queued", model="narrow") == at, what="it waits")
            call.send({**slow, "priority": 1}, model="narrow", request_id="first")
            until(lambda: metric(shared, "queued", model="narrow") == 3, what="three wait")
            http = pool.submit(lambda: (answer(shared, "narrow", priority=1, **slow), time.monotonic()))
            until(lambda: metric(shared, "queued", model="narrow") == 4, what="all wait")
        ends = {name: call.wait(name)[-1].at for name in ("first", "later-0", "later-2")}
        ends["http"] = http.result()[1]
    assert sorted(ends, key=ends.__getitem__) == ["first", "http", "later-0", "later-2"]


def test_a_priority_that_does_not_exist_is_refused_by_name(shared: TritonServer) -> None:
    assert "priority is 3; it lies in 1..2" in refusal(shared, "narrow", priority=3, **SHORT)[1]
    assert "this deployment has no priority levels" in refusal(shared, priority=1, **SHORT)[1]


def test_nobody_holds_a_model_longer_than_the_deployment_allows(shared: TritonServer) -> None:
    """The way of a caller that has left without Triton's notice: nobody cancels, and the request ends all the same."""
    fields = {"text_input": PROMPT, "max_tokens": FOREVER, "policy": "single", "end_id": -1}
    _, error = refusal(shared, "brief", **fields)
    assert "this deployment ends requests after 1 s (max_request_seconds)" in error
    streamed = grpc_stream(shared, fields, model="brief")
    assert any("max_request_seconds" in message.error for message in streamed)
    until(lambda: not metric(shared, "in_flight", model="brief"), what="nothing runs")


def test_a_requests_own_limit_in_the_queue(shared: TritonServer) -> None:
    with LongRequest(shared, "narrow"):
        started = time.monotonic()
        status, details = grpc_error(shared, SHORT, model="narrow", timeout_us=300_000)
        assert status == "UNAVAILABLE"
        assert "Request timeout expired" in details
        assert time.monotonic() - started >= 0.3


def test_a_limit_that_the_deployment_does_not_allow_is_refused(shared: TritonServer) -> None:
    fields = {"text_input": "abc", "max_tokens": 4}
    status, details = grpc_error(shared, fields, model="reject", timeout_us=300_000)
    assert status == "INVALID_ARG"
    assert "allow_timeout_override" in details


def test_a_request_that_can_never_fit_is_refused_at_once_with_model_and_limit(shared: TritonServer) -> None:
    _, error = refusal(shared, text_input="abc", max_tokens=LARGE_POOL)
    assert "'large'" in error
    assert "KV pool" in error
    assert answer(shared, text_input="abc", max_tokens=4, exclude_input_in_output=True)["text_output"] == "abc"
