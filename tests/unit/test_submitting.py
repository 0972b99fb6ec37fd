"""The runner beside an engine that owns its loop: the gate, news of visits, what the cache has lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tokenrouter.batcher import Batching, WaitUntil
from tokenrouter.engines.base import EngineInfo, EngineStep, VisitNews
from tokenrouter.errors import EngineFailed, InvalidRequest
from tokenrouter.messages import Close, Hello, InFlight, Open, Outcome, PolicySpec, Report, ReportRow, Resume, Sampling
from tokenrouter.policies.base import PolicyContext
from tokenrouter.protocol_version import PROTOCOL_VERSION
from tokenrouter.statistics import CacheStatistics
from tokenrouter.subserver.machine import Subserver
from tokenrouter.subserver.sequence import ModelSequence
from tokenrouter.subserver.submitted import SubmitPlan, SubmittingRunner

MS = 1_000_000
PROMPT = [5, 6, 7, 8]
END = 99


class Loop:
    """An engine whose news the test writes."""

    def __init__(self, max_batch: int = 4) -> None:
        self.info = EngineInfo("loop", 100, 0, 64, 4, 64, max_batch, 64)
        self.submitted: list[tuple[int, list[int]]] = []
        self.cancelled: list[int] = []
        self.news: list[VisitNews] = []
        self.told: list[EngineStep] = []
        self.closed = 0
        self.blocks_leased = self.blocks_used = 0
        self.refuses: Exception | None = None
        self.breaks = False

    def open(self, *, kv_tokens: int, prompt_tokens: int) -> int:
        self.blocks_leased += 1
        return 1

    def close(self, handle: int) -> None:
        self.blocks_leased -= 1

    def admit(self, sequence: ModelSequence) -> None:
        if self.refuses is not None:
            raise self.refuses

    def submit(self, visits: Sequence[tuple[int, ModelSequence]]) -> None:
        if self.breaks:
            raise RuntimeError("the executor is gone")
        self.submitted += [(ticket, list(sequence.tokens)) for ticket, sequence in visits]

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)

    @property
    def has_news(self) -> bool:
        return bool(self.news or self.told)

    def collect(self) -> list[VisitNews]:
        news, self.news = self.news, []
        return news

    def steps(self) -> list[EngineStep]:
        told, self.told = self.told, []
        return told

    def listen(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def extras(self, model: str) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        pass


class Bench:
    """A subserver of the model "small" with one peer."""

    def __init__(self, batching: Batching | None = None, *, max_batch: int = 4) -> None:
        self.engine = Loop(max_batch)
        self.now_ns = 0
        self.subserver = Subserver(
            "small",
            SubmittingRunner(self.engine, batching or Batching(), clock_ns=lambda: self.now_ns),
            shares={"routed": 64},
            context=PolicyContext,
        )
        spec = PolicySpec("single")
        self.handle(Hello(PROTOCOL_VERSION, "test", "routed", ("small", "large"), spec))
        self.subserver.outbox.clear()

    def handle(self, message: Any) -> None:
        self.subserver.handle(1, message, now_ns=self.now_ns)

    def open(self, request: int, *, in_flight: int = 1, policy: str = "rstitch", **sampling: Any) -> None:
        given = Sampling(**{"max_tokens": 8, "end_ids": (END,), **sampling})
        self.handle(Open(request, 1, in_flight, PROMPT, len(PROMPT), 12, given, PolicySpec(policy)))

    def turn(self) -> list[ReportRow]:
        """Everything that can be done now; the rows that it gave."""
        while isinstance(plan := self.subserver.poll(now_ns=self.now_ns), SubmitPlan):
            self.subserver.run_step(plan)
        rows = [row for _, report in self.subserver.outbox if isinstance(report, Report) for row in report.rows]
        self.subserver.outbox.clear()
        return rows

    def tell(self, ticket: int, outcome: Outcome, *tokens: int, **more: Any) -> list[ReportRow]:
        self.engine.news.append(VisitNews(ticket, outcome, tokens, **more))
        return self.turn()

    @property
    def tickets(self) -> list[int]:
        return [ticket for ticket, _ in self.engine.submitted]


def test_a_step_of_the_engine_s_own_leaves_nothing_for_meanwhile() -> None:
    assert not Bench().subserver.overlap(lambda: None)


# --- the gate --------------------------------------------------------------------------------------------------------


def test_visits_are_submitted_together_when_the_threshold_is_reached() -> None:
    bench = Bench(Batching(3, 50 * MS))
    for request in (1, 2):
        bench.open(request, in_flight=9)
    assert bench.turn() == []
    assert bench.tickets == []
    bench.open(3, in_flight=9)
    bench.turn()
    assert bench.tickets == [1, 2, 3]
    assert bench.subserver.statistics.steps_by_reason["threshold"] == 1


def test_a_visit_that_runs_counts_as_ready() -> None:
    bench = Bench(Batching(2, 50 * MS))
    bench.open(1, in_flight=2)
    bench.now_ns = 50 * MS
    bench.turn()
    assert bench.subserver.statistics.steps_by_reason["deadline"] == 1
    bench.open(2, in_flight=9)
    bench.turn()
    assert bench.tickets == [1, 2], "one runs and one waits: two are ready"


def test_everybody_in_flight_being_here_opens_the_gate() -> None:
    bench = Bench(Batching(4, 50 * MS))
    for request in (1, 2):
        bench.open(request, in_flight=3)
    assert isinstance(bench.subserver.poll(now_ns=0), WaitUntil)
    bench.handle(InFlight(2))
    bench.turn()
    assert bench.tickets == [1, 2]
    assert bench.subserver.statistics.steps_by_reason["all_ready"] == 1


def test_nobody_waits_longer_than_the_delay() -> None:
    bench = Bench(Batching(4, 50 * MS))
    bench.open(1, in_flight=9)
    assert bench.subserver.poll(now_ns=0) == WaitUntil(50 * MS)
    bench.now_ns = 50 * MS
    bench.turn()
    assert bench.tickets == [1]


def test_no_more_run_than_the_engine_takes_in_a_step() -> None:
    bench = Bench(max_batch=2)
    for request in (1, 2, 3):
        bench.open(request, in_flight=3)
    bench.turn()
    assert bench.tickets == [1, 2]
    assert bench.subserver.poll(now_ns=0) is None
    bench.tell(1, Outcome.STOP, END)
    assert bench.tickets == [1, 2, 3]


# --- news ------------------------------------------------------------------------------------------------------------


def test_news_become_rows_of_their_visit() -> None:
    bench = Bench()
    bench.open(1)
    bench.turn()
    assert bench.tell(1, Outcome.STAY, 10) == [ReportRow(1, 1, Outcome.STAY, [10])]
    assert bench.tell(1, Outcome.LEAVE, target="large") == [ReportRow(1, 1, Outcome.LEAVE, [], "large", {})]
    assert bench.subserver.residents == 0
    assert bench.subserver.open_sequences == 1
    bench.handle(Resume(1, 3, 1, 5, [11, 12]))
    bench.turn()
    assert bench.engine.submitted[-1] == (2, [*PROMPT, 10, 11, 12])
    assert bench.tell(2, Outcome.STOP, 13, END) == [ReportRow(1, 3, Outcome.STOP, [13, END])]
    assert bench.engine.blocks_leased == bench.subserver.open_sequences == 0


def test_the_last_allowed_token_ends_the_response() -> None:
    bench = Bench()
    bench.open(1, max_tokens=2)
    bench.turn()
    bench.tell(1, Outcome.STAY, 10)
    assert bench.tell(1, Outcome.LENGTH, 11) == [ReportRow(1, 1, Outcome.LENGTH, [11])]


def test_the_last_token_of_a_limited_visit_hands_over() -> None:
    bench = Bench()
    bench.open(1, policy="me")
    limit = bench.subserver._peers[1].sequences[1].visit_limit
    assert limit is not None
    assert limit < 8, "another seed: the visit has to end before the response"
    bench.turn()
    tokens = tuple(range(10, 10 + limit))
    assert bench.tell(1, Outcome.LENGTH, *tokens) == [ReportRow(1, 1, Outcome.LEAVE, list(tokens), "large", {})]


def test_a_failed_visit_fails_its_request_only() -> None:
    bench = Bench()
    for request in (1, 2):
        bench.open(request, in_flight=2)
    bench.turn()
    (row,) = bench.tell(1, Outcome.FAILED, error=EngineFailed("out of luck"))
    assert (row.request, row.outcome, row.error) == (1, Outcome.FAILED, ("engine_failed", "out of luck"))
    assert bench.engine.blocks_leased == bench.subserver.open_sequences == 1


def test_an_engine_that_cannot_submit_fails_those_requests() -> None:
    bench = Bench()
    bench.engine.breaks = True
    bench.open(1)
    (row,) = bench.turn()
    assert row.error == ("engine_failed", "RuntimeError: the executor is gone")
    assert bench.engine.blocks_leased == bench.subserver.open_sequences == 0


def test_what_the_engine_refuses_gets_no_memory() -> None:
    bench = Bench()
    bench.engine.refuses = InvalidRequest("not here")
    bench.open(1)
    (row,) = bench.turn()
    assert row.error == ("invalid_request", "not here")
    assert bench.engine.blocks_leased == bench.subserver.open_sequences == 0


# --- visits that are over --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [Close(1, 0), Resume(1, 5, 1, 4, [20])], ids=["closed", "resumed"])
def test_what_an_old_visit_still_says_is_dropped(over: Any) -> None:
    bench = Bench()
    bench.open(1)
    bench.turn()
    bench.tell(1, Outcome.STAY, 10)
    bench.handle(over)
    assert bench.engine.cancelled == [1]
    bench.turn()
    assert bench.tell(1, Outcome.STAY, 11) == []
    assert bench.tell(1, Outcome.FAILED) == []
    assert bench.subserver.statistics.cache.surplus_tokens == 1
    if isinstance(over, Resume):
        assert bench.engine.submitted[-1] == (2, [*PROMPT, 20])


def test_a_disconnected_peer_ends_its_visits() -> None:
    bench = Bench()
    bench.open(1)
    bench.turn()
    bench.subserver.disconnected(1)
    assert bench.engine.cancelled == [1]
    assert bench.engine.blocks_leased == bench.subserver.open_sequences == 0


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "cached", "recomputed", "lost"),
    [
        # 4 prompt tokens and 10 are in the cache after a hand-off; after the length, 10 is not.
        ("handoff", 5, 0, 0),
        ("handoff", 4, 1, 0),
        ("handoff", 1, 4, 1),
        ("handoff", 0, 5, 1),
        ("limit", 4, 0, 0),
        ("limit", 3, 1, 0),
    ],
)
def test_a_prefix_that_was_lost_is_counted(ends: str, cached: int, recomputed: int, lost: int) -> None:
    bench = Bench()
    bench.open(1)
    bench.turn()
    if ends == "handoff":
        bench.tell(1, Outcome.STAY, 10, cached_tokens=0)
        bench.tell(1, Outcome.LEAVE, target="large", cached_tokens=0)
    else:
        bench.tell(1, Outcome.LENGTH, 10, cached_tokens=0)
    bench.handle(Resume(1, 3, 1, 5, [11, 12]))
    bench.turn()
    bench.tell(2, Outcome.STAY, 13, cached_tokens=cached)
    bench.tell(2, Outcome.STAY, 14, cached_tokens=cached)
    numbers = bench.subserver.statistics
    assert numbers.cache == CacheStatistics(cached, lost, recomputed)
    # The first visit runs 4 prompt tokens and then 10, unless 10 was the last one allowed; the second what was not
    # cached, and then 13.
    first = 5 if ends == "handoff" else 4
    assert numbers.new_tokens == first + (7 - cached) + 1
    assert numbers.extended_tokens == 3 + (7 - cached - 1)


def test_times_of_the_engines_own_steps_are_counted_by_batch_size() -> None:
    bench = Bench()
    bench.engine.told = [EngineStep(2, 0, 0.004), EngineStep(2, 3, 0.006), EngineStep(1, 0, 0.002)]
    assert bench.turn() == []
    numbers = bench.subserver.statistics
    by_batch = {batch: (sums.steps, sums.seconds, sums.extended) for batch, sums in numbers.step_times.by_batch.items()}
    assert by_batch == {2: (2, pytest.approx(0.01), 3), 1: (1, 0.002, 0)}
    assert (numbers.step_time.count, numbers.steps, numbers.extended_tokens) == (3, 0, 0)
