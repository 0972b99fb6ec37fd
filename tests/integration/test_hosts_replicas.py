"""Two replicas of the large model: one beside the entry model and one elsewhere, then each on a host of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.deaths import kill_model
from tests.support.drawn import Drawn
from tests.support.hosts import Hosts, beside_and_elsewhere, both_elsewhere, connected
from tests.support.waiting import PATIENCE_S, until
from tokenrouter.metrics_page import scrape
from tools.tritonserver.server import TritonServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # servers start several times

SETTINGS: dict[str, Any] = {"entry": {"connect_timeout_ms": 180_000}, "silence_seconds": 2.0}
DRAWN = Drawn(count=4, tokens=800)
REPLICAS = ("large", "large_1")


@contextmanager
def spread(near: TritonServer) -> Iterator[Callable[[], list[list[int]]]]:
    """Requests that run, half of them at each replica; the function waits for their tokens."""
    until(lambda: all(connected(near, name) for name in REPLICAS), within_s=3 * PATIENCE_S, what="both are connected")
    with DRAWN.running(near) as tokens:
        until(lambda: pinned(near) == [DRAWN.count // 2] * 2, what="half of them at each")
        yield tokens


def pinned(near: TritonServer) -> list[float]:
    page = scrape(near.metrics_url, "tokenrouter_pinned")
    return [page.value("tokenrouter_pinned", model="tokenrouter", subserver=name) for name in REPLICAS]


def moved(near: TritonServer) -> float:
    return scrape(near.metrics_url, "tokenrouter_moved").value("tokenrouter_moved", model="tokenrouter")


@contextmanager
def moving(near: TritonServer, expected: list[list[int]]) -> Iterator[None]:
    """Takes a replica away from requests that run: all tokens are right, and those of that replica have moved."""
    before = moved(near)
    with spread(near) as tokens:
        yield
        assert tokens() == expected
    until(lambda: moved(near) - before >= DRAWN.count // 2, what="they have moved")


def test_each_of_two_hosts_is_killed_in_turn() -> None:
    with both_elsewhere("large", **SETTINGS) as hosts:
        expected = DRAWN.expected(hosts.repository)
        first, second = (hosts.far(name) for name in REPLICAS)
        near = hosts.near()
        assert set(near.stub_pids()) == {"tokenrouter", "small"}
        with moving(near, expected):
            first.kill()
        first.start()
        with moving(near, expected):
            second.kill()


# --- one beside the entry model, one elsewhere ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with beside_and_elsewhere(**SETTINGS) as both:
        yield both


@pytest.fixture(scope="module")
def far(hosts: Hosts) -> TritonServer:
    return hosts.far("large_1")


@pytest.fixture(scope="module")
def near(hosts: Hosts, far: TritonServer) -> TritonServer:
    return hosts.near("large")


@pytest.fixture(scope="module")
def expected(hosts: Hosts) -> list[list[int]]:
    return DRAWN.expected(hosts.repository)


def test_tokens_are_those_of_one_process(near: TritonServer, expected: list[list[int]]) -> None:
    with spread(near) as tokens:
        assert tokens() == expected


def test_a_link_that_is_cut_moves_requests_beside(hosts: Hosts, near: TritonServer, expected: list[list[int]]) -> None:
    with moving(near, expected):
        hosts.relay.cut()
    hosts.relay.mend()


def test_the_host_elsewhere_is_killed_and_comes_back(
    near: TritonServer, far: TritonServer, expected: list[list[int]]
) -> None:
    with moving(near, expected):
        far.kill()
    far.start()


def test_the_replica_beside_is_killed_and_comes_back(near: TritonServer, expected: list[list[int]]) -> None:
    with moving(near, expected):
        kill_model(near.stub_pids()["large"], "large", near.metrics_url)
    near.repository_api().unload("large")  # as the supervisor does
    near.repository_api().load("large", timeout_s=PATIENCE_S)
    with spread(near) as tokens:
        assert tokens() == expected
