"""The carrier between processes of one host: Unix-domain sockets in a directory that only the owner can enter."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tokenrouter.channel.connection import Connection
from tokenrouter.channel.dialling import Dialler
from tokenrouter.channel.sockets import SocketCarrier
from tokenrouter.errors import ConfigError

RUNTIME_DIR_VARIABLE = "TOKENROUTER_RUNTIME_DIR"
_RETRY_S = 0.05
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


class UnixListener:
    """Where the peers of this host come from.

    Args:
        path: of the socket.
        patience_s: how long somebody else may still listen there, as a model does that is being reloaded.

    Raises:
        ConfigError: somebody listens there already, or the path is too long.
    """

    def __init__(self, path: Path, *, patience_s: float = 0.0) -> None:
        self._path = path
        self.sock = _listen(path, patience_s)

    def accept(self, *, now_ns: int) -> Connection | None:
        """See `sockets.Listener`."""
        try:
            sock, _ = self.sock.accept()
        except OSError:
            return None
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid not in (os.getuid(), 0):
            sock.close()
            return None
        return Connection(sock, "a peer of this host")

    def close(self) -> None:
        """The socket's file is removed, and its directory if it is empty."""
        # In this order: what listens here next may do so once nobody answers, and must not lose its file.
        self._path.unlink(missing_ok=True)
        self.sock.close()
        with contextlib.suppress(OSError):  # the last model to leave removes the directory
            self._path.parent.rmdir()


class UnixCarrier(SocketCarrier):
    """The carrier of a deployment on one host.

    Args:
        listen: path to listen on, or None.
        dial: name -> path of peers to connect to, now or as soon as they listen.
        patience_s: see `UnixListener`.

    Raises:
        ConfigError: see `UnixListener`.
    """

    def __init__(
        self, *, listen: Path | None = None, dial: Mapping[str, Path] | None = None, patience_s: float = 0.0
    ) -> None:
        super().__init__(
            listeners=[] if listen is None else [UnixListener(listen, patience_s=patience_s)],
            dial=[Dialler(name, path) for name, path in (dial or {}).items()],
        )


def _listen(path: Path, patience_s: float) -> socket.socket:
    """A listening socket at `path`; the file of a process that is gone is replaced."""
    until = time.monotonic() + patience_s
    while _answers(path):
        if time.monotonic() >= until:
            raise ConfigError(f"{path} is in use by another process; two servers need two {RUNTIME_DIR_VARIABLE}")
        time.sleep(_RETRY_S)
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
