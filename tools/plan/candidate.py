"""A deployment that may or may not hold the objectives, and what one costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tools.build_repository.thresholds import max_queue_delay_microseconds
from tools.dtmc.profile import Profile

UNLIMITED = 1 << 20
"""In flight: more than any deployment here has KV or time for."""
SHARES = (0.0, 0.15, 0.3)
"""Thresholds that are tried: so much of the requests in flight. 0 is eager."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A deployment.

    Attributes:
        replicas: of each model, in the profile's order.
        share: threshold of the model whose steps cost most, as a share of the requests in flight at a replica; 0 =
            every model starts at once. All others start at once: so no thresholds can deadlock.
        max_inflight: most requests that run at once.
    """

    replicas: tuple[int, ...]
    share: float = 0.0
    max_inflight: int = UNLIMITED

    def with_replicas(self, place: int, count: int) -> Candidate:
        """The same with another number of one model."""
        return replace(self, replicas=(*self.replicas[:place], count, *self.replicas[place + 1 :]))

    def thresholds(self, profile: Profile) -> dict[str, dict[int, int]]:
        """Table from requests in flight at a replica to B, by model; empty if all are eager."""
        if not self.share:
            return {}
        model = costliest(profile)
        most = profile.models[model].max_batch or _LARGEST_TABLE
        sizes = [n for n in _TABLE if n <= most]
        return {model: {n: max(1, math.ceil(self.share * n)) for n in sizes}}

    def max_queue_delay_ms(self, profile: Profile, in_flight: int) -> float | None:
        """Longest wait for a threshold; None if all are eager."""
        return max_queue_delay_microseconds(profile, max(1, in_flight)) / 1000.0 if self.share else None


_TABLE = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LARGEST_TABLE = _TABLE[-1]


def costliest(profile: Profile) -> str:
    """The model with the longest step of one request."""
    return max(profile.models, key=lambda name: profile.models[name].step_time_ms(1))


def cost(candidate: Candidate, profile: Profile, prices: Mapping[str, float]) -> float:
    """Of all replicas, per hour."""
    return sum(count * prices[name] for name, count in zip(profile.names, candidate.replicas, strict=True))
