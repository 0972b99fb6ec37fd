"""A link between two hosts on one machine: TCP through a process of ours, with a delay, and cut when asked to.

It moves bytes and looks at none. What it cannot imitate is a lost packet: it acknowledges what it has taken. A link
that is cut takes nothing: windows fill, and connections that are opened stay without an answer.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from types import TracebackType

from tokenrouter.channel.address import Address

_READ = 1 << 18
_MOST_BYTES = 1 << 20
"""On their way in one direction; then nothing more is taken, as by a full link."""


class _Way:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.queue: deque[tuple[float, bytes]] = deque()
        self.size = 0
        self.ended = False


class Relay:
    """A context manager that relays connections in a thread of its own.

    Args:
        listen: where to; port 0 takes a free one, see `address`.
        upstream: where from there.
        delay_s: that every byte takes, one way.

    Attributes:
        address: where it listens.
        relayed: bytes so far.
    """

    def __init__(self, listen: Address, upstream: Address, *, delay_s: float = 0.0) -> None:
        self._listener = socket.create_server((listen.host, listen.port), backlog=64)
        self._listener.setblocking(False)
        self.address = Address(listen.host, self._listener.getsockname()[1])
        self._upstream = upstream
        self._delay_s = delay_s
        self._ways: list[_Way] = []
        self._cut = False
        self._severs = False
        self._stopped = False
        self.relayed = 0
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped = True
        self._wake()
        self._thread.join()
        for way in self._ways:
            way.source.close()
        self._listener.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self._cut = True
        self._wake()

    def sever(self) -> None:
        """Resets all connections; new ones are relayed again."""
        self._severs = True
        self._wake()

    def mend(self) -> None:
        """The link works again; what waited goes on."""
        self._cut = False
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            if self._severs:
                self._severs = False
                for way in list(self._ways):
                    self._close(way)
            self._turn()

    def _turn(self) -> None:
        with selectors.SelectSelector() as selector:  # epoll would round delays up to a millisecond
            selector.register(self._wake_r, selectors.EVENT_READ, None)
            if not self._cut:
                self._register(selector)
            for key, mask in selector.select(self._patience_s()):
                if key.fd == self._wake_r:
                    os.read(self._wake_r, _READ)
                elif key.data is None:
                    self._accept()
                elif mask & selectors.EVENT_READ:
                    self._read(key.data)
        if not self._cut:
            for way in list(self._ways):
                self._write(way)

    def _register(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._listener, selectors.EVENT_READ, None)
        for way in self._ways:
            if not way.ended and way.size < _MOST_BYTES:
                selector.register(way.source, selectors.EVENT_READ, way)

    def _patience_s(self) -> float | None:
        due = [way.queue[0][0] for way in self._ways if way.queue]
        if self._cut or not due:
            return None
        return max(0.0, min(due) - time.monotonic())

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        try:
            far = socket.create_connection((self._upstream.host, self._upstream.port), timeout=1.0)
        except OSError:
            near.close()
            return
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
        self._ways += [_Way(near, far), _Way(far, near)]

    def _read(self, way: _Way) -> None:
        try:
            data = way.source.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            self._close(way)
            return
        way.ended = not data
        way.size += len(data)
        way.queue.append((time.monotonic() + self._delay_s, data))

    def _write(self, way: _Way) -> None:
        now = time.monotonic()
        while way.queue and way.queue[0][0] <= now:
            due, data = way.queue.popleft()
            try:
                if not data:
                    way.target.shutdown(socket.SHUT_WR)
                    continue
                sent = way.target.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._close(way)
                return
            self.relayed += sent
            way.size -= sent
            if sent < len(data):
                # Soon enough; a full window is not waited for by the selector.
                way.queue.appendleft((max(due, now + 0.001), data[sent:]))
                return

    def _close(self, way: _Way) -> None:
        """Both directions, with a reset."""
        for each in [each for each in self._ways if each.source in (way.source, way.target)]:
            self._ways.remove(each)
            with contextlib.suppress(OSError):
                each.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            each.source.close()
