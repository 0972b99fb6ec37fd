"""When the orchestrator has to look at its deadlines again."""

from __future__ import annotations

from heapq import heappop, heappush


class Alarms:
    """Times (ns) at which something may be due; a needless one does no harm, so none is taken back."""

    def __init__(self) -> None:
        self._times: list[int] = []

    def add(self, at_ns: int | None) -> None:
        if at_ns is not None:
            heappush(self._times, at_ns)

    def next_ns(self) -> int | None:
        """The earliest, or None."""
        return self._times[0] if self._times else None

    def pass_until(self, now_ns: int) -> None:
        """Those up to now have rung."""
        while self._times and self._times[0] <= now_ns:
            heappop(self._times)
