"""Real policies on emulated certainty through the running server: rates, reproducibility, replay, and the label."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from perf.emulated.repository import write_emulated_repository
from perf.emulated.signals import HIDDEN_SIZE, ROUTED_BY_FILE, signal_options, write_router
from perf.traces.trace import from_routing
from tests.support.http_calls import generate
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

LEAVE, RETURN = 0.35, 0.4
TOKENS = 600


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Two emulated models without step times, and a router for every policy that needs one."""
    repository = write_emulated_repository(
        tmp_path_factory.mktemp("policies") / "repository",
        step_ms={"small": 0.0, "large": 0.0},
        entry={
            "policy": "r2r",
            "aliases": {},
            "selectable_policies": ["citer", "collm", "rstitch", "scripted"],
        },
        options={"hidden_size": HIDDEN_SIZE},
        per_model=signal_options(LEAVE, RETURN),
    )
    for policy in ROUTED_BY_FILE:
        write_router(repository, policy)
    with TritonServer(repository) as running:
        yield running


def routing(server: TritonServer, prompt: str, **fields: Any) -> dict[str, Any]:
    """Who wrote the response."""
    body = {"text_input": prompt, "max_tokens": TOKENS, "end_id": -1, "return_routing": True, **fields}
    status, answer = generate(server, body)
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer["routing"])
    return found


@pytest.mark.parametrize("policy", ["r2r", "citer", "collm"])
def test_every_one_token_policy_decides_alike_whatever_the_seed(server: TritonServer, policy: str) -> None:
    first = routing(server, "a prompt", policy=policy, seed=1)
    again = routing(server, "a prompt", policy="r2r", seed=2)
    assert first["runs"] == again["runs"]
    assert first["runs"] != routing(server, "another prompt", policy=policy, seed=1)["runs"]
    # Four standard errors of a binomial share.
    assert first["tokens"]["large"] / TOKENS == pytest.approx(LEAVE, abs=0.08)
    assert first["emulated"] is True
    assert first["policy"] == policy


def test_rstitch_stays_at_the_large_model_until_it_is_sure(server: TritonServer) -> None:
    found = routing(server, "a prompt", policy="rstitch")
    small = RETURN / (LEAVE + RETURN) * (1 - LEAVE)
    expected = LEAVE / (LEAVE + RETURN) / (LEAVE / (LEAVE + RETURN) + small)
    assert found["tokens"]["large"] / TOKENS == pytest.approx(expected, abs=0.12)
    assert max(run["end"] - run["start"] for run in found["runs"] if run["model"] == "large") > 2


def test_a_trace_of_a_response_is_replayed(server: TritonServer) -> None:
    recorded = routing(server, "a prompt", policy="r2r")
    script = json.dumps(from_routing(recorded).script())
    replayed = routing(server, "something else", policy="scripted", policy_params=script)
    assert (replayed["runs"], replayed["handoffs"]) == (recorded["runs"], recorded["handoffs"])
