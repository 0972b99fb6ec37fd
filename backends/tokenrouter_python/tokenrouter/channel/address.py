"""Where a model on another host listens."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

DEFAULT_PORT = 8004
"""Of the token channel; 8000 to 8003 are Triton's and the supervisor's."""


@dataclass(frozen=True, slots=True)
class Address:
    """A name or an IP address, and a TCP port."""

    host: str
    port: int = DEFAULT_PORT

    @classmethod
    def parse(cls, text: str) -> Address:
        """From ``host``, ``host:port`` or ``[IPv6]:port``.

        Raises:
            ValueError: it is none of them.
        """
        host, colon, port = text.strip().rpartition(":")
        if not colon or (":" in host and not host.startswith("[")) or port.endswith("]"):
            host, port = text.strip(), str(DEFAULT_PORT)
        host = host.removeprefix("[").removesuffix("]")
        if not host or any(sign.isspace() or sign in "/@,[]" for sign in host) or not port.isdecimal():
            raise ValueError(f"{text!r} is no host, host:port or [IPv6]:port")
        if not 1 <= int(port) <= 65535:
            raise ValueError(f"{text!r} has port {port}; ports lie in 1..65535")
        return cls(host, int(port))

    @property
    def is_numeric(self) -> bool:
        """Whether it is an IP address, which needs no look-up."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
