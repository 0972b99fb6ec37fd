"""One socket of a carrier, and what is known of who is at its other end."""

from __future__ import annotations

import math
import socket
from typing import TYPE_CHECKING

from tokenrouter.channel.framing import FrameDecoder

if TYPE_CHECKING:
    from tokenrouter.channel.dialling import Dialler
    from tokenrouter.channel.remote import Remote

NEVER = math.inf


class Connection:
    """State of one socket.

    Attributes:
        sock: non-blocking.
        name: of the peer, for the log.
        peer: its number; 0 while it does not count.
        dialler: who dialled; None if the peer did.
        remote: what the bytes of another host pass; None on this host.
        decoder: of this host's peers.
        outgoing: bytes that the socket would not take.
        due_ns: when something has to happen.
        connecting, closing: before its life as a connection, and after.
        heard: whether a byte came from another host.
    """

    __slots__ = (
        "closing",
        "connecting",
        "decoder",
        "dialler",
        "due_ns",
        "heard",
        "name",
        "outgoing",
        "peer",
        "remote",
        "sock",
    )

    def __init__(
        self, sock: socket.socket, name: str, *, dialler: Dialler | None = None, remote: Remote | None = None
    ) -> None:
        self.sock = sock
        self.name = name
        self.peer = 0
        self.dialler = dialler
        self.remote = remote
        self.decoder = FrameDecoder()
        self.outgoing = bytearray()
        self.due_ns: float = NEVER
        self.connecting = False
        self.closing = False
        self.heard = False
