"""Speculative hand-off through a real server, on the demo pair: tokens of plain routing, and metrics of what it did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from perf.identity import MODES, POLICIES, compared
from tests.support.http_calls import refusal
from tests.support.waiting import wait_idle
from tests.support.watch import WATCH
from tokenrouter.metrics_page import scrape
from tools.demo_models.task import load_problems
from tools.evaluate import parse_setting
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [problem.prompt for problem in load_problems(ROOT / "configs" / "demo" / "problems.jsonl")[:5]]


@pytest.fixture(scope="module")
def demo() -> Iterator[TritonServer]:
    """A server of the committed repository."""
    with WATCH.over(TritonServer(ROOT / "model_repository")) as running:
        yield running


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_responses_are_those_of_plain_routing(demo: TritonServer, policy: str, mode: str) -> None:
    row = compared(demo.grpc_url, PROMPTS, parse_setting(policy), mode, max_tokens=48, inflight=4)
    assert row["identical"] == len(PROMPTS), row


def test_metrics_tell_what_became_of_guesses(demo: TritonServer) -> None:
    compared(demo.grpc_url, PROMPTS, parse_setting("random:p=0.5"), "greedy", max_tokens=48, inflight=4)
    wait_idle(demo)
    page = scrape(demo.metrics_url)
    assert page.value("tokenrouter_guesses", model="tokenrouter", policy="random", fate="confirmed") > 0
    checks = page.value("tokenrouter_checks", model="large")
    assert 0 < checks <= page.value("tokenrouter_checked_positions", model="large")
    discarded = page.value("tokenrouter_discarded_tokens", model="tokenrouter", policy="random")
    agreed = page.value("tokenrouter_agreed_tokens", model="tokenrouter", policy="random")
    assert 0.5 * discarded < agreed <= discarded


def test_a_policy_that_cannot_go_ahead_is_refused_by_name(demo: TritonServer) -> None:
    status, text = refusal(demo, text_input="Start 1", max_tokens=4, policy="me", speculation=True)
    assert status == 400
    assert "speculation is true, but policy 'me' decides by more than" in text
