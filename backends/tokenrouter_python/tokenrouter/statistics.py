"""Counters of a subserver and of an orchestrator: plain numbers; the rim publishes them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenrouter.batcher import Reason
from tokenrouter.messages import Outcome, ReportRow

BATCH_BUCKETS: tuple[float, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
SECONDS_BUCKETS: tuple[float, ...] = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
HANDOFF_BUCKETS: tuple[float, ...] = (
    0.00005, 0.0001, 0.00015, 0.0002, 0.00025, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.005, 0.01, 0.05,
)  # fmt: skip


@dataclass
class Histogram:
    """Counts per bucket; `bounds[i]` is the inclusive upper limit of bucket i, the last bucket is open."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        """Starts empty."""
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Adds one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


def seconds() -> Histogram:
    """A histogram of durations in seconds."""
    return Histogram(SECONDS_BUCKETS)


@dataclass
class SubserverStatistics:
    """What one subserver did since it started; all counters only grow."""

    steps: int = 0
    steps_by_reason: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in Reason})
    batch_size: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))
    ready_wait: Histogram = field(default_factory=seconds)
    step_time: Histogram = field(default_factory=seconds)
    handoff: Histogram = field(default_factory=lambda: Histogram(HANDOFF_BUCKETS))
    new_tokens: int = 0
    extended_tokens: int = 0
    committed_tokens: int = 0
    visits: int = 0
    handoffs_in: int = 0
    handoffs_out: int = 0
    failures: int = 0

    def arrived(self, handoff_ns: int | None) -> None:
        """A visit begins; `handoff_ns` is the time since the request left the other model."""
        self.visits += 1
        if handoff_ns is not None:
            self.handoffs_in += 1
            self.handoff.observe(handoff_ns * 1e-9)

    def step_started(self, reason: Reason, waits_ns: Sequence[int]) -> None:
        """A step begins; `waits_ns` is how long each of its requests was ready."""
        self.steps += 1
        self.steps_by_reason[reason.value] += 1
        for wait_ns in waits_ns:
            self.ready_wait.observe(wait_ns * 1e-9)

    def step_finished(self, batch: int, new_tokens: int, extended_tokens: int, took_ns: int) -> None:
        """A step is over. `extended_tokens` are new tokens beyond one per request."""
        self.batch_size.observe(batch)
        self.step_time.observe(took_ns * 1e-9)
        self.new_tokens += new_tokens
        self.extended_tokens += extended_tokens

    def settled(self, row: ReportRow | None) -> None:
        """What became of one request of a step."""
        if row is None:
            return
        self.committed_tokens += len(row.tokens)
        self.handoffs_out += row.outcome == Outcome.LEAVE
        self.failures += row.outcome == Outcome.FAILED


@dataclass
class OrchestratorStatistics:
    """What one orchestrator did since it started; all counters only grow."""

    accepted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    tokens_by_model: dict[str, int] = field(default_factory=dict)
    handoffs: int = 0
    stale_messages: int = 0
    recovered: int = 0
    queue_wait: Histogram = field(default_factory=seconds)
    time_to_first_token: Histogram = field(default_factory=seconds)
    inter_token: Histogram = field(default_factory=seconds)
