"""The two sides of perf.plan get the same requests, and are summed up in the same way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from perf.plan.served import requests_of
from perf.plan.simulated import simulated_times
from perf.plan.times import percentiles
from tools.dtmc.profile import load_profile
from tools.plan.demand import Demand

PROFILE = load_profile(Path(__file__).parents[2] / "configs" / "profiles" / "r2r_batch_times.yaml")
DEMAND = Demand(5.0, 30, 20.0)


def test_both_sides_get_the_same_requests_at_the_same_times() -> None:
    sent = requests_of(DEMAND, count=25, seed=3)
    times = simulated_times(PROFILE, {"small": 1, "large": 2}, DEMAND, count=25, max_inflight=64, seed=3)
    assert sorted(times) == list(range(25))
    for number, (due_s, payload) in enumerate(sent):
        request = service_pb2.ModelInferRequest.FromString(payload)
        inputs = {each.name: raw for each, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
        max_tokens = int(np.frombuffer(inputs["max_tokens"], np.int32)[0])
        arrived_s, *tokens_s = times[number]
        assert request.id == str(number)
        assert arrived_s == pytest.approx(due_s, abs=1e-6)
        assert len(tokens_s) == max_tokens
        assert len(inputs["input_ids"]) == 30 * 4
        assert tokens_s == sorted(tokens_s)
        assert tokens_s[0] > arrived_s


def test_percentiles_of_known_times() -> None:
    """Request 0 does not count; the others wait 1..100 ms, and then 10 ms per token."""
    times = {0: [0.0, 9.0], **{n: [5.0, 5.0 + n / 1000, 5.01 + n / 1000, 5.02 + n / 1000] for n in range(1, 101)}}
    found = percentiles(times, range(1, 101))
    assert found == {
        "ttft_p50_ms": pytest.approx(50.5),
        "ttft_p99_ms": pytest.approx(99.01),
        "itl_p50_ms": pytest.approx(10.0),
        "itl_p99_ms": pytest.approx(10.0),
    }
