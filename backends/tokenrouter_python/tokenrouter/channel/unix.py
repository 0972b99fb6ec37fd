"""The carrier between processes of one host: Unix-domain sockets in a directory that only the owner can enter."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tokenrouter.channel.carrier import Connected, Disconnected, Event, Received
from tokenrouter.channel.framing import FrameDecoder, frame
from tokenrouter.errors import ConfigError, ProtocolError

RUNTIME_DIR_VARIABLE = "TOKENROUTER_RUNTIME_DIR"
_REDIAL_S = 0.05
_RECEIVE = 1 << 18
_UCRED = struct.Struct("3i")


def runtime_dir() -> Path:
    """Where the models of this server put their sockets; created with mode 0700.

    The launcher names it in TOKENROUTER_RUNTIME_DIR. Without it the directory follows from the process that all models
    of a server share as parent, tritonserver.

    Raises:
        ConfigError: the directory belongs to somebody else or is open to others.
    """
    named = os.environ.get(RUNTIME_DIR_VARIABLE)
    path = Path(named or Path(tempfile.gettempdir()) / f"tokenrouter-{os.getuid()}-{os.getppid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{path} must belong to this user and have mode 0700; set {RUNTIME_DIR_VARIABLE} elsewhere")
    return path


def socket_path(directory: Path, model: str) -> Path:
    return directory / f"{model}.sock"


class _Connection:
    __slots__ = ("address", "decoder", "outgoing", "peer", "sock")

    def __init__(self, peer: int, sock: socket.socket, address: str) -> None:
        self.peer = peer
        self.sock = sock
        self.address = address
        self.decoder = FrameDecoder()
        self.outgoing = bytearray()


class UnixCarrier:
    """Carrier over Unix-domain sockets. Lost connections that were dialled are dialled again.

    Args:
        listen: path to listen on, or None.
        dial: name -> path of peers to connect to, now or as soon as they listen.
        patience_s: how long somebody else may still listen on `listen`, as a model does that is being reloaded.

    Raises:
        ConfigError: somebody listens on `listen` already, or the path is too long.
    """

    def __init__(
        self, *, listen: Path | None = None, dial: Mapping[str, Path] | None = None, patience_s: float = 0.0
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, "wake")
        self._connections: dict[int, _Connection] = {}
        self._dead: list[_Connection] = []
        self._dial = dict(dial or {})
        self._to_dial = dict.fromkeys(self._dial, 0.0)
        self._next_peer = 1
        self._listen = listen
        self._listener: socket.socket | None = None
        if listen is not None:
            self._listener = _listen(listen, patience_s)
            self._selector.register(self._listener, selectors.EVENT_READ, "listen")

    def poll(self, timeout_s: float | None) -> list[Event]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            events = self._redial()
            events.extend(self._take_dead())
            woken = self._select(0.0 if events else self._patience(deadline), events)
            events.extend(self._take_dead())
            if events or woken or time.monotonic() >= deadline:
                return events

    def send(self, peer: int, *payloads: bytes) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        data = b"".join([frame(payload) for payload in payloads])
        if connection.outgoing:
            connection.outgoing += data
            return
        sent = self._try_send(connection, data)
        if sent < len(data) and peer in self._connections:
            connection.outgoing += data[sent:]
            self._selector.modify(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def drop(self, peer: int) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            self._kill(connection)

    def wake(self) -> None:
        # Under the lock, because after `close` the number may be that of somebody else's file.
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """See `Carrier.close`; the listening socket's file is removed, and its directory if it is empty."""
        for connection in list(self._connections.values()):
            connection.sock.close()
        self._connections.clear()
        if self._listener is not None and self._listen is not None:
            # In this order: what listens here next may do so once nobody answers, and must not lose its file.
            self._listen.unlink(missing_ok=True)
            self._listener.close()
            with contextlib.suppress(OSError):  # the last model to leave removes the directory
                self._listen.parent.rmdir()
        self._selector.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    # --- dialling and accepting -----------------------------------------------------------------------------------

    def _redial(self) -> list[Event]:
        """Tries every peer that is due."""
        events: list[Event] = []
        now = time.monotonic()
        for name in [name for name, due in self._to_dial.items() if due <= now]:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(self._dial[name]))
            except OSError:
                sock.close()
                self._to_dial[name] = now + _REDIAL_S
                continue
            del self._to_dial[name]
            events.append(Connected(self._add(sock, name).peer, name))
        return events

    def _accept(self) -> list[Event]:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return []
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid not in (os.getuid(), 0):
            sock.close()
            return []
        return [Connected(self._add(sock, "").peer, "")]

    def _add(self, sock: socket.socket, address: str) -> _Connection:
        sock.setblocking(False)
        connection = _Connection(self._next_peer, sock, address)
        self._next_peer += 1
        self._connections[connection.peer] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _patience(self, deadline: float) -> float | None:
        """Seconds until `deadline` or the next dial; None = for ever."""
        until = min([deadline, *self._to_dial.values()])
        return None if until == math.inf else max(0.0, until - time.monotonic())

    def _select(self, timeout_s: float | None, events: list[Event]) -> bool:
        """Waits, moves bytes, appends events. Returns whether somebody called `wake`."""
        woken = False
        for key, mask in self._selector.select(timeout_s):
            if key.data == "wake":
                os.eventfd_read(self._wake_fd)
                woken = True
            elif key.data == "listen":
                events.extend(self._accept())
            else:
                if mask & selectors.EVENT_WRITE:
                    self._write(key.data)
                if mask & selectors.EVENT_READ:
                    events.extend(self._read(key.data))
        return woken

    def _read(self, connection: _Connection) -> list[Event]:
        try:
            data = connection.sock.recv(_RECEIVE)
            frames = connection.decoder.feed(data)
        except BlockingIOError:
            return []
        except (OSError, ProtocolError):
            data, frames = b"", []
        if not data:
            self._kill(connection)
        return [Received(connection.peer, payload) for payload in frames]

    def _write(self, connection: _Connection) -> None:
        del connection.outgoing[: self._try_send(connection, connection.outgoing)]
        if not connection.outgoing and connection.peer in self._connections:
            self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _try_send(self, connection: _Connection, data: bytes | bytearray) -> int:
        try:
            return connection.sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._kill(connection)
            return 0

    def _kill(self, connection: _Connection) -> None:
        if self._connections.pop(connection.peer, None) is None:
            return
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._dead.append(connection)

    def _take_dead(self) -> list[Event]:
        dead, self._dead = self._dead, []
        for connection in dead:
            if connection.address:
                self._to_dial[connection.address] = time.monotonic() + _REDIAL_S
        return [Disconnected(connection.peer) for connection in dead]


def _listen(path: Path, patience_s: float) -> socket.socket:
    """A listening socket at `path`; the file of a process that is gone is replaced."""
    until = time.monotonic() + patience_s
    while _answers(path):
        if time.monotonic() >= until:
            raise ConfigError(f"{path} is in use by another process; two servers need two {RUNTIME_DIR_VARIABLE}")
        time.sleep(_REDIAL_S)
    path.unlink(missing_ok=True)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # who left last has removed it
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
    except OSError as exc:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {exc}; set {RUNTIME_DIR_VARIABLE} to a shorter path") from exc
    path.chmod(0o600)
    sock.listen()
    sock.setblocking(False)
    return sock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
