"""Times of one host on another's clock. They feed only the histogram of hand-off times.

CLOCK_MONOTONIC begins anew on every host. A ping tells the difference, to within half of its round trip.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from tokenrouter.messages import Open, Report, Resume, ToOrchestrator, ToSubserver

_PINGS = 8


class Offset:
    """How far a peer's clock is ahead of ours, by the quickest of the last pings."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=_PINGS)

    def pong(self, *, sent_ns: int, peer_ns: int, now_ns: int) -> None:
        """A ping left at `sent_ns` and is back now; the peer's clock showed `peer_ns` in between."""
        round_trip_ns = now_ns - sent_ns
        if round_trip_ns >= 0:
            self._samples.append((round_trip_ns, peer_ns - (sent_ns + now_ns) // 2))

    @property
    def ns(self) -> int | None:
        """None before the first pong."""
        return min(self._samples)[1] if self._samples else None


def from_peer(message: ToOrchestrator, offset_ns: int | None) -> ToOrchestrator:
    """A subserver's message with its times on our clock; 0 stands for unknown."""
    if isinstance(message, Report) and offset_ns != 0:
        return replace(message, at_ns=_moved(message.at_ns, None if offset_ns is None else -offset_ns))
    return message


def to_peer(message: ToSubserver, offset_ns: int | None) -> ToSubserver:
    """A message with its times on the subserver's clock."""
    if offset_ns != 0 and isinstance(message, Open | Resume) and message.left_ns:
        return replace(message, left_ns=_moved(message.left_ns, offset_ns))
    return message


def _moved(at_ns: int, by_ns: int | None) -> int:
    return 0 if by_ns is None or not at_ns else max(0, at_ns + by_ns)
