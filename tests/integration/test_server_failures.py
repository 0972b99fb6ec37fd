"""A policy or an engine that raises in the middle of a response, on every endpoint."""

from __future__ import annotations

import json

import pytest

from tests.support.faults import POISON
from tests.support.grpc_calls import GrpcStream, grpc_error
from tests.support.http_calls import RESPONSE_ERROR, answer, refusal, stream
from tests.support.servers import BREAKS_ENGINE, RAISES
from tests.support.waiting import metric, until, wait_idle
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

ROUTED = ("tokenrouter", "ensemble")
POLICY_FAULT = {"text_input": "x" * 50, "max_tokens": 50, "policy": RAISES}
ENGINE_FAULT = {"text_input": "xxxxx" + POISON + "xxxx", "max_tokens": 13, "policy": BREAKS_ENGINE}
FAULTS = {"policy": (POLICY_FAULT, ("raises_at", "route", "boom")), "engine": (ENGINE_FAULT, ("poisoned",))}


@pytest.mark.parametrize("model", ROUTED)
@pytest.mark.parametrize("fault", FAULTS)
def test_generate(shared: TritonServer, model: str, fault: str) -> None:
    body, words = FAULTS[fault]
    status, message = refusal(shared, model, **body)
    assert status == RESPONSE_ERROR
    assert all(word in message for word in words), message
    wait_idle(shared)


@pytest.mark.parametrize("model", ROUTED)
@pytest.mark.parametrize("fault", FAULTS)
def test_generate_stream_ends_with_one_error_event(shared: TritonServer, model: str, fault: str) -> None:
    body, words = FAULTS[fault]
    events = stream(shared, model, **body)
    assert ["error" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert all(word in events[-1]["error"] for word in words)
    assert "".join(event["text_output"] for event in events[:-1]) == (
        "x" * 5 if fault == "policy" else "x" * 5 + POISON
    )
    wait_idle(shared)


@pytest.mark.parametrize("model", ROUTED)
@pytest.mark.parametrize("fault", FAULTS)
def test_grpc_stream_stays_usable(shared: TritonServer, model: str, fault: str) -> None:
    body, words = FAULTS[fault]
    with GrpcStream(shared) as call:
        call.send({**body, "stream": True}, model=model, request_id="bad")
        failed = call.wait("bad")
        call.send({"text_input": "ok", "max_tokens": 2, "stream": True}, model=model, request_id="good")
        good = call.wait("good")
    assert [bool(message.error) for message in failed] == [False] * (len(failed) - 1) + [True]
    assert [message.final for message in failed] == [False] * (len(failed) - 1) + [True]
    assert all(word in failed[-1].error for word in words)
    assert "".join(message.text for message in good) == "ok"
    wait_idle(shared)


def test_grpc_status(shared: TritonServer) -> None:
    code, details = grpc_error(shared, {**POLICY_FAULT, "stream": True})
    assert code == "INTERNAL"
    assert "boom" in details


def test_neighbours_of_a_failing_policy(shared: TritonServer) -> None:
    """A policy's fault is its own requests' alone, although they share every step with the others."""

    def counted() -> float:
        return metric(shared, "failed", model="tokenrouter", reason="policy_failed")

    before = counted()
    with GrpcStream(shared) as call:
        for i in range(4):
            call.send({"text_input": f"{i}" * 200, "max_tokens": 200, "stream": True}, request_id=f"good-{i}")
        until(lambda: all(call.of(f"good-{i}") for i in range(4)), what="four streams")
        for i in range(4):
            params = json.dumps({"position": 5 + i})
            call.send({**POLICY_FAULT, "stream": True, "policy_params": params}, request_id=f"bad-{i}")
        failed = [call.wait(f"bad-{i}") for i in range(4)]
        good = [call.wait(f"good-{i}") for i in range(4)]
    for i, messages in enumerate(good):
        assert "".join(message.text for message in messages) == f"{i}" * 200
    for i, messages in enumerate(failed):
        assert "".join(message.text for message in messages) == "x" * (5 + i)
        assert "boom" in messages[-1].error
    wait_idle(shared)
    until(lambda: counted() >= before + 4, what="four counted failures")


def test_a_failing_engine_step_is_over_with_its_step(shared: TritonServer) -> None:
    """Requests that come after the failed step are answered by the same engine."""
    refusal(shared, **ENGINE_FAULT)
    assert answer(shared, text_input="hello", max_tokens=5)["text_output"] == "hellohello"
    wait_idle(shared)
