"""How malformed requests were answered: statuses and times."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Answers:
    """Of one protocol.

    Attributes:
        statuses: (kind of request, status) -> number.
        seconds: of every request that was answered, from sending it to the end of its answer.
        slowest: (seconds, kind) of the one that took longest.
        unanswered: (kind, what happened instead).
    """

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    unanswered: list[tuple[str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, status: str, seconds: float, *, answered: bool = True) -> None:
        """One request is over; callable from any thread."""
        with self._lock:
            self.statuses[kind, status] += 1
            if answered:
                self.seconds.append(seconds)
                self.slowest = max(self.slowest, (seconds, kind))
            else:
                self.unanswered.append((kind, status))

    @property
    def requests(self) -> int:
        return self.statuses.total()

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds)) if self.seconds else 0.0

    def facts(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        by_kind: dict[str, dict[str, int]] = {}
        for (kind, status), number in sorted(self.statuses.items()):
            by_kind.setdefault(kind, {})[status] = number
        return {
            "requests": self.requests,
            "answered": len(self.seconds),
            "unanswered": self.unanswered,
            "median_seconds": round(self.median_s, 5),
            "p99_seconds": round(float(np.percentile(self.seconds or [0.0], 99)), 4),
            "slowest_seconds": round(self.slowest[0], 3),
            "slowest_kind": self.slowest[1],
            "statuses": by_kind,
        }
