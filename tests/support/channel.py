"""Carriers of both kinds for tests: what they report, certificates, and networks with terms of the test's choice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tokenrouter.channel.address import Address
from tokenrouter.channel.carrier import Carrier, Connected, Disconnected, Event, Received, Unreachable
from tokenrouter.channel.link import Terms
from tokenrouter.channel.sockets import SocketCarrier
from tokenrouter.channel.tcp import Network, Service
from tokenrouter.channel.tls import Certificates, TlsSettings
from tools.certificates import write_certificates

PATIENCE_S = 30.0
ENTRY, LARGE, STRANGER = "entry", "large", "stranger"
_HOSTS = {ENTRY: ["127.0.0.1", "entry.test"], LARGE: ["127.0.0.1"], STRANGER: ["stranger.test"]}


class End:
    """One side: a carrier and everything that it reported."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.events: list[Event] = []

    def poll(self, timeout_s: float = 0.0) -> None:
        self.events += self.carrier.poll(timeout_s)

    @property
    def peers(self) -> list[int]:
        return [event.peer for event in self.events if isinstance(event, Connected)]

    @property
    def payloads(self) -> list[bytes]:
        return [event.payload for event in self.events if isinstance(event, Received)]

    @property
    def lost(self) -> list[int]:
        return [event.peer for event in self.events if isinstance(event, Disconnected)]

    @property
    def why(self) -> list[str]:
        return [event.why for event in self.events if isinstance(event, Unreachable)]


def until(condition: Callable[[], bool], *ends: End, why: str) -> None:
    """Polls all ends until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        events = [end.events for end in ends]
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {why}; {events}"
        for end in ends:
            end.poll(0.01)


def certificates(folder: Path, *, lasts: timedelta = timedelta(days=1), **options: Any) -> Path:
    """A folder with certificates of an entry's host, a model's, and one that nobody expects."""
    write_certificates(folder, _HOSTS, lasts=lasts, **options)
    return folder


def network(
    folder: Path | None,
    host: str = ENTRY,
    *,
    name: str | None = None,
    peers: tuple[str, ...] = ("entry.test",),
    **terms: Any,
) -> Network:
    """The network of one process.

    Args:
        folder: of `certificates`; None: a mesh without any.
        host: whose certificate it has.
        name: of its model; by default that of the host.
        peers: see `TlsSettings`.
        terms: see `Terms`, and of `TlsSettings` what ends with `_seconds`.
    """
    times: dict[str, Any] = {key: terms.pop(key) for key in list(terms) if key.endswith("_seconds")}
    settings = TlsSettings("mesh" if folder is None else "mtls", str(folder), peers, **times)
    draw = random.Random(1)
    own = Terms(name or host, "the repository", draw.getrandbits(62))
    return Network(
        settings,
        replace(own, **{"instance": hash(host) & (2**60 - 1), **terms}),
        None if folder is None else Certificates(folder / host),
        draw,
    )


def listening(own: Network, port: int = 0, **options: Any) -> tuple[SocketCarrier, Address]:
    """A carrier that listens, and where."""
    listener = Service(own, Address("127.0.0.1", port)).open(patience_s=0.0)
    return SocketCarrier(listeners=[listener], **options), Address("127.0.0.1", listener.sock.getsockname()[1])


def dialling(own: Network, addresses: Mapping[str, Address], **options: Any) -> SocketCarrier:
    """A carrier that dials."""
    return SocketCarrier(remote=addresses, network=own, **options)
