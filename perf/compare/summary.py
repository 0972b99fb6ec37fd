"""Throughput and latency of one run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from perf.load.requests import Run
from perf.load.timing import percentiles_ms

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
    ended = [r for r in run.responses if r.ended and r.request.whole and run.start_s <= r.times[-1] < run.end_s]
    return Summary(
        tokens_per_second=run.tokens_per_second,
        responses=len(ended),
        ttft=latency(r.time_to_first_token_s for r in ended),
        itl=latency(gap for r in ended for gap in r.gaps_s),
        e2e=latency(r.latency_s for r in ended),
    )


def latency(seconds: Iterable[float]) -> Latency:
    """Mean and percentiles of times, in ms; percentiles interpolate linearly."""
    return Latency(**percentiles_ms(seconds, PERCENTILES))
