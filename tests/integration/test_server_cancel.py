"""Clients that go away: their work ends and their KV is free on every model within a second."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

from tests.support.grpc_calls import GrpcStream
from tests.support.http_calls import HttpStream, answer
from tests.support.waiting import until
from tools.metrics import Scrape, scrape
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

WRITERS = {
    "resident on small": [0],
    "resident on large": [1],
    "pending on the wire": [0, 1],
}
BODY = {"text_input": "abcdefgh" * 100, "max_tokens": 4000, "stream": True, "end_id": -1, "policy": "scripted"}


def gauges(page: Scrape) -> dict[str, float]:
    """Everything that must be 0 when nobody is served."""
    values = {"in flight": page.value("tokenrouter_in_flight"), "queued": page.value("tokenrouter_queued")}
    for name in ("kv_blocks_reserved", "kv_blocks_used", "open_requests", "residents"):
        for model in ("small", "large"):
            values[f"{name} {model}"] = page.value(f"tokenrouter_{name}", model=model)
    return values


def assert_all_free(server: TritonServer, *, within_s: float = 1.0) -> None:
    end = time.monotonic() + within_s
    while any(last := gauges(scrape(server.metrics_url)).values()):
        assert time.monotonic() < end, gauges(scrape(server.metrics_url))
    assert not any(last)


def body(state: str) -> dict[str, object]:
    params = f'{{"writers": {WRITERS[state]}}}'
    return {**BODY, "policy_params": params}


@pytest.mark.parametrize("state", WRITERS)
def test_a_closed_http_stream_frees_everything(shared: TritonServer, state: str) -> None:
    stream = HttpStream(shared, body(state))
    next(iter(stream))
    stream.close()
    assert_all_free(shared, within_s=1.5)


@pytest.mark.parametrize("state", WRITERS)
def test_a_cancelled_grpc_stream_frees_everything(shared: TritonServer, state: str) -> None:
    with GrpcStream(shared) as call:
        for i in range(4):
            call.send(body(state), request_id=str(i))
        until(lambda: all(call.of(str(i)) for i in range(4)), what="all four run")
        call.cancel()
        assert_all_free(shared, within_s=1.5)


def test_a_queued_request_that_is_cancelled_leaves_the_queue(shared: TritonServer) -> None:
    with GrpcStream(shared) as running, GrpcStream(shared) as waiting:
        running.send(body("resident on small"), model="narrow", request_id="running")
        until(lambda: running.of("running"), what="the first runs")
        waiting.send(body("resident on small"), model="narrow", request_id="waiting")
        until(lambda: scrape(shared.metrics_url).value("tokenrouter_queued", model="narrow") == 1, what="one waits")
        waiting.cancel()
        until(lambda: not scrape(shared.metrics_url).value("tokenrouter_queued"), within_s=1.5, what="nobody waits")
        running.cancel()
    assert_all_free(shared, within_s=1.5)


def test_a_killed_client_process_frees_everything(shared: TritonServer) -> None:
    code = (
        "import sys, time; from tokenrouter.client import stream\n"
        f"fields = dict(max_tokens=4000, end_id=-1, policy='single')\n"
        f"for chunk in stream({shared.grpc_url!r}, 'abc' * 50, **fields): print('x', flush=True)"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert client.stdout is not None
    client.stdout.readline()
    client.kill()
    client.wait(10)
    client.stdout.close()
    assert_all_free(shared, within_s=2.0)


def test_many_streams_closed_at_random_leave_nothing_and_change_nothing(shared: TritonServer) -> None:
    rng = random.Random(7)
    before = answer(shared, text_input="abcdefgh", max_tokens=8, seed=1, temperature=1.0, exclude_input_in_output=True)
    cancelled = scrape(shared.metrics_url).value("tokenrouter_failed", reason="cancelled")
    for _ in range(6):
        calls = [GrpcStream(shared) for _ in range(8)]
        for call in calls:
            call.send(body(rng.choice(list(WRITERS))))
        for call in calls:
            wanted = rng.randrange(20)
            until(lambda call=call, wanted=wanted: len(call.messages) >= wanted, what="some events")  # type: ignore[misc]
            call.cancel()
            call.close()
    assert_all_free(shared, within_s=1.5)
    # Some were over before they were closed, or cancelled before they were taken.
    assert scrape(shared.metrics_url).value("tokenrouter_failed", reason="cancelled") - cancelled >= 40
    after = answer(shared, text_input="abcdefgh", max_tokens=8, seed=1, temperature=1.0, exclude_input_in_output=True)
    assert before == after
