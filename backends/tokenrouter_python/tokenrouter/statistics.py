"""Counters of a subserver and of an orchestrator: plain numbers; the rim publishes them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenrouter.batcher import Reason
from tokenrouter.messages import Outcome, ReportRow

BATCH_BUCKETS: tuple[float, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
SECONDS_BUCKETS: tuple[float, ...] = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
MOST_EXACT_BATCH = 64
MOST_FITTED_EXTENDED = 64
END = "(end)"
"""Target of a route that ends the response; no model can have this name."""

HANDOFF_BUCKETS: tuple[float, ...] = (
    0.00005, 0.0001, 0.00015, 0.0002, 0.00025, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.005, 0.01, 0.05,
)  # fmt: skip
_ENDED = (Outcome.STOP, Outcome.LENGTH)
_ROUTED = (Outcome.STAY, Outcome.LEAVE, *_ENDED)


@dataclass
class Histogram:
    """Counts per bucket; `bounds[i]` is the inclusive upper limit of bucket i, the last bucket is open."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Counts a value; one below 0 as 0, because clocks of two threads are read in no order."""
        if value < 0.0:
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


def seconds() -> Histogram:
    return Histogram(SECONDS_BUCKETS)


@dataclass
class StepSums:
    """Steps of one batch size: how many, their seconds, their extended tokens."""

    steps: int = 0
    seconds: float = 0.0
    extended: int = 0


@dataclass
class StepTimes:
    """The sums from which a profiler fits step time = base(batch) + slope * extended tokens.

    Steps with more than `MOST_FITTED_EXTENDED` extended tokens are left out: those are prefills, whose time says little
    about decoding. So are batches over `MOST_EXACT_BATCH`, to bound the number of series.
    """

    by_batch: dict[int, StepSums] = field(default_factory=dict)
    seconds_squared: float = 0.0
    extended_squared: int = 0
    seconds_extended: float = 0.0

    def observe(self, batch: int, extended: int, seconds: float) -> None:
        if batch > MOST_EXACT_BATCH or extended > MOST_FITTED_EXTENDED:
            return
        sums = self.by_batch.get(batch)
        if sums is None:
            sums = self.by_batch[batch] = StepSums()
        sums.steps += 1
        sums.seconds += seconds
        self.seconds_squared += seconds * seconds
        if extended:
            sums.extended += extended
            self.extended_squared += extended * extended
            self.seconds_extended += extended * seconds


@dataclass
class CacheStatistics:
    """What became of the KV cache of an engine that owns its loop.

    Attributes:
        cached_tokens: of submissions, found in the cache.
        lost_prefixes: visits that found at least a block less than was left there.
        recomputed_tokens: that they had to run again.
        surplus_tokens: of visits that were over, dropped.
    """

    cached_tokens: int = 0
    lost_prefixes: int = 0
    recomputed_tokens: int = 0
    surplus_tokens: int = 0


@dataclass
class SubserverStatistics:
    """What one subserver did since it started; all counters only grow.

    Attributes:
        handoff: from leaving another model to ready here, of those that left while this model was idle: others wait
            for the end of a step first.
        routes: (target, whether the token was committed) -> requests that went there after a step. The target is "" for
            those that stay and `END` for those that end.
        checks: rows of steps in which guesses were checked; `checked_positions` is how many tokens they decided.
        cache: only where the engine owns its loop.
    """

    steps: int = 0
    steps_by_reason: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in Reason})
    batch_size: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))
    ready_wait: Histogram = field(default_factory=seconds)
    step_time: Histogram = field(default_factory=seconds)
    step_times: StepTimes = field(default_factory=StepTimes)
    routes: dict[tuple[str, bool], int] = field(default_factory=dict)
    handoff: Histogram = field(default_factory=lambda: Histogram(HANDOFF_BUCKETS))
    new_tokens: int = 0
    extended_tokens: int = 0
    committed_tokens: int = 0
    visits: int = 0
    handoffs_in: int = 0
    handoffs_out: int = 0
    failures: int = 0
    checks: int = 0
    checked_positions: int = 0
    cache: CacheStatistics | None = None

    def arrived(self, *, now_ns: int, left_ns: int, idle_since_ns: int) -> None:
        """A visit begins; the request left another model at `left_ns` (0: it comes from none).

        A peer says so: what lies in the future is no time of a hand-off.
        """
        self.visits += 1
        if left_ns:
            self.handoffs_in += 1
            if idle_since_ns <= left_ns <= now_ns:
                self.handoff.observe((now_ns - left_ns) * 1e-9)

    def step_started(self, reason: Reason, waits_ns: Sequence[int]) -> None:
        """A step begins; `waits_ns` is how long each of its requests was ready."""
        self.steps += 1
        self.steps_by_reason[reason.value] += 1
        for wait_ns in waits_ns:
            self.ready_wait.observe(wait_ns * 1e-9)

    def step_finished(self, batch: int, new_tokens: int, extended_tokens: int, took_ns: int) -> None:
        """A step is over. `extended_tokens` are new tokens beyond one per request."""
        self.batch_size.observe(batch)
        self.step_took(batch, extended_tokens, took_ns * 1e-9)
        self.new_tokens += new_tokens
        self.extended_tokens += extended_tokens

    def step_took(self, batch: int, extended_tokens: int, seconds: float) -> None:
        """How long a step took, one of the engine's own included."""
        self.step_time.observe(seconds)
        self.step_times.observe(batch, extended_tokens, seconds)

    def settled(self, row: ReportRow) -> None:
        """What became of one request of a step."""
        self.committed_tokens += len(row.tokens)
        if row.outcome in _ROUTED:
            self._routed(END if row.outcome in _ENDED else row.target, bool(row.tokens))
        self.handoffs_out += row.outcome == Outcome.LEAVE
        self.failures += row.outcome == Outcome.FAILED

    def entered(self, visits: int) -> None:
        """Visits began because the guesses of another model showed that it left, without a message about each."""
        self.visits += visits
        self.handoffs_in += visits

    def decided(self, row: ReportRow, returned: Sequence[bool], leader: str) -> None:
        """What became of a request whose guesses were checked, counted as plain routing would have gone."""
        self.committed_tokens += len(row.tokens)
        for back in returned:
            self._routed(leader if back else "", True)
        self.handoffs_out += sum(returned)
        self.entered(sum(returned) - (row.outcome != Outcome.STAY and returned[-1:] == [True]))
        self.failures += row.outcome == Outcome.FAILED

    def confirmed(self, wrote: int, left: int, returned: int, other: str) -> None:
        """Guesses of this model were settled: tokens it wrote, how often it left for the other one, and came back."""
        self.committed_tokens += wrote
        self._routed("", True, wrote)
        self._routed(other, False, left)
        self.handoffs_out += left
        self.entered(returned)

    def _routed(self, target: str, committed: bool, count: int = 1) -> None:
        if count:
            key = (target, committed)
            self.routes[key] = self.routes.get(key, 0) + count


@dataclass
class OrchestratorStatistics:
    """What one orchestrator did since it started; all counters only grow.

    Attributes:
        tokens: committed, by (policy, writer).
    """

    accepted: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    handoffs: int = 0
    stale_messages: int = 0
    recovered: int = 0
    moved: int = 0
    queue_wait: Histogram = field(default_factory=seconds)
    time_to_first_token: Histogram = field(default_factory=seconds)
    inter_token: Histogram = field(default_factory=seconds)
