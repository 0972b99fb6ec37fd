"""`Carrier` is all that the loops know of the channel: it moves frames, and says who came and went."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import msgspec


class Connected(msgspec.Struct, frozen=True):
    """A peer is connected.

    Attributes:
        peer: its number.
        address: the name that was dialled, or "" if the peer dialled us.
        elsewhere: it is on another host.
    """

    peer: int
    address: str
    elsewhere: bool = False


class Received(msgspec.Struct, frozen=True):
    """One whole frame."""

    peer: int
    payload: bytes


class Disconnected(msgspec.Struct, frozen=True):
    """A peer is gone; its number is not used again."""

    peer: int


class Unreachable(msgspec.Struct, frozen=True):
    """Why a name that is dialled is not connected: it cannot be reached, or refuses us. Told when that changes."""

    address: str
    why: str


Event: TypeAlias = Connected | Received | Disconnected | Unreachable


class Carrier(Protocol):
    """Moves frames. All methods but `wake` belong to the thread that polls."""

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Waits for events at most this long (None = no limit). Returns early, maybe with nothing, after `wake`."""
        ...

    def send(self, peer: int, *payloads: bytes) -> None:
        """Sends frames; never blocks. A peer that is gone is reported by the next `poll`.

        Frames of one call travel together: unless they are large, one `poll` of the peer returns them all. A peer that
        leaves more than `MAX_OUTGOING` bytes unread is dropped.
        """
        ...

    def drop(self, peer: int, why: str = "") -> None:
        """Closes the connection to a peer; the next `poll` reports it as disconnected. The peer is told why."""
        ...

    def offset_ns(self, peer: int) -> int | None:
        """How far the peer's clock is ahead of ours: 0 on this host, None while it is not known."""
        ...

    def wake(self) -> None:
        """Makes `poll` return; callable from any thread."""
        ...

    def close(self) -> None: ...
