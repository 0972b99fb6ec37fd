"""When the orchestrator has to look at its deadlines again."""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush

_SPARE = 64


class Alarms:
    """Times (ns) at which something may be due; one that rings for nothing does no harm.

    Those of requests that are over are dropped, for at a deployment's limit of an hour they would outnumber the living
    by far. They leave the heap once they are half of it, so dropping costs a constant time on average.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._of: Counter[int] = Counter()
        self._dropped = 0

    def __len__(self) -> int:
        """What is kept: those too that were dropped and have not left the heap."""
        return len(self._heap)

    def add(self, at_ns: int | None, of: int = 0) -> None:
        """Rings at a time; None: never.

        Args:
            of: key of the request that it is for; 0: nobody's, which is never dropped.
        """
        if at_ns is not None:
            heappush(self._heap, (at_ns, of))
            self._of[of] += 1

    def drop(self, of: int) -> None:
        """A request is over; a key is used once."""
        self._dropped += self._of.pop(of, 0)
        if self._dropped > _SPARE + len(self._heap) // 2:
            self._heap = [alarm for alarm in self._heap if alarm[1] in self._of]
            self._dropped = 0
            heapify(self._heap)

    def next_ns(self) -> int | None:
        """The earliest, or None."""
        while self._heap and self._heap[0][1] not in self._of:
            self._pop()
        return self._heap[0][0] if self._heap else None

    def pass_until(self, now_ns: int) -> None:
        """Those up to now have rung."""
        while self._heap and self._heap[0][0] <= now_ns:
            self._pop()

    def _pop(self) -> None:
        _, of = heappop(self._heap)
        if of not in self._of:
            self._dropped -= 1
        elif self._of[of] == 1:
            del self._of[of]
        else:
            self._of[of] -= 1
