"""Clients that go away: their work ends and their KV is free on every model, long before they would have ended."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.support.grpc_calls import GrpcStream
from tests.support.http_calls import HttpStream, answer
from tests.support.waiting import metric, until
from tokenrouter.metrics_page import busy
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

WRITERS = {
    "resident on small": [0],
    "resident on large": [1],
    "pending on the wire": [0, 1],
}
# Eight of these fit into the pools; at steps of 1 ms they run longer than anybody waits here.
TOKENS = 16_000
FREE_WITHIN_S = 10.0
BODY = {"text_input": "abcdefgh" * 100, "max_tokens": TOKENS, "stream": True, "end_id": -1, "policy": "scripted"}


def held(server: TritonServer) -> dict[str, float]:
    """Gauges of what is served, queued or held, where that is not 0."""
    return busy(server.metrics_url)


def wait_until_seen(server: TritonServer) -> None:
    """Waits until the metrics show the work, so that they do not look free because they are old."""
    until(lambda: held(server), what="the metrics show the work")


def assert_all_free(server: TritonServer) -> None:
    until(lambda: not held(server), within_s=FREE_WITHIN_S, what="everything is free")


def body(state: str) -> dict[str, object]:
    params = f'{{"writers": {WRITERS[state]}}}'
    return {**BODY, "policy_params": params}


@pytest.mark.parametrize("state", WRITERS)
def test_a_closed_http_stream_frees_everything(shared: TritonServer, state: str) -> None:
    stream = HttpStream(shared, body(state))
    next(iter(stream))
    wait_until_seen(shared)
    stream.close()
    assert_all_free(shared)


@pytest.mark.parametrize("state", WRITERS)
def test_a_cancelled_grpc_stream_frees_everything(shared: TritonServer, state: str) -> None:
    with GrpcStream(shared) as call:
        for i in range(4):
            call.send(body(state), request_id=str(i))
        until(lambda: all(call.of(str(i)) for i in range(4)), what="all four run")
        wait_until_seen(shared)
        call.cancel()
        assert_all_free(shared)


def test_a_queued_request_that_is_cancelled_leaves_the_queue(shared: TritonServer) -> None:
    def queued() -> float:
        return metric(shared, "queued", model="narrow")

    with GrpcStream(shared) as running, GrpcStream(shared) as waiting:
        running.send(body("resident on small"), model="narrow", request_id="running")
        until(lambda: running.of("running"), what="the first runs")
        waiting.send(body("resident on small"), model="narrow", request_id="waiting")
        until(lambda: queued() == 1, what="one waits")
        waiting.cancel()
        until(lambda: not queued(), within_s=FREE_WITHIN_S, what="nobody waits")
        assert not running.over("running")
        running.cancel()
    assert_all_free(shared)


def test_a_killed_client_process_frees_everything(shared: TritonServer) -> None:
    code = (
        "import sys, time; from tokenrouter.client import stream\n"
        f"fields = dict(max_tokens={TOKENS}, end_id=-1, policy='single')\n"
        f"for chunk in stream({shared.grpc_url!r}, 'abc' * 50, **fields): print('x', flush=True)"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert client.stdout is not None
    client.stdout.readline()
    wait_until_seen(shared)
    client.kill()
    client.wait()
    client.stdout.close()
    assert_all_free(shared)


def test_many_streams_closed_at_random_leave_nothing_and_change_nothing(shared: TritonServer) -> None:
    def cancelled() -> float:
        return metric(shared, "failed", reason="cancelled")

    rng = random.Random(7)
    before = answer(shared, text_input="abcdefgh", max_tokens=8, seed=1, temperature=1.0, exclude_input_in_output=True)
    at_first = cancelled()
    for _ in range(6):
        calls = [GrpcStream(shared) for _ in range(8)]
        for call in calls:
            call.send(body(rng.choice(list(WRITERS))))
        for call in calls:
            wanted = rng.randrange(20)
            until(lambda call=call, wanted=wanted: len(call.messages) >= wanted, what="some events")  # type: ignore[misc]
            call.cancel()
            call.close()
    # Some were cancelled before they were taken.
    until(lambda: cancelled() - at_first >= 40, what="the metrics show them")
    assert_all_free(shared)
    after = answer(shared, text_input="abcdefgh", max_tokens=8, seed=1, temperature=1.0, exclude_input_in_output=True)
    assert before == after
