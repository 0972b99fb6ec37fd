"""What a subserver counts for the profiler."""

from __future__ import annotations

from tokenrouter.messages import Outcome, ReportRow
from tokenrouter.statistics import (
    END,
    HANDOFF_BUCKETS,
    MOST_EXACT_BATCH,
    MOST_FITTED_EXTENDED,
    Histogram,
    StepTimes,
    SubserverStatistics,
)


def test_step_times_keep_the_sums_of_a_regression() -> None:
    times = StepTimes()
    steps = [(1, 0, 0.5), (1, 3, 0.8), (2, 1, 0.75)]
    for batch, extended, seconds in steps:
        times.observe(batch, extended, seconds)
    assert (times.by_batch[1].steps, times.by_batch[1].seconds, times.by_batch[1].extended) == (2, 1.3, 3)
    assert times.seconds_squared == sum(t * t for _, _, t in steps)
    assert times.extended_squared == sum(e * e for _, e, _ in steps)
    assert times.seconds_extended == sum(e * t for _, e, t in steps)


def test_prefills_and_huge_batches_are_left_out() -> None:
    times = StepTimes()
    times.observe(1, MOST_FITTED_EXTENDED + 1, 1.0)
    times.observe(MOST_EXACT_BATCH + 1, 0, 1.0)
    assert not times.by_batch
    assert times.extended_squared == 0


def test_routes_are_counted_by_target_and_commit() -> None:
    statistics = SubserverStatistics()
    rows = [
        ReportRow(1, 1, Outcome.STAY, [7]),
        ReportRow(1, 1, Outcome.STAY, [7]),
        ReportRow(1, 1, Outcome.LEAVE, [], "large"),
        ReportRow(1, 1, Outcome.STOP, [7]),
        ReportRow(1, 1, Outcome.LENGTH, [7]),
        ReportRow(1, 1, Outcome.FAILED, []),
        ReportRow(1, 1, Outcome.LOST, []),
    ]
    for row in rows:
        statistics.settled(row)
    assert statistics.routes == {("", True): 2, ("large", False): 1, (END, True): 2}


def test_only_handoffs_to_an_idle_model_are_timed() -> None:
    statistics = SubserverStatistics()
    statistics.arrived(now_ns=300_000, left_ns=100_000, idle_since_ns=100_000)
    statistics.arrived(now_ns=900_000, left_ns=100_000, idle_since_ns=800_000)
    statistics.arrived(now_ns=900_000, left_ns=0, idle_since_ns=800_000)
    assert (statistics.visits, statistics.handoffs_in, statistics.handoff.count) == (3, 2, 1)
    assert statistics.handoff.total == 200_000 * 1e-9


def test_a_peer_that_says_it_left_in_the_future_gives_no_time() -> None:
    statistics = SubserverStatistics()
    statistics.arrived(now_ns=900_000, left_ns=2**62, idle_since_ns=0)
    assert (statistics.handoffs_in, statistics.handoff.count, statistics.handoff.total) == (1, 0, 0.0)


def test_a_time_below_zero_counts_as_none() -> None:
    times = Histogram(HANDOFF_BUCKETS)
    times.observe(-1e-6)
    assert (times.counts[0], times.count, times.total) == (1, 1, 0.0)
