"""Requests that once ended the service: each gets its error, and whoever comes next is served."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perf.fuzz.frames import HELLO, OPEN
from tests.support.grpc_calls import GrpcStream, grpc_error
from tests.support.http_calls import answer, generate
from tests.support.waiting import PATIENCE_S, metric, until, wait_idle
from tokenrouter.channel.framing import frame
from tokenrouter.channel.unix import socket_path
from tokenrouter.messages import encode
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

GOOD = {"text_input": "hello", "max_tokens": 5}


@pytest.fixture(autouse=True)
def _served_afterwards(shared: TritonServer) -> Iterator[None]:
    """The response that was there before is there afterwards, and nothing is held."""
    before = answer(shared, **GOOD)["output_ids"]
    yield
    assert answer(shared, **GOOD)["output_ids"] == before
    wait_idle(shared)


@pytest.mark.parametrize("timeout_us", [2_200_000_000_000, 2**63 - 1])
def test_a_time_out_of_years_is_refused_with_the_limit(shared: TritonServer, timeout_us: int) -> None:
    code, text = grpc_error(shared, GOOD, timeout_us=timeout_us)
    assert code == "INVALID_ARG"
    assert f"timeout is {timeout_us} microseconds; this deployment takes at most 86400 (limits.timeout_seconds)" in text


def test_clients_name_no_checkpoints_and_errors_no_paths(shared: TritonServer) -> None:
    params = json.dumps({"router": "bert", "checkpoint": "large/1"})
    status, reply = generate(shared, {**GOOD, "policy": "query_level", "policy_params": params})
    assert status == 400
    assert (
        "policy_params.checkpoint is 'large/1'; checkpoints that clients of this deployment may name: none"
        in (reply["error"])
    )
    assert str(Path(shared.repository).resolve()) not in reply["error"]


def test_megabytes_of_policy_parameters_are_refused_with_the_limit(shared: TritonServer) -> None:
    status, reply = generate(shared, {**GOOD, "policy": "single", "policy_params": " " * 70_000_000})
    assert status == 400
    assert "policy_params has 70000000 bytes; this deployment takes at most 65536" in reply["error"]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        pytest.param("text_input", "x" * 10_000_000, "text_input has 10000000 bytes", id="prompt"),
        pytest.param("stop_words", ["a"] * 300_000, "stop_words has 300000 values", id="stop-words"),
        pytest.param("bad_words", ["ab"] * 100_000, "bad_words has 100000 values", id="bad-words"),
        pytest.param("bad_words", ["a" * 5000], "bad_words[0] has 5000 bytes", id="a-long-bad-word"),
        pytest.param(
            "policy_params",
            json.dumps({"writers": ["small"] * 300_000}),
            "policy_params has 2700013 bytes",
            id="writers",
        ),
    ],
)
def test_what_takes_long_to_read_is_refused_before_it_is_read(
    shared: TritonServer, field: str, value: Any, text: str
) -> None:
    running = GrpcStream(shared)
    running.send({"text_input": "a" * 20_000, "max_tokens": 20_000, "stream": True})
    until(lambda: running.messages, what="the first token")
    status, reply = generate(shared, {**GOOD, "policy": "scripted", field: value}, timeout_s=PATIENCE_S)
    assert status == 400
    assert text in reply["error"]
    assert "this deployment takes at most" in reply["error"]
    seen = len(running.messages)
    until(lambda: len(running.messages) > seen, what="another token of the neighbour")
    running.__exit__(None)


def test_a_peer_that_left_in_the_future_is_served_and_harms_nobody(shared: TritonServer) -> None:
    """Its hand-off time would lower a counter; Triton refuses that, and its stub reads freed memory for the reason."""
    pids, before = shared.stub_pids(), metric(shared, "handoffs_in", model="small")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(socket_path(shared.run_dir / "channel", "small")))
        peer.sendall(frame(encode(HELLO)))
        for request in range(20):
            left = msgspec.structs.replace(OPEN, request=request, source="large", left_ns=2**62 - request)
            peer.sendall(frame(encode(left)))
        until(lambda: metric(shared, "handoffs_in", model="small") >= before + 20, what="the page counts them")
    assert metric(shared, "handoff_seconds_sum", model="small") >= 0.0
    assert shared.stub_pids() == pids
