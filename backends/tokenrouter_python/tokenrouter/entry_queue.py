"""The queue in front of the entry model: who waits, who is refused, who has waited too long.

The fields have the names and the meaning of Triton's ModelQueuePolicy, but they are parameters of the model and
enforced here, and the model has no `dynamic_batching`: in Triton 2.51 the dynamic batcher holds requests of a burst
back for 0.5 s and more although a decoupled model is idle, looks at time-outs only every 0.5 s, and never again once a
request was handed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tokenrouter.errors import DeadlineExceeded, Overloaded

Item = TypeVar("Item")

QUEUE_FULL = "Exceeds maximum queue size"
EXPIRED = "Request timeout expired"
"""How both refusals begin: Triton's own words, by which clients tell them from other errors with code UNAVAILABLE."""


@dataclass(frozen=True, slots=True)
class EntryQueuePolicy:
    """Triton's ModelQueuePolicy.

    Attributes:
        max_queue_size: most waiting requests; 0 = no limit.
        default_timeout_ns: longest wait; 0 = no limit.
        reject: what happens after it: refused (REJECT), or served after all others (DELAY).
        allow_timeout_override: whether a request's own `timeout` counts.
    """

    max_queue_size: int = 0
    default_timeout_ns: int = 0
    reject: bool = True
    allow_timeout_override: bool = False


@dataclass(slots=True, eq=False)
class Waiting(Generic[Item]):
    """One waiting request. `give_up_ns`: when it is refused, or None."""

    item: Item
    arrived_ns: int
    timeout_ns: int | None
    give_up_ns: int | None


class EntryQueue(Generic[Item]):
    """FIFO of waiting requests under an `EntryQueuePolicy`. Pure: time is passed in."""

    def __init__(self, policy: EntryQueuePolicy) -> None:
        self._policy = policy
        self._queue: deque[Waiting[Item]] = deque()
        self._delayed: deque[Waiting[Item]] = deque()

    def __len__(self) -> int:
        return len(self._queue) + len(self._delayed)

    def __iter__(self) -> Iterator[Waiting[Item]]:
        yield from self._queue
        yield from self._delayed

    def push(self, item: Item, *, now_ns: int, timeout_ns: int | None) -> Waiting[Item]:
        """A request arrives. `timeout_ns` is its own limit on waiting and running, or None.

        Raises:
            Overloaded: the queue is full.
        """
        policy = self._policy
        if policy.max_queue_size and len(self) >= policy.max_queue_size:
            raise Overloaded(
                f"{QUEUE_FULL}: {len(self)} requests wait already (max_queue_size "
                f"{policy.max_queue_size}); try again later"
            )
        limits = [limit for limit in (policy.default_timeout_ns, timeout_ns) if limit]
        waiting = Waiting(item, now_ns, timeout_ns, now_ns + min(limits) if limits else None)
        self._queue.append(waiting)
        return waiting

    def head(self) -> Waiting[Item] | None:
        """The next to be served."""
        return self._queue[0] if self._queue else self._delayed[0] if self._delayed else None

    def pop(self) -> Waiting[Item]:
        """Takes the head."""
        return (self._queue or self._delayed).popleft()

    def remove(self, waiting: Waiting[Item]) -> None:
        """Takes out one that waits somewhere."""
        (self._queue if waiting in self._queue else self._delayed).remove(waiting)

    def expired(self, *, now_ns: int) -> list[tuple[Waiting[Item], DeadlineExceeded]]:
        """Takes out what has waited too long, with the error to tell; under DELAY it moves behind the others."""
        refused = []
        for waiting in [w for w in self if w.give_up_ns is not None and now_ns >= w.give_up_ns]:
            self.remove(waiting)
            waited_ns = now_ns - waiting.arrived_ns
            own = waiting.timeout_ns is not None and waited_ns >= waiting.timeout_ns
            if own or self._policy.reject:
                limit_us = (waiting.give_up_ns or 0) - waiting.arrived_ns
                refused.append((waiting, _expired(waited_ns, limit_us // 1000)))
            else:
                waiting.give_up_ns = None if waiting.timeout_ns is None else waiting.arrived_ns + waiting.timeout_ns
                self._delayed.append(waiting)
        return refused


def _expired(waited_ns: int, limit_us: int) -> DeadlineExceeded:
    return DeadlineExceeded(f"{EXPIRED}: waited {waited_ns * 1e-9:.2f} s in the queue (limit {limit_us} microseconds)")
