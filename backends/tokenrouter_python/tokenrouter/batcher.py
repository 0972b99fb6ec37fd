"""Delayed batching: when does a model that is idle start its next step, and with which requests?

The rule (arXiv 2610.12242, section 3.1, with two additions of ours): an idle model starts a step over all ready
requests as soon as

* ``threshold``: the number of ready requests reaches B(n), where n is the number of requests in flight, or
* ``all_ready``: every request in flight is ready here, so that nothing more can arrive, or
* ``deadline``: the oldest ready request has waited `max_queue_delay`.

*Ready* are arrivals and residents whose last step is over. Where the engine owns its loop, residents take part in
every step and are counted by the caller. Pure: no clock, no lock, no I/O.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Generic, TypeVar

import msgspec

from tokenrouter.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)


class Reason(str, Enum):
    """Why a step started."""

    THRESHOLD = "threshold"
    ALL_READY = "all_ready"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Batching:
    """How one model batches, as it stands in its config.pbtxt (`batching` in the deployment's YAML).

    Attributes:
        threshold: B, from `dynamic_batching.preferred_batch_size`; 1 starts at once (eager).
        max_queue_delay_ns: longest that an idle model lets a ready request wait, from `max_queue_delay_microseconds`. A
            request that comes during a step is ready when the step ends: the model could not have started before.
        by_in_flight: table n -> B from the parameter `batch_thresholds`. The entry of the largest n that does not
            exceed the number in flight counts; below the smallest n in the table B is 1.
    """

    threshold: int = 1
    max_queue_delay_ns: int = 0
    by_in_flight: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise ConfigError(f"preferred_batch_size is {self.threshold}; a threshold is at least 1")
        if self.max_queue_delay_ns < 0:
            raise ConfigError("max_queue_delay_microseconds is negative; use 0 or more")
        for n, threshold in self.by_in_flight.items():
            if n < 1 or not 1 <= threshold <= n:
                raise ConfigError(
                    f"batch_thresholds has {n}: {threshold}; with {n} requests in flight a threshold lies in 1..{n}"
                )

    def threshold_at(self, in_flight: int) -> int:
        """B(n)."""
        if not self.by_in_flight:
            return self.threshold
        known = [n for n in self.by_in_flight if n <= in_flight]
        return self.by_in_flight[max(known)] if known else 1


class Batch(msgspec.Struct, Generic[Key], frozen=True):
    """Start a step now with these requests, oldest first."""

    keys: tuple[Key, ...]
    reason: Reason


class WaitUntil(msgspec.Struct, frozen=True):
    """Nothing to start before this time (ns), unless a message arrives."""

    at_ns: int


class DelayedBatcher(Generic[Key]):
    """Ready requests of one model in the order in which they became ready.

    The caller takes a batch only while its model is idle. Requests that do not fit under `max_batch` keep their place.
    """

    def __init__(self, batching: Batching, *, max_batch: int) -> None:
        self._batching = batching
        self._max_batch = max_batch
        self._ready: dict[Key, int] = {}
        self._cached: tuple[int, int] = (-1, 1)

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, key: object) -> bool:
        return key in self._ready

    def __iter__(self) -> Iterator[Key]:
        return iter(self._ready)

    def add(self, key: Key, *, now_ns: int) -> None:
        """A request became ready. Adding one that is ready already is a bug of the caller."""
        if key in self._ready:
            raise ValueError(f"{key!r} is ready already")
        self._ready[key] = now_ns

    def discard(self, key: Key) -> None:
        """A request is gone (cancelled, closed); unknown keys are ignored."""
        self._ready.pop(key, None)

    def ready_since(self, key: Key) -> int:
        """When the request became ready (ns)."""
        return self._ready[key]

    def threshold(self, in_flight: int) -> int:
        """B(n), never more than a batch can hold."""
        if self._cached[0] != in_flight:
            self._cached = (in_flight, min(self._batching.threshold_at(in_flight), self._max_batch))
        return self._cached[1]

    @property
    def in_force(self) -> tuple[int, int]:
        """Requests in flight, and B of it, as they were looked up last."""
        return self._cached

    def poll(self, *, in_flight: int, now_ns: int, residents: int = 0) -> Batch[Key] | WaitUntil | None:
        """What to do now: a batch to start, a time to look again, or None if nothing is ready.

        Changes nothing: call `take` with the batch that is started.

        Args:
            in_flight: requests in flight, n of the rule.
            now_ns: CLOCK_MONOTONIC in ns.
            residents: requests that take part in the model's next step without being asked for here.
        """
        if not self._ready or residents >= self._max_batch:
            return None
        ready = len(self._ready) + residents
        if ready >= self.threshold(in_flight):
            return self._batch(Reason.THRESHOLD, residents)
        if ready >= in_flight:
            return self._batch(Reason.ALL_READY, residents)
        deadline_ns = next(iter(self._ready.values())) + self._batching.max_queue_delay_ns
        if now_ns >= deadline_ns:
            return self._batch(Reason.DEADLINE, residents)
        return WaitUntil(deadline_ns)

    def take(self, batch: Batch[Key]) -> None:
        """The requests of this batch are running now."""
        for key in batch.keys:
            del self._ready[key]

    def _batch(self, reason: Reason, residents: int) -> Batch[Key]:
        return Batch(tuple(islice(self._ready, self._max_batch - residents)), reason)
