"""The loops of a deployment whose large model is on another host, in one process, over the carrier between hosts."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.channel import PATIENCE_S
from tests.support.repositories import emulated_spec, write_emulated
from tests.support.waiting import until
from tests.unit.loops_server import Collected
from tokenrouter.assembly import Entry, build_subserver
from tokenrouter.channel import ends
from tokenrouter.channel.address import Address
from tokenrouter.channel.link import Terms
from tokenrouter.channel.sockets import SocketCarrier
from tokenrouter.channel.tcp import Network, Service
from tokenrouter.channel.tls import TlsSettings
from tokenrouter.loops.decoding import DecodingLoop
from tokenrouter.loops.orchestrating import OrchestratorLoop
from tokenrouter.offline import TokenRouter
from tokenrouter.repository import Repository
from tokenrouter.request import RequestFields
from tokenrouter.subserver.machine import Subserver

HOUR_NS = 3600 * 10**9
_MOST_REPLIES = 200
PROMPT = "a prompt of some length"
MESH = TlsSettings("mesh")


def later_ns() -> int:
    return time.monotonic_ns() + HOUR_NS


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    write_emulated(tmp_path, emulated_spec(options={"step_ms": 0.5}))
    return Repository(tmp_path)


@pytest.fixture
def large(repository: Repository) -> Iterator[tuple[Subserver, Address]]:
    """On a host whose clock is an hour ahead."""
    own = Network(MESH, Terms("large", repository.digest(), 1), None, random.Random(1))
    listener = Service(own, Address("127.0.0.1", 0)).open(patience_s=0.0)
    loop = DecodingLoop(
        lambda: build_subserver(repository.model("large"), repository, clock_ns=later_ns),
        SocketCarrier(listeners=[listener], clock_ns=later_ns),
        clock_ns=later_ns,
    )
    yield loop.start(), Address("127.0.0.1", listener.sock.getsockname()[1])
    loop.stop()


def test_an_hour_between_two_clocks_is_in_no_hand_off(repository: Repository, large: tuple[Subserver, Address]) -> None:
    subserver, address = large
    entry = Entry(repository.entry(), repository)
    with tempfile.TemporaryDirectory(prefix="tr-") as name:
        folder = Path(name) / "s"
        folder.mkdir(mode=0o700)
        small = DecodingLoop(
            lambda: build_subserver(repository.model("small"), repository),
            ends.serving("small", folder, public=None, listen=None, tls=MESH, repository=repository.digest),
        )
        here = small.start()
        carrier = ends.dialling(
            "tokenrouter", {"small": None, "large": address}, folder, tls=MESH, repository=repository.digest
        )
        loop = OrchestratorLoop(entry.orchestrator(), carrier, hello=entry.hello("tokenrouter", "routed"))
        loop.start()

        def counted() -> bool:
            return subserver.statistics.handoff.count > 0 and here.statistics.handoff.count > 0

        try:
            replies: list[list[int]] = []
            # Hand-offs before the first ping has come back are not counted.
            while len(replies) < 4 or (len(replies) < _MOST_REPLIES and not counted()):
                reply = Collected()
                request = entry.builder.build(RequestFields(text_input=PROMPT, max_tokens=64, seed=len(replies)))
                loop.submit(request, reply, arrived_ns=time.monotonic_ns())
                replies.append(reply.tokens())
            until(counted)
        finally:
            loop.stop()
            small.stop()
    for histogram in (subserver.statistics.handoff, here.statistics.handoff):
        assert histogram.total / histogram.count < PATIENCE_S
    with TokenRouter.from_repository(repository.root) as router:
        assert replies == [
            router.generate([PROMPT], max_tokens=64, seed=seed)[0].tokens for seed in range(len(replies))
        ]
