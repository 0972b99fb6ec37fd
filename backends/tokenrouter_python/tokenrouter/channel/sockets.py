"""The carrier over sockets: one selector loop for the peers of this host and those of others.

A peer of this host counts once it is connected: the kernel vouches for its user. One of another host counts once it has
said who it is and was accepted; before that it is nobody's business but this file's. See `remote` for its bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tokenrouter.channel.address import Address
from tokenrouter.channel.carrier import Connected, Disconnected, Event, Received, Unreachable
from tokenrouter.channel.connection import NEVER, Connection
from tokenrouter.channel.dialling import Dialler, Diallers
from tokenrouter.channel.framing import MAX_FRAME, frame
from tokenrouter.channel.link import MARK, Refused, refusal, refused
from tokenrouter.channel.remote import Remote
from tokenrouter.channel.sparse_log import SparseLog
from tokenrouter.channel.tcp import Network
from tokenrouter.errors import ProtocolError

log = logging.getLogger(__name__)

MAX_OUTGOING = MAX_FRAME
"""Bytes that a peer may leave unread."""
_RECEIVE = 1 << 18
_MOST_STRANGERS = 64
_FAREWELL_NS = 10**9


class Listener(Protocol):
    """A socket that listens."""

    sock: socket.socket

    def accept(self, *, now_ns: int) -> Connection | None:
        """The next connection; None if it is gone, or nobody that may come."""
        ...

    def close(self) -> None: ...


class SocketCarrier:
    """Carrier over sockets. Lost connections that were dialled are dialled again.

    Args:
        listeners: where peers come from.
        dial: peers of this host to connect to, now or as soon as they listen.
        remote: peers of other hosts, by name.
        network: what connections to other hosts have in common; needed with `remote`.
        clock_ns: as `time.monotonic_ns`.
    """

    def __init__(
        self,
        *,
        listeners: Sequence[Listener] = (),
        dial: Sequence[Dialler] = (),
        remote: Mapping[str, Address] | None = None,
        network: Network | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._selector = selectors.DefaultSelector()
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, "wake")
        self._listeners = listeners
        for listener in listeners:
            self._selector.register(listener.sock, selectors.EVENT_READ, listener)
        self._connections: dict[int, Connection] = {}
        self._timed: dict[Connection, None] = {}
        self._events: list[Event] = []
        self._next_peer = 1
        self._diallers = Diallers(dial, remote or {}, network, self.wake)
        self._sparse = SparseLog(log)
        # One for all: a new one of this size for every read costs more than the read.
        self._received = memoryview(bytearray(_RECEIVE))

    def poll(self, timeout_s: float | None) -> list[Event]:
        now_ns = self._clock_ns()
        deadline_ns = NEVER if timeout_s is None else now_ns + timeout_s * 1e9
        while True:
            self._tend(now_ns)
            woken = self._select(0.0 if self._events else self._patience_s(deadline_ns))
            now_ns = self._clock_ns()
            if self._events or woken or now_ns >= deadline_ns:
                events, self._events = self._events, []
                return events

    def send(self, peer: int, *payloads: bytes) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            data = b"".join([frame(payload) for payload in payloads])
            if connection.remote is None:
                self._write(connection, data)
            else:
                self._seal(connection, connection.remote, data)

    def drop(self, peer: int, why: str = "") -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            self._end(connection, why or "dropped", farewell=bool(why))

    def offset_ns(self, peer: int) -> int | None:
        connection = self._connections.get(peer)
        return 0 if connection is None or connection.remote is None else connection.remote.link.offset.ns

    def wake(self) -> None:
        # Under the lock, because after `close` the number may be that of somebody else's file.
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """See `Carrier.close`."""
        for connection in {*self._connections.values(), *self._timed}:
            connection.sock.close()
        self._connections.clear()
        self._timed.clear()
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    # --- time -----------------------------------------------------------------------------------------------------

    def _tend(self, now_ns: int) -> None:
        """Whatever is due: dials, pings, and connections whose time is over."""
        for found in self._diallers.dial(now_ns=now_ns):
            if isinstance(found, Connection):
                self._add(found, now_ns)
            else:
                self._events.append(found)
        for connection in [each for each in self._timed if each.due_ns <= now_ns]:
            self._due(connection, now_ns)

    def _patience_s(self, deadline_ns: float) -> float | None:
        """Seconds until `deadline_ns` or whatever is due before; None = for ever."""
        until_ns = min(deadline_ns, self._diallers.due_ns)
        for connection in self._timed:
            until_ns = min(until_ns, connection.due_ns)
        return None if until_ns == NEVER else max(0.0, (until_ns - self._clock_ns()) * 1e-9)

    def _due(self, connection: Connection, now_ns: int) -> None:
        remote = connection.remote
        if connection.closing:
            self._close(connection)
        elif remote is None or not connection.peer:
            self._end(connection, "no answer in time: it still loads, it hangs, or something between drops its packets")
        else:
            try:
                remote.tick(now_ns=now_ns)
            except ProtocolError as exc:
                self._end(connection, str(exc))
                return
            connection.due_ns = remote.link.due_ns
            self._write(connection, remote.take())

    # --- coming and going -----------------------------------------------------------------------------------------

    def _accept(self, listener: Listener, now_ns: int) -> None:
        connection = listener.accept(now_ns=now_ns)
        if connection is None:
            return
        strangers = [each for each in self._timed if not each.peer and each.dialler is None and not each.closing]
        if len(strangers) >= _MOST_STRANGERS:
            self._end(strangers[0], "too many that do not say who they are")
        self._add(connection, now_ns)

    def _add(self, connection: Connection, now_ns: int) -> None:
        connection.sock.setblocking(False)
        mask = selectors.EVENT_WRITE if connection.connecting else selectors.EVENT_READ
        self._selector.register(connection.sock, mask, connection)
        if connection.remote is None:
            self._count(connection)
            return
        self._timed[connection] = None
        if not connection.connecting:
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        """The connection to another host stands."""
        assert connection.remote is not None
        connection.connecting = False
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
        try:
            connection.remote.begin()
        except ProtocolError as exc:
            self._end(connection, str(exc))
        else:
            self._write(connection, connection.remote.take())

    def _count(self, connection: Connection) -> None:
        """From here on the loops know of it."""
        connection.peer = self._next_peer
        self._next_peer += 1
        self._connections[connection.peer] = connection
        dialler = connection.dialler
        if dialler is not None:
            dialler.connected()
        address = dialler.name if dialler is not None else ""
        self._events.append(Connected(connection.peer, address, connection.remote is not None))

    def _greeted(self, connection: Connection) -> None:
        """A peer of another host is accepted, and replaces what is left of an earlier connection of its process."""
        remote = connection.remote
        assert remote is not None
        assert remote.link.peer is not None
        instance = remote.link.peer.instance
        for old in list(self._connections.values()):
            same = old.remote is not None and old.remote.link.peer is not None and old.dialler is connection.dialler
            if same and old.remote.link.peer.instance == instance:  # type: ignore[union-attr]
                self._end(old, "its process has connected anew")
        if connection.dialler is None:
            connection.name = f"{remote.link.peer.name} at {connection.name}"
        log.info("connected: %s", connection.name)
        self._count(connection)

    def _end(self, connection: Connection, why: str, *, farewell: bool = False, refused: bool = False) -> None:
        """The connection is over; with a farewell the peer is told why, and closes first."""
        if connection.closing or connection.sock.fileno() < 0:
            return
        if farewell:
            data = frame(refusal(why)) if connection.remote is None else connection.remote.farewell(why)
            with contextlib.suppress(OSError):
                connection.sock.send(connection.outgoing + data)
        connection.closing = True
        if self._connections.pop(connection.peer, None) is not None:
            self._events.append(Disconnected(connection.peer))
        self._told(connection, why, refused=farewell or refused)
        if farewell:
            self._linger(connection)
        else:
            self._close(connection)

    def _told(self, connection: Connection, why: str, *, refused: bool) -> None:
        dialler, now_ns = connection.dialler, self._clock_ns()
        if connection.remote is not None and (dialler is not None or connection.heard):  # not a probe of the port
            self._sparse.warning(f"connection ended: {connection.name}: {why}", now_ns=now_ns)
        if dialler is None:
            return
        dialler.lost(now_ns=now_ns, refused=refused)
        why = f"{dialler.where}{why}"
        if (connection.remote is not None or refused) and dialler.why != why:
            dialler.why = why
            self._events.append(Unreachable(dialler.name, why))

    def _linger(self, connection: Connection) -> None:
        """Until the peer has read the farewell: closing with its bytes unread would take that from it."""
        connection.due_ns = self._clock_ns() + _FAREWELL_NS
        self._timed[connection] = None
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_WR)

    def _close(self, connection: Connection) -> None:
        self._timed.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _select(self, timeout_s: float | None) -> bool:
        """Waits, moves bytes, collects events. Returns whether somebody called `wake`."""
        woken = False
        for key, mask in self._selector.select(timeout_s):
            target = key.data
            if target == "wake":
                os.eventfd_read(self._wake_fd)
                woken = True
            elif not isinstance(target, Connection):
                self._accept(target, self._clock_ns())
            elif target.connecting:
                self._stands(target)
            else:
                if mask & selectors.EVENT_WRITE:
                    self._write(target, b"")
                if mask & selectors.EVENT_READ:
                    self._read(target)
        return woken

    def _stands(self, connection: Connection) -> None:
        code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._end(connection, os.strerror(code))
        else:
            self._begin(connection)

    def _read(self, connection: Connection) -> None:
        if connection.sock.fileno() < 0:  # ended by what came before it in the same turn
            return
        try:
            data = self._received[: connection.sock.recv_into(self._received)]
        except BlockingIOError:
            return
        except OSError as exc:
            self._lost(connection, exc.strerror or str(exc))
            return
        if not data:
            self._lost(connection, "the peer closed it")
        elif not connection.closing:
            (self._decode if connection.remote is None else self._take)(connection, data)

    def _lost(self, connection: Connection, why: str) -> None:
        if connection.closing:
            self._close(connection)
        else:
            self._end(connection, why)

    def _decode(self, connection: Connection, data: memoryview) -> None:
        """Bytes of a peer of this host."""
        try:
            payloads = connection.decoder.feed(data)
        except ProtocolError as exc:
            self._end(connection, str(exc))
            return
        for payload in payloads:
            if payload[:1] == MARK and (why := refused(payload)) is not None:
                self._end(connection, why, refused=True)
                return
            self._events.append(Received(connection.peer, payload))

    def _take(self, connection: Connection, data: memoryview) -> None:
        """Bytes of a peer of another host."""
        remote = connection.remote
        assert remote is not None
        connection.heard = True
        try:
            payloads = remote.feed(data, now_ns=self._clock_ns())
        except Refused as exc:
            self._end(connection, f"it refuses us: {exc}", refused=True)
            return
        except ProtocolError as exc:
            self._end(connection, str(exc), farewell=True)
            return
        if remote.counts and not connection.peer:
            self._greeted(connection)
        if connection.peer:
            connection.due_ns = remote.link.due_ns
        self._events.extend([Received(connection.peer, payload) for payload in payloads])
        self._write(connection, remote.take())

    def _seal(self, connection: Connection, remote: Remote, data: bytes) -> None:
        try:
            sealed = remote.seal(data)
        except ProtocolError as exc:
            self._end(connection, str(exc))
        else:
            self._write(connection, sealed)

    def _write(self, connection: Connection, data: bytes) -> None:
        """Sends what waits, and then `data`."""
        outgoing = connection.outgoing
        if outgoing:
            if data and len(outgoing) > MAX_OUTGOING:
                self._end(connection, f"it has left {len(outgoing)} bytes unread; the limit is {MAX_OUTGOING}")
                return
            outgoing += data
            if data:
                return  # the selector says when
            sent = self._try_send(connection, outgoing)
            del outgoing[:sent]
        elif data:
            sent = self._try_send(connection, data)
            outgoing += data[sent:]
            if not outgoing:
                return
        if not connection.closing:
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
            self._selector.modify(connection.sock, mask, connection)

    def _try_send(self, connection: Connection, data: bytes | bytearray) -> int:
        try:
            return connection.sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            self._end(connection, exc.strerror or str(exc))
            return 0
