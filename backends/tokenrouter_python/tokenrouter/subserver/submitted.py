"""Runs visits on an engine that owns its loop: delayed batching is the gate in front of it, its news become reports.

A visit that runs in the engine takes part in its next step, so it counts as ready: visits are submitted when those that
wait and those that run together reach the threshold, are all that is in flight, or one has waited `max_queue_delay`.

The engine keeps KV only as long as its cache has room. It says how much of a submission it found, so a prefix that is
lost shows; it costs time and never changes a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenrouter.batcher import Batch, Batching, WaitUntil
from tokenrouter.engines.base import LoopEngine, VisitNews
from tokenrouter.errors import EngineFailed
from tokenrouter.messages import Outcome, ReportRow
from tokenrouter.statistics import CacheStatistics
from tokenrouter.subserver.runner import Rows, Runner, failed
from tokenrouter.subserver.sequence import ModelSequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SubmitPlan:
    """One turn beside an engine that owns its loop: takes its news, and submits `batch` if there is one."""

    batch: Batch[ModelSequence] | None
    runner: SubmittingRunner = field(repr=False)

    def run(self) -> tuple[Rows, int]:
        return self.runner.run(self.batch)


@dataclass(slots=True)
class _Running:
    """A visit in the engine: `length` tokens were submitted, of which `held` should still be in its cache."""

    sequence: ModelSequence
    length: int
    held: int
    seen: bool = False


class SubmittingRunner(Runner[LoopEngine]):
    """See `runner.Runner`.

    A submission counts as a step; times are of the engine's own steps, as far as it tells of them. Arrivals never wait
    for the end of one, so `idle_since_ns` stays 0.
    """

    def __init__(self, engine: LoopEngine, batching: Batching, *, clock_ns: Callable[[], int]) -> None:
        super().__init__(engine, batching, clock_ns=clock_ns)
        self.statistics.cache = self._cache = CacheStatistics()
        self._running: dict[int, _Running] = {}
        self._tickets: dict[ModelSequence, int] = {}
        self._next_ticket = 1

    def admit(self, sequence: ModelSequence, *, kv_tokens: int) -> None:
        """The engine is asked before it leases."""
        self.engine.admit(sequence)
        super().admit(sequence, kv_tokens=kv_tokens)

    def listen(self, wake: Callable[[], None]) -> None:
        self.engine.listen(wake)

    def arrive(self, sequence: ModelSequence, *, now_ns: int) -> None:
        self._waiting.add(sequence, now_ns=now_ns)

    def leave(self, sequence: ModelSequence) -> None:
        """The request neither waits nor runs any more; what the engine still says of it is dropped."""
        self._waiting.discard(sequence)
        ticket = self._tickets.pop(sequence, None)
        if ticket is not None:
            del self._running[ticket]
            self.engine.cancel(ticket)

    def poll(self, *, in_flight: int, now_ns: int) -> SubmitPlan | WaitUntil | None:
        """News first, so that requests that are about to leave do not count as residents."""
        if self.engine.has_news:
            return SubmitPlan(None, self)
        decision = self._waiting.poll(in_flight=in_flight, now_ns=now_ns, residents=len(self._running))
        return SubmitPlan(decision, self) if isinstance(decision, Batch) else decision

    def run(self, batch: Batch[ModelSequence] | None) -> tuple[Rows, int]:
        """Takes news, then submits."""
        now_ns = self._clock_ns()
        for step in self.engine.steps():
            self.statistics.step_took(step.batch, step.extended_tokens, step.seconds)
        rows = [row for news in self.engine.collect() if (row := self._apply(news)) is not None]
        if batch is not None:
            rows += self._submit(batch, now_ns)
        return rows, now_ns

    def _submit(self, batch: Batch[ModelSequence], now_ns: int) -> Rows:
        waits = [now_ns - self._waiting.ready_since(sequence) for sequence in batch.keys]
        self.statistics.step_started(batch.reason, waits)
        if (step_log := self.step_log) is not None:
            members = [self._member(sequence, sequence.unseen) for sequence in batch.keys]
            running = len(self._running) + len(batch.keys)
            step_log.add(self._logged(members, batch.reason, now_ns, running=running))
        self._waiting.take(batch)
        visits = []
        for sequence in batch.keys:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._running[ticket] = _Running(sequence, len(sequence.tokens), sequence.kv_length)
            self._tickets[sequence] = ticket
            visits.append((ticket, sequence))
        self.statistics.batch_size.observe(len(self._running))
        try:
            self.engine.submit(visits)
        except Exception as exc:
            log.exception("%s could not submit", batch.keys[0].model)
            return [self._failed(ticket, exc) for ticket, _ in visits]
        return []

    def _apply(self, news: VisitNews) -> tuple[ModelSequence, ReportRow] | None:
        """The row of one piece of news; None if it is of a visit that is over."""
        running = self._running.get(news.ticket)
        if running is None:
            self._cache.surplus_tokens += len(news.tokens)
            return None
        if news.outcome == Outcome.FAILED:
            return self._failed(news.ticket, news.error or EngineFailed("the engine gave no reason"))
        sequence = running.sequence
        self._account(running, news)
        for token in news.tokens:
            sequence.commit(token)
        outcome, target = news.outcome, news.target
        if outcome == Outcome.LENGTH and sequence.end() is None:
            outcome, target = Outcome.LEAVE, sequence.then
        # Only a hand-off by the policy follows a step that took in the last token.
        sequence.kv_length = len(sequence.tokens) - (news.outcome != Outcome.LEAVE)
        if outcome != Outcome.STAY:
            self._over(news.ticket)
        state = sequence.state if outcome == Outcome.LEAVE else None
        return sequence, ReportRow(sequence.request, sequence.visit, outcome, list(news.tokens), target, state)

    def _account(self, running: _Running, news: VisitNews) -> None:
        """Counts tokens run through the model, and what the cache had lost."""
        numbers, cache = self.statistics, self._cache
        # A hand-off takes a pass of its own, over the token before it.
        numbers.new_tokens += len(news.tokens) + (news.outcome == Outcome.LEAVE)
        if running.seen or news.cached_tokens is None:
            return
        running.seen = True
        # The first new token comes with the submission's own pass, which is counted by its length.
        extended = running.length - news.cached_tokens - 1
        numbers.new_tokens += extended
        numbers.extended_tokens += extended
        cache.cached_tokens += news.cached_tokens
        missing = running.held - news.cached_tokens
        if missing > 0:
            cache.recomputed_tokens += missing
            # Less than a block may be the cache's way of sharing blocks.
            cache.lost_prefixes += missing >= self.engine.info.block_tokens

    def _failed(self, ticket: int, exc: Exception) -> tuple[ModelSequence, ReportRow]:
        sequence = self._over(ticket)
        return sequence, failed(sequence.request, sequence.visit, exc)

    def _over(self, ticket: int) -> ModelSequence:
        sequence = self._running.pop(ticket).sequence
        del self._tickets[sequence]
        return sequence
