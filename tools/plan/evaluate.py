"""What one deployment would do with a demand: the production scheduler in virtual time, the whole fleet or a slice.

A run begins with as many requests as one alone would find running, goes on until their number has settled, and then
counts. It ends early once a 99th percentile cannot be held any more.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokenrouter.errors import PromptTooLong
from tools.dtmc.profile import Profile
from tools.errors import CommandError
from tools.plan.bounds import alone_ms
from tools.plan.candidate import Candidate
from tools.plan.demand import Demand, Objectives, Source
from tools.simulate.deployment import build_deployment
from tools.simulate.engine import nanoseconds
from tools.simulate.loop import EventLoop
from tools.simulate.meter import Meter
from tools.simulate.run import collector_paused

LATE_SHARE = 0.01
"""What a 99th percentile leaves."""
TRIED, CONFIRMED = 8, 32
"""Replicas of the model with fewest in the slice of a fleet that is simulated."""
_SETTLED = 0.02
_CHUNK_ARRIVALS = 40
_MOST_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a deployment does; dicts are by model. Times in ms, NaN where nothing came.

    Attributes:
        misses: the objectives that it does not hold, in words.
        requests: whose first tokens were counted.
        utilisation: share of time that a replica is busy.
        mean_batch: requests per step.
        mean_in_flight, peak_in_flight: requests that run.
        complete: whether the run was not ended early.
    """

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    misses: tuple[str, ...]
    requests: int
    tokens_per_second: float
    utilisation: dict[str, float]
    mean_batch: dict[str, float]
    mean_in_flight: float
    peak_in_flight: int
    complete: bool

    @property
    def holds(self) -> bool:
        """Whether it holds all objectives."""
        return not self.misses


class Counts(Meter):
    """First tokens of the requests from `begin` on, and all times between tokens meanwhile."""

    def __init__(self, model_of: Sequence[int], objectives: Objectives) -> None:
        super().__init__(model_of)
        self._ttft_ns = round(objectives.ttft_p99_ms * 1e6)
        self._itl_ns = round(objectives.itl_p99_ms * 1e6)
        self._range = range(0)
        self.late_first = self.late_gaps = 0
        self.firsts = array("q")

    def begin(self, now_ns: int, first: int, count: int) -> None:
        """Counts the requests with these keys from now on."""
        self.reset(now_ns)
        self.late_first = self.late_gaps = 0
        self._range = range(first, first + count)

    @property
    def done(self) -> bool:
        """Whether all that are counted have their first token."""
        return len(self.firsts) >= len(self._range)

    def token(self, request: int, count: int, now_ns: int) -> None:
        """See `Meter.token`."""
        firsts, gaps = len(self.first_token_ns), len(self.inter_token_ns)
        super().token(request, count, now_ns)
        if len(self.inter_token_ns) > gaps:
            self.late_gaps += self.inter_token_ns[-1] > self._itl_ns
        elif len(self.first_token_ns) > firsts and request in self._range:
            self.firsts.append(self.first_token_ns[-1])
            self.late_first += self.first_token_ns[-1] > self._ttft_ns

    def hopeless(self) -> bool:
        """Whether the objectives are missed whatever follows, or by a wide margin."""
        gaps = len(self.inter_token_ns)
        return self.late_first > LATE_SHARE * len(self._range) + 1 or (
            gaps > 2000 and self.late_gaps > 3 * LATE_SHARE * gaps
        )


def evaluate(
    profile: Profile,
    candidate: Candidate,
    demand: Demand,
    objectives: Objectives,
    *,
    requests: int,
    seed: int = 0,
    to_the_end: bool = False,
    least: int | None = None,
) -> Prediction:
    """Simulates a deployment under a demand.

    Args:
        requests: whose first tokens are counted.
        seed: the same one gives the same arrivals, lengths and routing, for every deployment.
        to_the_end: also where the objectives are missed long before.
        least: replicas of the model with fewest in the slice that stands for a larger fleet, see `sliced`; None: the
            whole fleet.

    Raises:
        CommandError: a prompt does not fit into the KV of a replica.
    """
    whole = demand
    if least is not None:
        candidate, demand = sliced(candidate, demand, least)
    life_ms = alone_ms(profile, demand)
    expected = max(1, round(demand.arrivals_per_second * life_ms * 1e-3))
    deployment = build_deployment(
        profile,
        max_inflight=candidate.max_inflight,
        thresholds=candidate.thresholds(profile),
        max_queue_delay_ns=_delay_ns(profile, candidate, expected),
        replicas=dict(zip(profile.names, candidate.replicas, strict=True)),
        limited_kv=True,
    )
    room = min([model.kv_tokens for model in profile.models.values() if model.kv_tokens is not None], default=None)
    source = Source(demand, deployment.policy, seed, room)
    counts = Counts(deployment.model_of, objectives)
    try:
        with collector_paused():
            loop = EventLoop(
                deployment,
                source,
                inflight=None,
                handoff_ns=nanoseconds(profile.handoff_ms),
                meter=counts,
                running=source.residents(expected),
            )
            _settle(loop, counts, demand, life_ms, expected)
            counts.begin(loop.now_ns, loop.submitted + 1, requests)
            while not counts.done and (to_the_end or not counts.hopeless()):
                loop.advance()
    except PromptTooLong as exc:
        raise CommandError(f"models.*.kv_tokens is too low: {exc}") from exc
    return _prediction(loop, counts, profile, objectives, demand.every / whole.every)


