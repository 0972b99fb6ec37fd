"""TCP sockets of the carrier between hosts: how they are made, tuned and given up."""

from __future__ import annotations

import errno
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tokenrouter.channel.address import Address
from tokenrouter.channel.connection import Connection
from tokenrouter.channel.link import Link, Refused, Terms
from tokenrouter.channel.remote import Plain, Remote
from tokenrouter.channel.tls import FOLDER_VARIABLE, Certificates, Tls, TlsSettings
from tokenrouter.errors import ConfigError, ProtocolError

Target: TypeAlias = tuple[int, Any]
"""Address family and socket address."""
_PROBE_S = 1.0
_RETRY_S = 0.05
_READ = 1 << 16
_WHERE = (
    "load a model on the host that models.*.host names, and say in models.*.listen where it listens if that is another "
    "address there"
)
# Keepalive: after a second of silence, every second, three times.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True)
class Network:
    """What all connections of a process to other hosts have in common.

    Args:
        settings: of the deployment.
        terms: what this process says of itself.
        certificates: of this host; None in a mesh.
        draw: for the jitter of pauses.
    """

    settings: TlsSettings
    terms: Terms
    certificates: Certificates | None
    draw: random.Random = field(default_factory=random.Random)

    @classmethod
    def of(cls, settings: TlsSettings, *, name: str, repository: str) -> Network:
        """The network as a process of a deployment sees it.

        Args:
            settings: of the deployment.
            name: of this process's model.
            repository: the repository's digest.

        Raises:
            ConfigError: the certificates cannot be read.
        """
        terms = Terms(name, repository, secrets.randbits(62), silence_ns=int(settings.silence_seconds * 1e9))
        folder = Path(os.environ.get(FOLDER_VARIABLE) or settings.folder)
        return cls(settings, terms, Certificates(folder) if settings.mode == "mtls" else None)

    def dialled(self, model: str, host: str, *, now_ns: int) -> Remote:
        """A connection that stands, to the host of a model."""
        cipher = Plain() if self.certificates is None else Tls(self.certificates.client(), dialled=host)
        return Remote(cipher, Link(self.terms, expected=model, now_ns=now_ns))

    def accepted(self, *, now_ns: int) -> Remote:
        """A connection that somebody opened."""
        link = Link(self.terms, expected="", now_ns=now_ns)
        if self.certificates is None:
            return Remote(Plain(), link)
        return Remote(Tls(self.certificates.server()), link, allowed=self.settings.peers)

    def tune(self, sock: socket.socket) -> None:
        """Small frames leave at once; a peer that is gone is noticed soon."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        # It ends connections whose receiver does not read, too: to sleep longer than this is to be gone.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.settings.user_timeout_seconds * 1e3))

    @property
    def patience_ns(self) -> int:
        """From the first byte of a connection to the peer's greeting."""
        return int(self.settings.user_timeout_seconds * 1e9)


def look_up(address: Address) -> list[Target]:
    """Where a name leads to now. May take as long as a name server takes.

    Raises:
        OSError: nowhere.
    """
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, target) for family, _, _, _, target in found))


def look_up_later(address: Address, done: Callable[[list[Target] | OSError], None]) -> None:
    """Tells `done`: at once for a number, from another thread for a name."""

    def work() -> None:
        try:
            found: list[Target] | OSError = look_up(address)
        except OSError as exc:
            found = exc
        done(found)

    if address.is_numeric:
        work()
    else:
        threading.Thread(target=work, name="resolver", daemon=True).start()


def listening(address: Address) -> socket.socket | None:
    """A listening socket; None if the address is in use.

    Raises:
        ConfigError: it is no address of this host; says what to do.
    """
    try:
        family, target = look_up(address)[0]
    except OSError as exc:
        raise ConfigError(f"cannot listen on {address}: {exc.strerror or exc}; {_WHERE}") from exc
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(target)
        sock.listen()
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            return None
        raise ConfigError(f"cannot listen on {address}: {exc.strerror}; {_WHERE}") from exc
    sock.setblocking(False)
    return sock


def is_served(network: Network, model: str, address: Address) -> bool:
    """Whether a model greets, or refuses us, at an address. A proxy that only accepts connections is none."""
    remote = network.dialled(model, address.host, now_ns=0)
    try:
        with socket.create_connection((address.host, address.port), timeout=_PROBE_S) as sock:
            sock.settimeout(_PROBE_S)
            remote.begin()
            sock.sendall(remote.take())
            while not remote.counts and (data := sock.recv(_READ)):
                remote.feed(data, now_ns=0)
                sock.sendall(remote.take())
    except Refused:
        return True
    except (OSError, ProtocolError):
        return False
    return remote.counts


class TcpListener:
    """Where models of other hosts are dialled.

    Args:
        sock: see `listening`.
        network: see `Network`.
    """

    def __init__(self, sock: socket.socket, network: Network) -> None:
        self.sock = sock
        self._network = network

    def accept(self, *, now_ns: int) -> Connection | None:
        """See `sockets.Listener`."""
        try:
            sock, origin = self.sock.accept()
        except OSError:
            return None
        self._network.tune(sock)
        connection = Connection(sock, origin[0], remote=self._network.accepted(now_ns=now_ns))
        connection.due_ns = now_ns + self._network.patience_ns
        return connection

    def close(self) -> None:
        self.sock.close()


@dataclass(frozen=True)
class Service:
    """Where a model is to listen for other hosts.

    Attributes:
        network: see `Network`.
        public: where others find it.
        listen: where it listens, if that is somewhere else, as in a container.
    """

    network: Network
    public: Address
    listen: Address | None = None

    def open(self, *, patience_s: float) -> TcpListener:
        """Listens.

        Args:
            patience_s: how long a predecessor may still serve the model.

        Raises:
            ConfigError: somebody serves the model already, or it cannot be served here.
        """
        until, where = time.monotonic() + patience_s, self.listen or self.public
        while True:
            taken = self.public if is_served(self.network, self.network.terms.name, self.public) else where
            if taken is where and (sock := listening(where)):
                return TcpListener(sock, self.network)
            if time.monotonic() >= until:
                raise ConfigError(
                    f"{taken} is in use: a model is served on one host only, that of models.*.host, and by one server"
                )
            time.sleep(_RETRY_S)
