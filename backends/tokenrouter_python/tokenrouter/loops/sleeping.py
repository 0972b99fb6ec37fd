"""What both loops share: how long they sleep, and a hook that nobody hangs on."""

from __future__ import annotations

# A selector takes no time of more than 2**31 ms. A loop that woke for nothing sleeps again.
_LONGEST_SLEEP_S = 3600.0


def nothing() -> None:
    """Default of the loops' hooks."""


def timeout_s(*times_ns: int | None, now_ns: int) -> float | None:
    """Seconds until the earliest of these times; None if there is none."""
    known = [at_ns for at_ns in times_ns if at_ns is not None]
    return min(max(0.0, (min(known) - now_ns) * 1e-9), _LONGEST_SLEEP_S) if known else None
