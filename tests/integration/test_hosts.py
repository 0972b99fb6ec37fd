"""Models on two hosts: servers of their own, a link between them that is cut, peers that die, strangers, upgrades."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

from tests.support.channel import End
from tests.support.channel import until as polled
from tests.support.deaths import kill_model
from tests.support.drawn import Drawn
from tests.support.grpc_calls import GrpcStream
from tests.support.hosts import Hosts, connected, trial_keys, two_hosts
from tests.support.waiting import PATIENCE_S, until, wait_idle
from tokenrouter.channel.sockets import SocketCarrier
from tokenrouter.channel.tcp import Network
from tokenrouter.messages import Hello, ModelInfo, PolicySpec, decode_for_orchestrator, encode
from tokenrouter.metrics_page import scrape
from tokenrouter.protocol_version import PROTOCOL_VERSION
from tokenrouter.repository import Repository
from tools.tritonserver.installation import LaunchError
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

SILENCE_S = 2.0
BRIEF_S = 3
ENTRY = {"connect_timeout_ms": 180_000, "routed_orchestrators": 2}
# Beside it, one whose requests give up soon.
BRIEF = {**ENTRY, "name": "brief", "connect_timeout_ms": BRIEF_S * 1000}
DRAWN = Drawn(count=4, tokens=600)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts(BRIEF, ENTRY, silence_seconds=SILENCE_S) as both:
        yield both


@pytest.fixture(scope="module")
def far(hosts: Hosts) -> TritonServer:
    return hosts.far()


@pytest.fixture(scope="module")
def near(hosts: Hosts, far: TritonServer) -> TritonServer:
    return hosts.near("brief")


@pytest.fixture(scope="module")
def expected(hosts: Hosts) -> list[list[int]]:
    return DRAWN.expected(hosts.repository)


def recovered(server: TritonServer) -> float:
    return scrape(server.metrics_url, "tokenrouter_recovered").value("tokenrouter_recovered", model="tokenrouter")


def test_tokens_are_those_of_one_process(near: TritonServer, far: TritonServer, expected: list[list[int]]) -> None:
    assert set(near.stub_pids()) == {"tokenrouter", "brief", "small"}
    assert set(far.stub_pids()) == {"large"}
    with DRAWN.running(near) as tokens:
        assert tokens() == expected
    wait_idle(near)
    # Clocks are compared: a hand-off takes no longer than a busy machine makes it.
    until(lambda: scrape(far.metrics_url).value("tokenrouter_handoff_seconds_count", model="large") > 0)
    assert scrape(far.metrics_url).mean("tokenrouter_handoff_seconds", model="large") < PATIENCE_S


def test_a_link_that_is_cut_and_mended_costs_no_token(
    hosts: Hosts, near: TritonServer, far: TritonServer, expected: list[list[int]]
) -> None:
    with DRAWN.running(near) as tokens:
        hosts.relay.cut()
        until(lambda: "it has said nothing" in near.log_text(), what="the silence is noticed")
        until(lambda: not connected(near), what="so the model is away")
        hosts.relay.mend()
        assert tokens() == expected
    assert recovered(near) > 0
    wait_idle(far)


def test_connections_that_are_reset_are_made_again(
    hosts: Hosts, near: TritonServer, far: TritonServer, expected: list[list[int]]
) -> None:
    before = recovered(near)
    with DRAWN.running(near) as tokens:
        hosts.relay.sever()
        assert tokens() == expected
    until(lambda: recovered(near) > before)
    wait_idle(far)


def test_a_link_that_stays_cut_ends_requests_with_a_clear_error(
    hosts: Hosts, near: TritonServer, expected: list[list[int]]
) -> None:
    hosts.relay.cut()
    try:
        with GrpcStream(near) as call:
            call.send(DRAWN.fields(0), model="brief", request_id="late")
            message = call.wait("late")[-1]
        for word in ("'large' is not connected", f"waited {BRIEF_S} s", str(hosts.relay.address)):
            assert word in message.error
    finally:
        hosts.relay.mend()
    until(lambda: connected(near), within_s=3 * PATIENCE_S, what="connected again")
    with DRAWN.running(near, only=[0]) as tokens:
        assert tokens() == expected[:1]


def test_a_peer_that_is_asleep_wakes_up_and_goes_on(
    near: TritonServer, far: TritonServer, expected: list[list[int]]
) -> None:
    """Its kernel takes bytes for it until its window is full; its loop says nothing."""
    pid = far.stub_pids()["large"]
    with DRAWN.running(near) as tokens:
        kill_model(pid, "large", far.metrics_url, signal.SIGSTOP)
        try:
            until(lambda: not connected(near), what="given up")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert tokens() == expected


def test_a_peer_that_is_killed_comes_back(near: TritonServer, far: TritonServer, expected: list[list[int]]) -> None:
    with DRAWN.running(near) as tokens:
        kill_model(far.stub_pids()["large"], "large", far.metrics_url)
        until(lambda: not connected(near), what="noticed")
        far.repository_api().unload("large")  # as the supervisor does
        far.repository_api().load("large", timeout_s=PATIENCE_S)
        assert tokens() == expected


# --- who may come ----------------------------------------------------------------------------------------------------


@pytest.fixture
def dial(hosts: Hosts) -> Iterator[Callable[..., End]]:
    """Ends of ours that dial the large model."""
    opened: list[SocketCarrier] = []
    repository = Repository(hosts.repository)
    tls = repository.entry("tokenrouter").tls

    def start(keys: str = "near", **terms: Any) -> End:
        settings = msgspec.structs.replace(tls, folder=str(hosts.keys / keys))
        own = Network.of(settings, name="tokenrouter", repository=repository.digest())
        own = replace(own, terms=replace(own.terms, **terms))
        opened.append(SocketCarrier(remote={"large": hosts.relay.address}, network=own))
        return End(opened[-1])

    yield start
    for carrier in opened:
        carrier.close()


def greeted(end: End, version: int = PROTOCOL_VERSION) -> End:
    """Says hello like an orchestrator."""
    polled(lambda: bool(end.peers), end, why="connected")
    hello = Hello(version, "tokenrouter", "routed", ("small", "large"), PolicySpec("single"), version - 1)
    end.carrier.send(end.peers[-1], encode(hello))
    return end


def info(end: End) -> ModelInfo:
    polled(lambda: bool(end.payloads), end, why="greeted")
    message = decode_for_orchestrator(end.payloads[0])
    assert isinstance(message, ModelInfo)
    return message


def refused(end: End) -> str:
    polled(lambda: bool(end.why), end, why="refused")
    return end.why[0]


def logged(server: TritonServer, text: str) -> None:
    until(lambda: text in server.log_text(), what=f"{text!r} in the log")


def test_orchestrators_share_the_kv_and_one_too_many_is_refused(
    near: TritonServer, far: TritonServer, dial: Callable[..., End]
) -> None:
    until(lambda: connected(near), what="the first one")
    second = greeted(dial())
    blocks = scrape(far.metrics_url).value("tokenrouter_kv_blocks", model="large")
    assert info(second).kv_blocks == (blocks - int(0.25 * blocks)) // 2
    assert "2 of entry model 'tokenrouter' are connected to large already" in refused(greeted(dial()))
    logged(far, "2 of entry model 'tokenrouter' are connected to large already")
    assert second.lost == []


def test_strangers_are_refused_by_name_on_both_sides(
    near: TritonServer, far: TritonServer, dial: Callable[..., End], hosts: Hosts
) -> None:
    why = "its certificate is of 127.0.0.1, stranger.test; tls.peers allows entry.test"
    assert why in refused(dial("stranger"))
    logged(far, why)
    assert "has another model repository" in refused(dial(repository="0" * 64))
    logged(far, "has another model repository (digest 000000000000)")
    assert "the release" in refused(dial(version=PROTOCOL_VERSION - 2, oldest=1))
    logged(far, f"'tokenrouter' speaks version {PROTOCOL_VERSION - 2} of the protocol")
    with socket.create_connection((hosts.far_address.host, hosts.far_address.port)) as plain:
        plain.settimeout(PATIENCE_S)
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while plain.recv(1 << 16):
            pass
    logged(far, "does not speak TLS")
    assert connected(near)


def test_the_version_before_is_served(near: TritonServer, dial: Callable[..., End]) -> None:
    until(lambda: connected(near))
    version = PROTOCOL_VERSION - 1
    assert info(greeted(dial(version=version, oldest=version - 1), version)).version == PROTOCOL_VERSION


def test_a_certificate_is_replaced_while_all_run(hosts: Hosts, near: TritonServer, expected: list[list[int]]) -> None:
    """Nothing is started again: connections that stand go on, new ones need one that is valid."""
    yesterday = datetime.now(timezone.utc) - timedelta(days=1)
    trial_keys(hosts.keys, begins=yesterday, lasts=timedelta(hours=1))
    with DRAWN.running(near, only=[0]) as tokens:
        assert tokens() == expected[:1]
        hosts.relay.sever()
        logged(near, "certificate has expired")
        trial_keys(hosts.keys)
        until(lambda: connected(near), what="connected with new ones")
    with DRAWN.running(near, only=[0]) as tokens:
        assert tokens() == expected[:1]


def test_a_host_without_certificates_says_what_is_missing(hosts: Hosts) -> None:
    with pytest.raises(LaunchError, match=r"ca.crt: No such file or directory; tls.folder"):
        hosts.server("small", keys="nowhere").start()


# --- upgrades --------------------------------------------------------------------------------------------------------


def test_every_server_in_turn_is_restarted_under_load(
    hosts: Hosts, near: TritonServer, far: TritonServer, expected: list[list[int]]
) -> None:
    """Models first, then entries, as a rollout does; clients go to the entry that stays."""
    other = hosts.start("tokenrouter")
    with DRAWN.running(other) as tokens:
        far.stop()
        far.start()
        assert tokens() == expected
    with DRAWN.running(other) as tokens:
        near.stop()
        near.start()
        assert tokens() == expected
    with DRAWN.running(near) as tokens:
        other.stop()
        assert tokens() == expected
