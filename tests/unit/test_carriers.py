"""What every carrier does, whatever its bytes pass."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.channel import ENTRY, LARGE, PATIENCE_S, End, certificates, dialling, listening, network, until
from tokenrouter.channel import sockets
from tokenrouter.channel.carrier import Connected, Disconnected, Received
from tokenrouter.channel.sockets import SocketCarrier
from tokenrouter.channel.tcp import Network
from tokenrouter.channel.unix import UnixCarrier
from tools.tritonserver.ports import free_port

MODEL = "large"


class Way(Protocol):
    def server(self) -> End: ...

    def client(self) -> End: ...

    def close(self) -> None: ...


class Unix:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "sockets" / "large.sock"
        self.path.parent.mkdir(mode=0o700)
        self.opened: list[SocketCarrier] = []

    def server(self) -> End:
        return self._end(UnixCarrier(listen=self.path))

    def client(self) -> End:
        return self._end(UnixCarrier(dial={MODEL: self.path}))

    def _end(self, carrier: SocketCarrier) -> End:
        self.opened.append(carrier)
        return End(carrier)

    def close(self) -> None:
        for carrier in self.opened:
            if carrier._selector.get_map() is not None:
                carrier.close()


class Tcp(Unix):
    def __init__(self, large: Network, entry: Network) -> None:
        self.large, self.entry = large, entry
        self.port = free_port()
        self.opened = []

    def server(self) -> End:
        return self._end(listening(self.large, self.port)[0])

    def client(self) -> End:
        from tokenrouter.channel.address import Address

        return self._end(dialling(self.entry, {MODEL: Address("127.0.0.1", self.port)}))


@pytest.fixture(params=["unix", "mtls", "mesh"])
def way(request: pytest.FixtureRequest) -> Iterator[Unix]:
    with tempfile.TemporaryDirectory(prefix="tr-") as name:  # short, since a socket's path may not be long
        folder = Path(name)
        if request.param == "unix":
            made = Unix(folder)
        else:
            keys = certificates(folder / "keys") if request.param == "mtls" else None
            made = Tcp(network(keys, LARGE), network(keys, ENTRY))
        yield made
        made.close()


def connected(way: Unix) -> tuple[End, End]:
    server, client = way.server(), way.client()
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")
    return server, client


def test_frames_go_both_ways_in_order(way: Unix) -> None:
    server, client = connected(way)
    elsewhere = isinstance(way, Tcp)
    assert [event for event in client.events if isinstance(event, Connected)] == [
        Connected(client.peers[0], MODEL, elsewhere)
    ]
    assert server.events == [Connected(server.peers[0], "", elsewhere)]
    for i in range(50):
        client.carrier.send(client.peers[0], b"%d" % i)
        server.carrier.send(server.peers[0], b"answer %d" % i)
    until(lambda: len(server.payloads) == len(client.payloads) == 50, server, client, why="all frames")
    assert server.payloads == [b"%d" % i for i in range(50)]
    assert client.payloads == [b"answer %d" % i for i in range(50)]


def test_frames_that_are_sent_together_arrive_in_one_poll(way: Unix) -> None:
    """Or requests that are handed over together would start one by one."""
    server, client = connected(way)
    payloads = [b"%d" % i * 500 for i in range(32)]
    client.carrier.send(client.peers[0], *payloads)
    until(lambda: bool(server.payloads), server, why="frames")
    assert server.payloads == payloads


def test_a_peer_that_listens_later_is_found(way: Unix) -> None:
    client = way.client()
    client.poll()
    assert not client.peers
    server = way.server()
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")


def test_a_peer_that_restarts_is_found_again_under_a_new_number(way: Unix) -> None:
    server, client = connected(way)
    server.carrier.close()
    until(lambda: client.lost == client.peers, client, why="the loss is reported")
    server = way.server()
    until(lambda: len(client.peers) == 2 and bool(server.peers), server, client, why="connected again")
    assert len(set(client.peers)) == 2
    client.carrier.send(client.peers[0], b"to the dead")
    client.carrier.send(client.peers[1], b"to the living")
    until(lambda: bool(server.payloads), server, client, why="a frame")
    assert server.payloads == [b"to the living"]


def test_a_dropped_peer_is_reported_and_dialled_again(way: Unix) -> None:
    server, client = connected(way)
    client.carrier.drop(client.peers[0])
    client.carrier.drop(client.peers[0])
    until(lambda: len(client.peers) == 2 and len(server.peers) == 2, server, client, why="connected again")
    assert client.lost == client.peers[:1]
    assert server.lost == server.peers[:1]


def test_a_peer_that_is_dropped_is_told_why_though_it_still_sends(way: Unix) -> None:
    server, client = connected(way)
    client.carrier.send(client.peers[0], bytes(300_000))
    server.carrier.drop(server.peers[0], "there is no more room")
    until(lambda: bool(client.why), server, client, why="told")
    assert "there is no more room" in client.why[-1]
    until(lambda: len(client.peers) == len(server.peers) == 2, server, client, why="connected again")
    assert client.lost == client.peers[:1]


def test_big_frames_pass_a_slow_reader_without_blocking_the_sender(way: Unix) -> None:
    server, client = connected(way)
    rng = random.Random(0)
    sent = [rng.randbytes(size) for size in (3_000_000, 0, 1, 2_000_000, 77)]
    for payload in sent:
        client.carrier.send(client.peers[0], payload)  # nobody reads yet
    until(lambda: len(server.payloads) == len(sent), server, client, why="all frames")
    assert server.payloads == sent


def test_a_peer_that_does_not_read_is_dropped_before_memory_is_full(way: Unix, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = connected(way)
    monkeypatch.setattr(sockets, "MAX_OUTGOING", 1_000_000)
    for _ in range(100):
        client.carrier.send(client.peers[0], bytes(500_000))
    until(lambda: bool(client.lost), client, why="dropped")
    until(lambda: len(server.peers) == len(client.peers) == 2, server, client, why="connected again")


def test_a_peer_that_dies_with_frames_unsent_is_reported_once(way: Unix) -> None:
    server, client = connected(way)
    client.carrier.send(client.peers[0], bytes(5_000_000))
    server.carrier.close()
    until(lambda: bool(client.lost), client, why="the loss is reported")
    client.carrier.send(client.peers[0], b"more")
    client.poll()
    assert client.lost == client.peers[:1]


def test_frames_sent_before_a_peer_closed_still_arrive(way: Unix) -> None:
    server, client = connected(way)
    client.carrier.send(client.peers[0], b"last words")
    client.carrier.close()
    until(lambda: bool(server.lost), server, why="the loss is reported")
    assert server.payloads == [b"last words"]
    assert server.events[-1] == Disconnected(server.peers[0])


def test_another_thread_can_wake_a_sleeping_poll(way: Unix) -> None:
    server = way.server()
    woken = threading.Event()

    def sleep() -> None:
        assert server.carrier.poll(None) == []
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    server.carrier.wake()
    assert woken.wait(PATIENCE_S), "wake did not end the poll"
    thread.join()


def test_wakes_before_a_poll_are_not_lost_and_count_once(way: Unix) -> None:
    server = way.server()
    server.carrier.wake()
    server.carrier.wake()
    started = time.monotonic()
    assert server.carrier.poll(PATIENCE_S) == []
    assert time.monotonic() - started < PATIENCE_S / 2, "the wake was lost"
    assert server.carrier.poll(0.0) == []


def test_clocks_of_one_host_are_one(way: Unix) -> None:
    """The other kinds ask: here all ends have the same clock, so the answer is nearly nothing."""
    server, client = connected(way)
    until(lambda: client.carrier.offset_ns(client.peers[0]) is not None, server, client, why="known")
    offset_ns = client.carrier.offset_ns(client.peers[0])
    assert offset_ns is not None
    assert abs(offset_ns) < 10**9


def test_received_payloads_have_the_number_of_their_peer(way: Unix) -> None:
    server, first = connected(way)
    first.carrier.send(first.peers[0], b"x")
    until(lambda: bool(server.payloads), server, first, why="a frame")
    assert Received(server.peers[0], b"x") in server.events
