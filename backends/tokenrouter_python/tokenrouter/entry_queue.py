"""The queue in front of the entry model: who waits, who is refused, who has waited too long.

The fields have the names and the meaning of Triton's ModelQueuePolicy, and of the priorities in its
ModelDynamicBatching, but they are parameters of the model and
enforced here, and the model has no `dynamic_batching`: in Triton 2.51 the dynamic batcher holds requests of a burst
back for 0.5 s and more although a decoupled model is idle, looks at time-outs only every 0.5 s, and never again once a
request was handed over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Generic, TypeVar

from tokenrouter.errors import DeadlineExceeded, InvalidRequest, Overloaded

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


@dataclass(frozen=True, slots=True)
class Priorities:
    """Triton's priorities: all requests of level 1 are served before those of level 2, and so on.

    Attributes:
        levels: how many there are (`priority_levels`); 0 = requests have no priority.
        default: level of requests that name none (`default_priority_level`), in 1..levels.
        policies: by level (`priority_queue_policy`); for others the queue's own policy holds. Every level is a queue
            of its own, so that `max_queue_size` counts per level.
    """

    levels: int = 0
    default: int = 0
    policies: Mapping[int, EntryQueuePolicy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for levels that do not exist."""
        if self.levels < 0 or bool(self.levels) != bool(self.default) or not 0 <= self.default <= self.levels:
            raise ValueError(
                f"default_priority_level is {self.default}; it lies in 1..priority_levels ({self.levels}), "
                "and is left out without levels"
            )
        for level in self.policies:
            if not 1 <= level <= self.levels:
                raise ValueError(f"priority_queue_policy has level {level}; priority_levels is {self.levels}")

    def level(self, priority: int | None) -> int:
        """The level of a request; 0 and None name none.

        Raises:
            InvalidRequest: there is no such level. (Triton's own batcher would take the default one.)
        """
        if not priority:
            return self.default
        if not self.levels:
            raise InvalidRequest(
                f"priority is {priority}, but this deployment has no priority levels: leave it out, or set "
                "priority_levels of its entry queue"
            )
        if not 1 <= priority <= self.levels:
            raise InvalidRequest(f"priority is {priority}; it lies in 1..{self.levels} (1 is served first)")
        return priority


@dataclass(slots=True)
class _Waiting:
    """Times of one that waits. `give_up_ns`: when the queue looks at it, or None."""

    arrived_ns: int
    deadline_ns: int | None
    give_up_ns: int | None


class _Level(Generic[Item]):
    """Who waits at one level, in the order of arrival, and behind them those that were delayed."""

    def __init__(self, policy: EntryQueuePolicy) -> None:
        self.policy = policy
        self.waiting: OrderedDict[Item, _Waiting] = OrderedDict()
        self.delayed: OrderedDict[Item, _Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)

    def __iter__(self) -> Iterator[Item]:
        return chain(self.waiting, self.delayed)

    def insert(self, item: Item, waiting: _Waiting) -> None:
        """Puts it where its arrival belongs: what takes long to read comes to the queue late."""
        later = takewhile(lambda pair: pair[1].arrived_ns > waiting.arrived_ns, reversed(self.waiting.items()))
        overtaken = [other for other, _ in later]
        self.waiting[item] = waiting
        for other in reversed(overtaken):
            self.waiting.move_to_end(other)

    def discard(self, item: Item) -> None:
        self.waiting.pop(item, None)
        self.delayed.pop(item, None)

    def late(self, now_ns: int) -> list[tuple[Item, _Waiting]]:
        """Who has waited too long."""
        return [
            (item, waiting)
            for queue in (self.waiting, self.delayed)
            for item, waiting in queue.items()
            if waiting.give_up_ns is not None and now_ns >= waiting.give_up_ns
        ]


class EntryQueue(Generic[Item]):
    """Waiting requests, by priority and then by arrival, under `EntryQueuePolicy`s. Pure: time is passed in.

    Items are told apart by hash; each is in the queue once.
    """

    def __init__(self, policy: EntryQueuePolicy, priorities: Priorities = Priorities()) -> None:
        self._priorities = priorities
        first = min(1, priorities.levels)
        self._levels: dict[int, _Level[Item]] = {
            level: _Level(priorities.policies.get(level, policy)) for level in range(first, priorities.levels + 1)
        }

    def __len__(self) -> int:
        return sum([len(level) for level in self._levels.values()])

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._levels.values())

    def push(self, item: Item, *, now_ns: int, deadline_ns: int | None, priority: int | None = None) -> int | None:
        """A request that arrived at `now_ns`. `deadline_ns` is its own end, waiting or running.

        Returns when `expired` has to be asked about it, or None.

        Raises:
            Overloaded: the queue is full.
            InvalidRequest: there is no such priority.
        """
        level = self._levels[self._priorities.level(priority)]
        policy = level.policy
        if policy.max_queue_size and len(level) >= policy.max_queue_size:
            raise Overloaded(
                f"{QUEUE_FULL}: {len(level)} requests wait already (max_queue_size "
                f"{policy.max_queue_size}); try again later"
            )
        give_up_ns = deadline_ns
        if policy.default_timeout_ns:
            longest_ns = now_ns + policy.default_timeout_ns
            give_up_ns = longest_ns if deadline_ns is None else min(longest_ns, deadline_ns)
        level.insert(item, _Waiting(now_ns, deadline_ns, give_up_ns))
        return give_up_ns

    def head(self) -> Item | None:
        """The next to be served."""
        return next(iter(self), None)

    def discard(self, item: Item) -> None:
        """Takes out one that waits; nothing happens if it does not."""
        for level in self._levels.values():
            level.discard(item)

    def expired(self, *, now_ns: int) -> list[tuple[Item, DeadlineExceeded]]:
        """Takes out what has waited too long, with the error to tell; under DELAY it moves to the end of its level."""
        refused = []
        for level in self._levels.values():
            for item, waiting in level.late(now_ns):
                level.discard(item)
                own = waiting.deadline_ns is not None and now_ns >= waiting.deadline_ns
                if own or level.policy.reject:
                    refused.append((item, _expired(waiting, now_ns)))
                else:
                    waiting.give_up_ns = waiting.deadline_ns
                    level.delayed[item] = waiting
        return refused


def _expired(waiting: _Waiting, now_ns: int) -> DeadlineExceeded:
    waited_s = (now_ns - waiting.arrived_ns) * 1e-9
    limit_us = ((waiting.give_up_ns or now_ns) - waiting.arrived_ns) // 1000
    return DeadlineExceeded(f"{EXPIRED}: waited {waited_s:.2f} s in the queue (limit {limit_us} microseconds)")