def sliced(candidate: Candidate, demand: Demand, least: int) -> tuple[Candidate, Demand]:
    """A slice of a fleet that has so many replicas of the model with fewest, and its part of the demand.

    Replicas of a model are alike and requests go to the least loaded, so a slice behaves like the fleet but for the
    luck of lengths, which levels out less over fewer requests: it is somewhat worse, never better.
    """
    every = min(candidate.replicas) / least
    if every <= 1.0:
        return candidate, demand
    replicas = tuple(max(1, round(count / every)) for count in candidate.replicas)
    in_flight = math.ceil(candidate.max_inflight / every)
    return replace(candidate, replicas=replicas, max_inflight=in_flight), replace(demand, every=demand.every * every)


def _delay_ns(profile: Profile, candidate: Candidate, expected: int) -> int | None:
    delay_ms = candidate.max_queue_delay_ms(profile, -(-expected // min(candidate.replicas)))
    return None if delay_ms is None else nanoseconds(delay_ms)


def _settle(loop: EventLoop, counts: Counts, demand: Demand, life_ms: float, expected: int) -> None:
    """Runs for half of a response's time, and on until the number that runs or waits stays about the same."""
    chunk_ns = round(max(0.5e6 * life_ms, _CHUNK_ARRIVALS / demand.arrivals_per_second * 1e9))
    before = math.inf
    _run_for(loop, round(0.5e6 * life_ms))
    for _ in range(_MOST_CHUNKS):
        counts.reset(loop.now_ns)
        _run_for(loop, chunk_ns)
        now = counts.in_flight_ns / max(1, loop.now_ns - counts.start_ns) + loop.orchestrator.queued
        if abs(now - before) <= _SETTLED * now + 1 or loop.orchestrator.queued > 2 * expected:
            return
        before = now


def _run_for(loop: EventLoop, time_ns: int) -> None:
    end_ns = loop.now_ns + time_ns
    while loop.now_ns < end_ns:
        loop.advance()


def _prediction(loop: EventLoop, counts: Counts, profile: Profile, objectives: Objectives, every: float) -> Prediction:
    """Of the fleet of which one `every`-th was simulated."""
    elapsed_ns = max(1, loop.now_ns - counts.start_ns)
    ttft, itl = _percentiles(counts.firsts), _percentiles(counts.inter_token_ns)
    if not counts.done and counts.late_first > LATE_SHARE * len(counts.firsts):
        ttft = (ttft[0], max(ttft[1], objectives.ttft_p99_ms * (1 + 1e-9)))
    sums = list(_by_model(counts, loop.now_ns))
    names = profile.names
    return Prediction(
        *ttft,
        *itl,
        misses=tuple(_misses(ttft[1], itl[1], objectives)),
        requests=len(counts.firsts),
        tokens_per_second=every * 1e9 * counts.tokens / elapsed_ns,
        utilisation={name: busy_ns / elapsed_ns for name, (busy_ns, _, _) in zip(names, sums, strict=True)},
        mean_batch={name: rows / max(1, steps) for name, (_, rows, steps) in zip(names, sums, strict=True)},
        mean_in_flight=every * counts.in_flight_ns / elapsed_ns,
        peak_in_flight=math.ceil(every * counts.peak_in_flight),
        complete=counts.done,
    )


def _misses(ttft_ms: float, itl_ms: float, objectives: Objectives) -> Iterator[str]:
    if ttft_ms > objectives.ttft_p99_ms:
        yield f"time to first token p99 {ttft_ms:.0f} ms > {objectives.ttft_p99_ms:g}"
    if itl_ms > objectives.itl_p99_ms:
        yield f"inter-token time p99 {itl_ms:.1f} ms > {objectives.itl_p99_ms:g}"


def _by_model(counts: Counts, now_ns: int) -> Iterator[tuple[float, int, int]]:
    """Mean busy ns of a replica, requests and steps, by model."""
    for model in range(max(counts.model_of) + 1):
        own = [index for index, of in enumerate(counts.model_of) if of == model]
        busy_ns = sum(counts.busy_ns(index, now_ns) for index in own) / len(own)
        yield busy_ns, sum(counts.replicas[i].requests for i in own), sum(counts.replicas[i].steps for i in own)


def _percentiles(times_ns: array[int]) -> tuple[float, float]:
    if not times_ns:
        return math.nan, math.nan
    p50, p99 = np.percentile(np.frombuffer(times_ns, dtype=np.int64) * 1e-6, (50, 99))
    return float(p50), float(p99)
