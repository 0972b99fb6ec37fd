"""Notices a loop that hangs: what it works on now, and since which turn, for a thread that looks.

A loop sleeps, works, or waits for an engine. Only work is bounded: sleep ends when something happens, and a step takes
as long as it takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

_LOOKS = 20
"""How often a watchdog looks during the time that it allows."""


class Pulse:
    """Set by the loop's thread, read by others; no lock, each change is one assignment."""

    def __init__(self) -> None:
        self._turn = 0
        self._working = False

    @property
    def work(self) -> int | None:
        """The number of the piece of work at hand; None if the loop sleeps or waits for an engine."""
        turn = self._turn
        return turn if self._working else None

    def working(self) -> AbstractContextManager[None]:
        """A turn of the loop."""
        return _Work(self, working=True)

    def excused(self) -> AbstractContextManager[None]:
        """Within work: something that may take any time. What follows is a new piece of work."""
        return _Work(self, working=False)

    def enter(self, working: bool) -> bool:
        """Whether the loop works from now on; returns whether it did before."""
        was = self._working
        self._turn += working  # before it is work, which nobody may take for that of the turn before
        self._working = working
        return was


class _Work:
    """In the block the loop works, or does not; behind it as before. A generator would cost five times as much."""

    __slots__ = ("_pulse", "_was", "_working")

    def __init__(self, pulse: Pulse, *, working: bool) -> None:
        self._pulse = pulse
        self._working = working

    def __enter__(self) -> None:
        self._was = self._pulse.enter(self._working)

    def __exit__(self, *_: object) -> None:
        self._pulse.enter(self._was)


class Watchdog:
    """Calls `hangs` once, in a thread of its own, when a loop has worked on the same thing for too long.

    It counts its own looks, not the clock: a process that was stopped and continued did not hang.

    Args:
        pulse: of the loop.
        patience_s: how long one piece of work may take.
        hangs: what to do.
        looked: called after every look.
    """

    def __init__(
        self, pulse: Pulse, patience_s: float, hangs: Callable[[], None], looked: Callable[[], None] = lambda: None
    ) -> None:
        self._pulse = pulse
        self._period_s = patience_s / _LOOKS
        self._hangs = hangs
        self._looked = looked
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        seen, looks = None, 0
        while not self._stopped.wait(self._period_s):
            work = self._pulse.work
            looks = looks + 1 if work is not None and work == seen else 0
            seen = work
            if looks >= _LOOKS:
                self._hangs()
                return
            self._looked()
