"""Where a server listens."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.tritonserver.installation import LaunchError


def free_port(host: str = "127.0.0.1", taken: Sequence[int] = ()) -> int:
    """A TCP port that nobody uses now, outside the range from which outgoing connections take theirs."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(min(20_000, first - 5_000), first)
    for port in random.sample(candidates, 100):
        if port not in taken and _is_free(host, port):
            return port
    raise LaunchError(f"none of 100 ports between {candidates.start} and {candidates.stop} is free on {host}")


@dataclass(frozen=True)
class Ports:
    """Where the server listens; 0 takes a free port."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0

    def resolved(self, host: str) -> Ports:
        """The same with every 0 replaced.

        Raises:
            LaunchError: a port is in use; names the Makefile variable.
        """
        values: dict[str, int] = {}
        for name, port in (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics)):
            values[name] = usable_port(name, port, host, list(values.values()))
        return Ports(**values)


def usable_port(name: str, port: int, host: str, taken: Sequence[int] = ()) -> int:
    """The port, or a free one for 0.

    Raises:
        LaunchError: it is in use; names the Makefile variable.
    """
    if port and not _is_free(host, port):
        raise LaunchError(
            f"port {port} ({name}) on {host} is in use or not permitted; "
            f"choose another: make serve {name.upper()}_PORT={port + 1000}"
        )
    return port or free_port(host, taken)


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
