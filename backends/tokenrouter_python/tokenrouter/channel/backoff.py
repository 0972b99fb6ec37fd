"""When a peer that could not be reached is dialled again."""

from __future__ import annotations

import random

SHORTEST_NS = 50_000_000
LONGEST_NS = 2_000_000_000


class Backoff:
    """Pauses of 50 ms, doubling to 2 s; each is cut by up to a half, so that many who lost one peer come apart.

    Args:
        draw: for the jitter.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._pause_ns = SHORTEST_NS

    def pause_ns(self) -> int:
        """The next pause."""
        pause_ns, self._pause_ns = self._pause_ns, min(2 * self._pause_ns, LONGEST_NS)
        return self._jittered(pause_ns)

    def longest_ns(self) -> int:
        """The pause after a refusal: what is refused now will hardly be taken soon."""
        return self._jittered(LONGEST_NS)

    def reset(self) -> None:
        """The peer was reached."""
        self._pause_ns = SHORTEST_NS

    def _jittered(self, pause_ns: int) -> int:
        return int(pause_ns * self._draw.uniform(0.5, 1.0))
