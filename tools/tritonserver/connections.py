"""Ends connections of another process from outside, so that nobody waits for an answer that will never come."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Collection, Iterator

# pidfd_getfd has this number on every architecture; Python has no function for it.
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def cut_clients(pid: int, ports: Collection[int]) -> int:
    """Shuts down every connection that a process accepted on these TCP ports. Returns how many.

    Raises:
        OSError: the kernel does not let us (no right to trace the process, or no such system call).
    """
    process = os.pidfd_open(pid)
    try:
        return sum(_cut(copy, ports) for copy in _descriptors(process, pid))
    finally:
        os.close(process)


def _descriptors(process: int, pid: int) -> Iterator[int]:
    """A copy of each of its sockets."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            if not os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
                continue
        except FileNotFoundError:  # closed meanwhile
            continue
        copy = _libc.syscall(_PIDFD_GETFD, process, int(number), 0)
        if copy >= 0:
            yield copy
        elif (error := ctypes.get_errno()) != errno.EBADF:  # closed meanwhile
            raise OSError(error, f"pidfd_getfd: {os.strerror(error)}")


def _cut(copy: int, ports: Collection[int]) -> bool:
    with socket.socket(fileno=copy) as connection:
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return False
            connection.getpeername()  # raises for a socket that listens
            if connection.getsockname()[1] not in ports:
                return False
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        return True
