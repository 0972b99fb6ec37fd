"""Throughput and latency of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from perf.load.requests import Response, Run

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Latency:
    """Of whole responses that ended in the window, in ms; NaN if there was none."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """One system in one cell.

    Attributes:
        tokens_per_second: of all responses together, in the window.
        responses: whole responses that ended in the window; latencies are theirs.
        ttft: from sending to the first token.
        itl: between one token and the next of the same response; 0 for tokens that came together.
        e2e: from sending to the last token.
    """

    tokens_per_second: float
    responses: int
    ttft: Latency
    itl: Latency
    e2e: Latency

    def flat(self) -> dict[str, float]:
        """Numbers by column name of the CSV."""
        numbers: dict[str, float] = {"tokens_per_second": self.tokens_per_second, "responses": self.responses}
        for name in ("ttft", "itl", "e2e"):
            numbers |= {f"{name}_{part}_ms": value for part, value in asdict(getattr(self, name)).items()}
        return numbers


def summarise(run: Run) -> Summary:
    """The run in numbers."""
    tokens = sum(
        count
        for response in run.responses
        for at_s, count in zip(response.times, response.counts, strict=True)
        if run.start_s <= at_s < run.end_s
    )
    ended = [r for r in run.responses if r.ended and r.request.whole and run.start_s <= r.times[-1] < run.end_s]
    return Summary(
        tokens_per_second=tokens / (run.end_s - run.start_s),
        responses=len(ended),
        ttft=latency([r.times[0] - r.sent_s for r in ended]),
        itl=latency(np.concatenate([_gaps(r) for r in ended]) if ended else []),
        e2e=latency([r.times[-1] - r.sent_s for r in ended]),
    )


def latency(seconds: Sequence[float] | npt.NDArray[np.float64]) -> Latency:
    """Mean and percentiles of times, in ms; percentiles interpolate linearly."""
    if len(seconds) == 0:
        return Latency(*[float("nan")] * 4)
    ms = 1e3 * np.asarray(seconds)
    return Latency(float(ms.mean()), *(float(value) for value in np.percentile(ms, PERCENTILES)))


def _gaps(response: Response) -> npt.NDArray[np.float64]:
    """[T-1] seconds between neighbouring tokens."""
    return np.diff(np.repeat(response.times, response.counts))
