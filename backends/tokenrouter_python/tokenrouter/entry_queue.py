"""The queue in front of the entry model: who waits, who is refused, who has waited too long.

The fields have the names and the meaning of Triton's ModelQueuePolicy, but they are parameters of the model and
enforced here, and the model has no `dynamic_batching`: in Triton 2.51 the dynamic batcher holds requests of a burst
back for 0.5 s and more although a decoupled model is idle, looks at time-outs only every 0.5 s, and never again once a
request was handed over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from tokenrouter.errors import DeadlineExceeded, Overloaded

Item = TypeVar("Item", bound=Hashable)

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
    allow_timeout_override: bool = True


@dataclass(slots=True)
class _Waiting:
    """Times of one that waits. `give_up_ns`: when the queue looks at it, or None."""

    arrived_ns: int
    deadline_ns: int | None
    give_up_ns: int | None


class EntryQueue(Generic[Item]):
    """FIFO of waiting requests under an `EntryQueuePolicy`. Pure: time is passed in.

    Items are told apart by hash; each is in the queue once.
    """

    def __init__(self, policy: EntryQueuePolicy) -> None:
        self._policy = policy
        self._queue: OrderedDict[Item, _Waiting] = OrderedDict()
        self._delayed: OrderedDict[Item, _Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue) + len(self._delayed)

    def __iter__(self) -> Iterator[Item]:
        return chain(self._queue, self._delayed)

    def push(self, item: Item, *, now_ns: int, deadline_ns: int | None) -> int | None:
        """A request arrives. `deadline_ns` is its own end, waiting or running.

        Returns when `expired` has to be asked about it, or None.

        Raises:
            Overloaded: the queue is full.
        """
        policy = self._policy
        if policy.max_queue_size and len(self) >= policy.max_queue_size:
            raise Overloaded(
                f"{QUEUE_FULL}: {len(self)} requests wait already (max_queue_size "
                f"{policy.max_queue_size}); try again later"
            )
        give_up_ns = deadline_ns
        if policy.default_timeout_ns:
            longest_ns = now_ns + policy.default_timeout_ns
            give_up_ns = longest_ns if deadline_ns is None else min(longest_ns, deadline_ns)
        self._queue[item] = _Waiting(now_ns, deadline_ns, give_up_ns)
        return give_up_ns

    def head(self) -> Item | None:
        """The next to be served."""
        return next(iter(self), None)

    def discard(self, item: Item) -> None:
        """Takes out one that waits; nothing happens if it does not."""
        self._queue.pop(item, None)
        self._delayed.pop(item, None)

    def expired(self, *, now_ns: int) -> list[tuple[Item, DeadlineExceeded]]:
        """Takes out what has waited too long, with the error to tell; under DELAY it moves behind the others."""
        late = [
            (item, waiting)
            for queue in (self._queue, self._delayed)
            for item, waiting in queue.items()
            if waiting.give_up_ns is not None and now_ns >= waiting.give_up_ns
        ]
        refused = []
        for item, waiting in late:
            self.discard(item)
            own = waiting.deadline_ns is not None and now_ns >= waiting.deadline_ns
            if own or self._policy.reject:
                refused.append((item, _expired(waiting, now_ns)))
            else:
                waiting.give_up_ns = waiting.deadline_ns
                self._delayed[item] = waiting
        return refused


def _expired(waiting: _Waiting, now_ns: int) -> DeadlineExceeded:
    waited_s = (now_ns - waiting.arrived_ns) * 1e-9
    limit_us = ((waiting.give_up_ns or now_ns) - waiting.arrived_ns) // 1000
    return DeadlineExceeded(f"{EXPIRED}: waited {waited_s:.2f} s in the queue (limit {limit_us} microseconds)")
