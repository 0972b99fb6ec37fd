"""The link of ours between two hosts: what passes it, and when."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tokenrouter.channel.address import Address
from tools.hosts.relay import Relay

PATIENCE_S = 30.0


@pytest.fixture
def echo() -> Iterator[Address]:
    """Sends back what it is sent, until it is sent no more."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(peer,), daemon=True).start()

    def answer(peer: socket.socket) -> None:
        with peer:
            try:
                while data := peer.recv(1 << 16):
                    peer.sendall(data)
            except OSError:
                pass

    threading.Thread(target=serve, daemon=True).start()
    yield Address("127.0.0.1", listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def dial(relay: Relay) -> socket.socket:
    peer = socket.create_connection((relay.address.host, relay.address.port))
    peer.settimeout(PATIENCE_S)
    return peer


def test_bytes_pass_in_order_and_an_end_is_an_end(echo: Address) -> None:
    data = random.Random(1).randbytes(5_000_000)
    with Relay(Address("127.0.0.1", 0), echo) as relay, dial(relay) as peer:
        sender = threading.Thread(target=lambda: (peer.sendall(data), peer.shutdown(socket.SHUT_WR)))
        sender.start()
        assert b"".join(iter(lambda: peer.recv(1 << 16), b"")) == data
        sender.join()
        assert relay.relayed == 2 * len(data)


def test_a_delay_is_both_ways(echo: Address) -> None:
    with Relay(Address("127.0.0.1", 0), echo, delay_s=0.05) as relay, dial(relay) as peer:
        began_s = time.monotonic()
        peer.sendall(b"x")
        assert peer.recv(1) == b"x"
        assert time.monotonic() - began_s >= 0.1


def test_nothing_passes_a_cut_link_and_nothing_is_lost(echo: Address) -> None:
    with Relay(Address("127.0.0.1", 0), echo) as relay, dial(relay) as peer:
        peer.sendall(b"before")
        assert peer.recv(6) == b"before"
        relay.cut()
        peer.sendall(b"after")
        peer.settimeout(0.3)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        relay.mend()
        peer.settimeout(PATIENCE_S)
        assert peer.recv(5, socket.MSG_WAITALL) == b"after"


def test_a_severed_connection_is_reset_and_the_next_one_passes(echo: Address) -> None:
    with Relay(Address("127.0.0.1", 0), echo) as relay:
        with dial(relay) as peer:
            peer.sendall(b"x")
            assert peer.recv(1) == b"x"
            relay.sever()
            with pytest.raises(ConnectionResetError):
                peer.recv(1)
        with dial(relay) as peer:
            peer.sendall(b"y")
            assert peer.recv(1) == b"y"


def test_who_is_not_there_is_not_reached() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = Address("127.0.0.1", free.getsockname()[1])
        with Relay(Address("127.0.0.1", 0), nobody) as relay, dial(relay) as peer:
            assert peer.recv(1) == b""
