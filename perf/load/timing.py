"""What a user of a streamed response feels, and percentiles of many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass
class Timing:
    """One streamed response; moments are seconds on `time.perf_counter`.

    Attributes:
        started: when it was sent, or when it was due.
        first: when its first tokens came, or NaN.
        last: when its newest tokens came, or NaN.
        tokens: how many came.
        first_tokens: how many came in the first message.
        longest_gap_s: between two messages with tokens.
        finish_reason: of the last message, "cancelled" if the client ended it, else "".
        error: what the server or the channel answered instead, or "".
    """

    started: float = field(default_factory=time.perf_counter)
    first: float = math.nan
    last: float = math.nan
    tokens: int = 0
    first_tokens: int = 0
    longest_gap_s: float = 0.0
    finish_reason: str = ""
    error: str = ""

    def add(self, tokens: int, at: float | None = None) -> None:
        """Counts tokens that came at a moment, by default now."""
        if not tokens:
            return
        now = time.perf_counter() if at is None else at
        if self.tokens:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last)
        else:
            self.first, self.first_tokens = now, tokens
        self.last = now
        self.tokens += tokens

    @property
    def time_to_first_token_s(self) -> float:
        """From the start to the first tokens; NaN if none came."""
        return self.first - self.started

    @property
    def inter_token_s(self) -> float:
        """Mean time per token after those of the first message, as genai-perf counts it; NaN if there are none."""
        later = self.tokens - self.first_tokens
        return (self.last - self.first) / later if later else math.nan

    @property
    def latency_s(self) -> float:
        """From the start to the last tokens."""
        return self.last - self.started


@dataclass(frozen=True)
class Percentiles:
    """Mean and percentiles of times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Percentiles:
        """Of all values that are not NaN."""
        values = 1000.0 * np.array([value for value in seconds if not math.isnan(value)])
        if not values.size:
            return cls(math.nan, math.nan, math.nan, math.nan)
        return cls(float(values.mean()), *(float(value) for value in np.percentile(values, PERCENTILES)))


def summary(timings: Sequence[Timing], *, seconds: float | None = None) -> dict[str, float]:
    """Rates and percentiles of all responses, as one flat row.

    Args:
        timings: of responses; those with an error count as errors alone.
        seconds: length of the measurement; by default from the first start to the last token.
    """
    good = [timing for timing in timings if not timing.error]
    if seconds is None:
        seconds = max(t.last for t in good) - min(t.started for t in good) if good else math.nan
    row: dict[str, float] = {
        "seconds": round(seconds, 2),
        "requests": len(good),
        "errors": len(timings) - len(good),
        "requests_per_second": round(len(good) / seconds, 3),
        "tokens_per_second": round(sum(timing.tokens for timing in good) / seconds, 2),
    }
    for name, values in (
        ("time_to_first_token_ms", (t.time_to_first_token_s for t in good)),
        ("inter_token_ms", (t.inter_token_s for t in good)),
        ("longest_gap_ms", (t.longest_gap_s for t in good)),
        ("latency_ms", (t.latency_s for t in good)),
    ):
        for key, value in vars(Percentiles.of(values)).items():
            row[f"{name}.{key}"] = round(value, 2)
    return row
