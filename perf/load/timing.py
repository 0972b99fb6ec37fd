"""What a user of a streamed response feels, and percentiles of many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 99)


@dataclass
class Timing:
    """One streamed response; moments are seconds on `time.perf_counter`.

    Attributes:
        started: when it was sent, or when it was due.
        times: when messages with tokens came.
        counts: tokens of each of them.
        finish_reason: of the last message, "cancelled" if the client ended it, else "".
        error: what the server or the channel answered instead, or "".
    """

    started: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""

    def add(self, tokens: int, at: float | None = None) -> None:
        """Counts tokens that came at a moment, by default now."""
        if tokens:
            self.times.append(time.perf_counter() if at is None else at)
            self.counts.append(tokens)

    def end(self) -> Timing:
        """Nothing more will come: it is an error if the last message is missing."""
        if not self.error and not self.finish_reason:
            self.error = f"the stream ended after {self.tokens} tokens without a finish_reason"
        return self

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def time_to_first_token_s(self) -> float:
        """From the start to the first tokens; NaN if none came."""
        return self.times[0] - self.started if self.times else math.nan

    @property
    def inter_token_s(self) -> float:
        """Mean time per token after those of the first message, as genai-perf counts it; NaN if there are none."""
        later = sum(self.counts[1:])
        return (self.times[-1] - self.times[0]) / later if later else math.nan

    @property
    def gaps_s(self) -> npt.NDArray[np.float64]:
        """[tokens - 1] seconds from one token to the next; 0 for tokens that came together."""
        return np.diff(np.repeat(np.array(self.times, float), np.array(self.counts, int)))

    @property
    def longest_gap_s(self) -> float:
        return float(self.gaps_s.max(initial=0.0))

    @property
    def latency_s(self) -> float:
        """From the start to the last tokens; NaN if none came."""
        return self.times[-1] - self.started if self.times else math.nan


def percentiles_ms(seconds: Iterable[float], at: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """`mean` and `p50`, `p90`, ... in milliseconds of all values that are not NaN; all NaN without any."""
    values = 1000.0 * np.array([value for value in seconds if not math.isnan(value)])
    if not values.size:
        return {"mean": math.nan, **{f"p{q}": math.nan for q in at}}
    found = zip(at, np.percentile(values, at), strict=True)
    return {"mean": float(values.mean()), **{f"p{q}": float(value) for q, value in found}}


def summary(timings: Sequence[Timing]) -> dict[str, float]:
    """Rates and percentiles of all responses, as one flat row; those with an error count as errors alone.

    Rates are from the first start to the last token.
    """
    good = [timing for timing in timings if not timing.error]
    last = max((timing.times[-1] for timing in good if timing.times), default=math.nan)
    seconds = last - min((timing.started for timing in good), default=math.nan)
    row: dict[str, float] = {
        "seconds": round(seconds, 2),
        "requests": len(good),
        "errors": len(timings) - len(good),
        "requests_per_second": round(len(good) / seconds, 3),
        "tokens_per_second": round(sum(timing.tokens for timing in good) / seconds, 2),
    }
    for measure in ("time_to_first_token", "inter_token", "longest_gap", "latency"):
        found = percentiles_ms(getattr(timing, f"{measure}_s") for timing in good)
        row |= {f"{measure}_ms.{key}": round(value, 2) for key, value in found.items()}
    return row
