"""The bytes of a peer on another host: cipher, frames and link, without a socket."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Protocol

from tokenrouter.channel.framing import MAX_FRAME, FrameDecoder, frame
from tokenrouter.channel.link import Link, refusal
from tokenrouter.errors import ProtocolError

_STRANGER_FRAME = 1 << 20
"""Largest frame of a peer that has not said who it is."""


class Cipher(Protocol):
    """What lies between the socket and the frames."""

    def decrypt(self, data: bytes | memoryview) -> bytes:
        """What of the peer's bytes is text by now; handshakes go on in here, also with no bytes.

        Raises:
            ProtocolError: it is no peer that we can talk to.
        """
        ...

    def encrypt(self, data: bytes) -> None:
        """Only when `ready`; the bytes are then in `take`.

        Raises:
            ProtocolError: the connection is broken.
        """
        ...

    def take(self) -> bytes:
        """What has to be sent."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the handshake is over, as far as this side can tell."""
        ...

    def names(self) -> Collection[str]:
        """What the peer's certificate calls it; empty if there is no certificate."""
        ...


class Plain:
    """No cipher, for networks that encrypt and authenticate by themselves."""

    ready = True

    def __init__(self) -> None:
        self._outgoing = bytearray()

    def decrypt(self, data: bytes | memoryview) -> bytes:
        return bytes(data)

    def encrypt(self, data: bytes) -> None:
        self._outgoing += data

    def take(self) -> bytes:
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def names(self) -> Collection[str]:
        return ()


class Remote:
    """One peer.

    Args:
        cipher: of this connection.
        link: of this connection.
        allowed: names that the peer's certificate may have; None: it was checked otherwise.
    """

    def __init__(self, cipher: Cipher, link: Link, *, allowed: Collection[str] | None = None) -> None:
        self._cipher = cipher
        self._allowed = allowed
        self._decoder = FrameDecoder(_STRANGER_FRAME)
        self._identified = False
        self.link = link

    @property
    def counts(self) -> bool:
        """Whether the peer has said who it is and was accepted: before that it is nobody."""
        return self.link.peer is not None

    def begin(self) -> None:
        """The connection stands: says what this side has to say first. See `take`."""
        self._cipher.decrypt(b"")
        self._flush()

    def feed(self, data: bytes | memoryview, *, now_ns: int) -> list[bytes]:
        """Payloads for the loops. What it wants to answer is in `take`, whatever it raises.

        Raises:
            Refused: the peer refuses us.
            ProtocolError: the peer is refused; see `farewell`.
        """
        text = self._cipher.decrypt(data)
        if not self._cipher.ready:
            return []
        if not self._identified:
            self._identify()
        payloads = self.link.receive(self._decoder.feed(text), now_ns=now_ns)
        if self.counts:
            self._decoder.max_frame = MAX_FRAME
        self._flush()
        return payloads

    def seal(self, data: bytes) -> bytes:
        """The bytes that carry these frames. Raises ProtocolError if the connection is broken."""
        self._cipher.encrypt(data)
        return self._cipher.take()

    def tick(self, *, now_ns: int) -> None:
        """See `Link.tick`."""
        self.link.tick(now_ns=now_ns)
        self._flush()

    def take(self) -> bytes:
        """What has to be sent."""
        return self._cipher.take()

    def farewell(self, why: str) -> bytes:
        """The last bytes for a peer that is refused."""
        if self._cipher.ready:
            with contextlib.suppress(ProtocolError):
                self._cipher.encrypt(frame(refusal(why)))
        return self._cipher.take()

    def _identify(self) -> None:
        names = self._cipher.names()
        if self._allowed is not None and not set(names) & set(self._allowed):
            raise ProtocolError(
                f"its certificate is of {', '.join(sorted(names)) or 'nobody'}; tls.peers allows "
                f"{', '.join(sorted(self._allowed)) or 'nobody'}"
            )
        self._identified = True

    def _flush(self) -> None:
        if self._cipher.ready and self.link.outbox:
            self._cipher.encrypt(b"".join([frame(payload) for payload in self.link.outbox]))
            self.link.outbox.clear()
