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
    def parse(cls, text: str, port: int = DEFAULT_PORT) -> Address:
        """From ``host``, ``host:port`` or ``[IPv6]:port``; `port` if it names none.

        Raises:
            ValueError: it is none of them.
        """
        host, colon, digits = text.strip().rpartition(":")
        if not colon or (":" in host and not host.startswith("[")) or digits.endswith("]"):
            host, digits = text.strip(), str(port)
        host = host.removeprefix("[").removesuffix("]")
        if not host or any(sign.isspace() or sign in "/@,[]" for sign in host) or not digits.isdecimal():
            raise ValueError(f"{text!r} is no host, host:port or [IPv6]:port")
        if not 1 <= int(digits) <= 65535:
            raise ValueError(f"{text!r} has port {digits}; ports lie in 1..65535")
        return cls(host, int(digits))

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
