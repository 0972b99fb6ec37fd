"""When which peer is dialled, and where: one `Dialler` per name, `Diallers` for all of a carrier."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tokenrouter.channel.address import Address
from tokenrouter.channel.backoff import SHORTEST_NS, Backoff
from tokenrouter.channel.carrier import Unreachable
from tokenrouter.channel.connection import NEVER, Connection
from tokenrouter.channel.tcp import Network, Target, look_up_later


class Dialler:
    """A peer on this host, which is there or is not.

    Args:
        name: of the peer.
        path: of its socket.

    Attributes:
        due_ns: when to dial.
        why: why it is not connected, as was told last.
        where: what a reason begins with.
    """

    where = ""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.due_ns: float = 0
        self.why = ""
        self._path = path

    def dial(self, *, now_ns: int) -> Connection | None:
        """A new connection, if one can be had at once."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._path))
        except OSError:
            sock.close()
            self.due_ns = now_ns + SHORTEST_NS
            return None
        self.due_ns = NEVER
        return Connection(sock, self.name, dialler=self)

    def lost(self, *, now_ns: int, refused: bool) -> None:
        """The connection is over."""
        self.due_ns = now_ns + SHORTEST_NS

    def connected(self) -> None:
        """The peer counts."""
        self.why = ""


class RemoteDialler(Dialler):
    """A peer on another host: looked up at every dial, then tried at all addresses in turn.

    Args:
        name: of the peer.
        address: where it is.
        network: see `Network`.
        found: called with what is to be done in the carrier's thread, from any thread.
    """

    def __init__(
        self, name: str, address: Address, network: Network, found: Callable[[Callable[[], None]], None]
    ) -> None:
        super().__init__(name, Path())
        self.where = f"{address}: "
        self.address = address
        self.network = network
        self._found = found
        self._backoff = Backoff(network.draw)
        self._targets: list[Target] = []
        self._failed = ""

    def dial(self, *, now_ns: int) -> Connection | None:
        """A connection that is being made; the first call looks for the address, and says when to come again."""
        if self._failed:
            self.why, self._failed = self._failed, ""
            self.lost(now_ns=now_ns, refused=False)
            return None
        if not self._targets:
            self.due_ns = NEVER
            look_up_later(self.address, lambda found: self._found(lambda: self._looked_up(found)))
            return None
        self.due_ns = NEVER
        return self._connect(self._targets.pop(0), now_ns)

    def _looked_up(self, found: list[Target] | OSError) -> None:
        self.due_ns = 0
        if isinstance(found, OSError):
            self._failed = f"{self.address} does not resolve: {found.strerror or found} (models.{self.name}.host)"
        else:
            self._targets = found

    def _connect(self, target: Target, now_ns: int) -> Connection | None:
        sock = socket.socket(target[0], socket.SOCK_STREAM)
        sock.setblocking(False)
        self.network.tune(sock)
        code = sock.connect_ex(target[1])
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self.why = f"{self.where}{os.strerror(code)}"
            self.lost(now_ns=now_ns, refused=False)
            return None
        remote = self.network.dialled(self.name, self.address.host, now_ns=now_ns)
        connection = Connection(sock, f"model {self.name} at {self.address}", dialler=self, remote=remote)
        connection.connecting = True
        connection.due_ns = now_ns + self.network.patience_ns
        return connection

    def lost(self, *, now_ns: int, refused: bool) -> None:
        if self._targets and not refused:  # the next address of the name
            self.due_ns = now_ns
            return
        self._targets.clear()
        self.due_ns = now_ns + (self._backoff.longest_ns() if refused else self._backoff.pause_ns())

    def connected(self) -> None:
        super().connected()
        self._targets.clear()
        self._backoff.reset()


class Diallers:
    """All peers that a carrier dials. What belongs to the polling thread is handed to it.

    Args:
        dial: peers of this host.
        remote: those of other hosts, by name.
        network: see `RemoteDialler`; needed with `remote`.
        wake: makes the polling thread come by; called from any thread.
    """

    def __init__(
        self, dial: Sequence[Dialler], remote: Mapping[str, Address], network: Network | None, wake: Callable[[], None]
    ) -> None:
        self._wake = wake
        self._handed: deque[Callable[[], None]] = deque()
        self._all = list(dial)
        for name, address in remote.items():
            assert network is not None
            self._all.append(RemoteDialler(name, address, network, self._hand))

    @property
    def due_ns(self) -> float:
        """When the next of them is to be dialled."""
        return min([dialler.due_ns for dialler in self._all], default=NEVER)

    def dial(self, *, now_ns: int) -> Iterator[Connection | Unreachable]:
        """Dials whoever is due: connections, and why there are none where that has changed."""
        self._take()
        for dialler in self._all:
            while dialler.due_ns <= now_ns:
                was = dialler.why
                connection = dialler.dial(now_ns=now_ns)
                if connection is not None:
                    yield connection
                elif dialler.why != was:
                    yield Unreachable(dialler.name, dialler.why)
                self._take()

    def _hand(self, action: Callable[[], None]) -> None:
        """Has the polling thread do it."""
        self._handed.append(action)
        self._wake()

    def _take(self) -> None:
        while self._handed:
            self._handed.popleft()()
