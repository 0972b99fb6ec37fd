"""Malformed requests over every protocol, and malformed traffic on the channel, beside sound neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perf.fuzz.__main__ import target_of
from perf.fuzz.plan import PROTOCOLS, Plan
from perf.fuzz.run import fuzz
from perf.load.known import known_answers
from perf.stall.prober import Prober
from tests.support.waiting import wait_idle
from tools.openai_server import OpenAiServer
from tools.progress import silent
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

POLICIES = [
    ("", {}),
    ("random", {"p": 0.5}),
    ("single", {"model": "large"}),
    ("scripted", {"writers": ["small", "large"]}),
]
REQUESTS = 150


def test_malformed_requests_are_answered_and_their_senders_alone_pay(
    shared: TritonServer, shared_repository: Path
) -> None:
    answers = known_answers(shared_repository, ["hello", "a prompt"], max_tokens=30, policies=POLICIES)
    plan = Plan(REQUESTS, seed=11, neighbours=3, patience_s=60.0)
    long: dict[str, Any] = {"prompt": "a" * 20_000, "max_tokens": 20_000, "policy": "single"}
    with OpenAiServer(shared, shared_repository) as front, Prober(shared.grpc_url, **long) as prober:
        front.wait()
        outcome = fuzz(target_of(shared, front), answers, prober, plan, silent)
    assert list(outcome.rounds) == list(PROTOCOLS)
    for protocol, fuzzed in outcome.rounds.items():
        assert not fuzzed.answers.unanswered, protocol
        assert fuzzed.answers.requests == REQUESTS, protocol
        assert not fuzzed.ended, protocol
        assert fuzzed.stall_s > 0.0, "the prober has seen nothing"
    assert not outcome.neighbours.others
    assert outcome.neighbours.requests > 10
    wait_idle(shared)
