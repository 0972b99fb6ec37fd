"""Runs visits on an engine that owns its loop: delayed batching is the gate in front of it, its news become reports.

A visit that runs in the engine takes part in its next step, so it counts as ready: visits are submitted when those that
wait and those that run together reach the threshold, are all that is in flight, or one has waited `max_queue_delay`.

The engine keeps KV only as long as its cache has room. It says how much of a submission it found, so a prefix that is
lost shows; it costs time and never changes a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenrouter.batcher import Batch, DelayedBatcher, WaitUntil
from tokenrouter.engines.base import LoopEngine, VisitNews
from tokenrouter.errors import EngineFailed
from tokenrouter.messages import Outcome, ReportRow
from tokenrouter.statistics import SubserverStatistics
from tokenrouter.subserver.runner import Key, Plan, Rows, SubmitPlan, failed
from tokenrouter.subserver.sequence import ModelSequence

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """A visit in the engine: `length` tokens were submitted, of which `held` should still be in its cache."""

    key: Key
    length: int
    held: int
    seen: bool = False


class SubmittingRunner:
    """See `runner.Runner`.

    Args:
        name: of the model.
        engine: an engine that owns its loop.
        batcher: delayed batching over requests that wait.
        sequences: by key, kept by the subserver.
        statistics: a submission counts as a step; how long the engine's own steps take is not known here.
        clock_ns: CLOCK_MONOTONIC in ns.
    """

    # Arrivals never wait for the end of a step here.
    idle_since_ns = 0

    def __init__(
        self,
        name: str,
        engine: LoopEngine,
        batcher: DelayedBatcher[Key],
        sequences: Mapping[Key, ModelSequence],
        *,
        statistics: SubserverStatistics,
        clock_ns: Callable[[], int],
    ) -> None:
        self._name = name
        self._engine = engine
        self._batcher = batcher
        self._sequences = sequences
        self._statistics = statistics
        self._clock_ns = clock_ns
        self._running: dict[int, _Running] = {}
        self._tickets: dict[Key, int] = {}
        self._next_ticket = 1

    def admit(self, sequence: ModelSequence) -> None:
        """As the engine says."""
        self._engine.admit(sequence)

    def arrive(self, key: Key, sequence: ModelSequence, *, now_ns: int) -> None:
        """The request waits for the gate."""
        self._batcher.add(key, now_ns=now_ns)

    def leave(self, key: Key) -> None:
        """The request neither waits nor runs any more; what the engine still says of it is dropped."""
        self._batcher.discard(key)
        ticket = self._tickets.pop(key, None)
        if ticket is not None:
            del self._running[ticket]
            self._engine.cancel(ticket)

    def listen(self, wake: Callable[[], None]) -> None:
        """The engine's news."""
        self._engine.listen(wake)

    def poll(self, *, in_flight: int, now_ns: int) -> SubmitPlan | WaitUntil | None:
        """News first, so that requests that are about to leave do not count as residents."""
        if self._engine.has_news:
            return SubmitPlan(None)
        decision = self._batcher.poll(in_flight=in_flight, now_ns=now_ns, residents=len(self._running))
        return SubmitPlan(decision) if isinstance(decision, Batch) else decision

    def run(self, plan: Plan) -> tuple[Rows, int]:
        """Takes news, then submits."""
        assert isinstance(plan, SubmitPlan)
        now_ns = self._clock_ns()
        rows = [row for news in self._engine.collect() if (row := self._apply(news)) is not None]
        if plan.batch is not None:
            rows += self._submit(plan.batch, now_ns)
        return rows, now_ns

    def _submit(self, batch: Batch[Key], now_ns: int) -> Rows:
        waits = [now_ns - self._batcher.ready_since(key) for key in batch.keys]
        self._statistics.step_started(batch.reason, waits)
        self._batcher.take(batch)
        visits = []
        for key in batch.keys:
            sequence = self._sequences[key]
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._running[ticket] = _Running(key, len(sequence.tokens), sequence.kv_length)
            self._tickets[key] = ticket
            visits.append((ticket, sequence))
        self._statistics.batch_size.observe(len(self._running))
        try:
            self._engine.submit(visits)
        except Exception as exc:
            log.exception("%s could not submit", self._name)
            return [self._failed(ticket, exc) for ticket, _ in visits]
        return []

    def _apply(self, news: VisitNews) -> tuple[Key, ReportRow] | None:
        """The row of one piece of news; None if it is of a visit that is over."""
        running = self._running.get(news.ticket)
        if running is None:
            self._statistics.surplus_tokens += len(news.tokens)
            return None
        if news.outcome == Outcome.FAILED:
            return self._failed(news.ticket, news.error or EngineFailed("the engine gave no reason"))
        sequence = self._sequences[running.key]
        self._account(running, news)
        for token in news.tokens:
            sequence.commit(token)
        outcome, target = news.outcome, news.target
        if outcome == Outcome.LENGTH and sequence.end() is None:
            outcome, target = Outcome.LEAVE, sequence.plan.then
        # Only a hand-off by the policy follows a step that took in the last token.
        sequence.kv_length = len(sequence.tokens) - (news.outcome != Outcome.LEAVE)
        if outcome != Outcome.STAY:
            self._over(news.ticket)
        state = sequence.state if outcome == Outcome.LEAVE else None
        row = ReportRow(running.key[1], sequence.visit, outcome, list(news.tokens), target, state)
        return running.key, row

    def _account(self, running: _Running, news: VisitNews) -> None:
        """Counts tokens run through the model, and what the cache had lost."""
        numbers = self._statistics
        # A hand-off takes a pass of its own, over the token before it.
        numbers.new_tokens += len(news.tokens) + (news.outcome == Outcome.LEAVE)
        if running.seen or news.cached_tokens is None:
            return
        running.seen = True
        # The first new token comes with the submission's own pass, which is counted by its length.
        extended = running.length - news.cached_tokens - 1
        numbers.new_tokens += extended
        numbers.extended_tokens += extended
        numbers.cached_tokens += news.cached_tokens
        missing = running.held - news.cached_tokens
        if missing > 0:
            numbers.recomputed_tokens += missing
            # Less than a block may be the cache's way of sharing blocks.
            numbers.lost_prefixes += missing >= self._engine.info.block_tokens

    def _failed(self, ticket: int, exc: Exception) -> tuple[Key, ReportRow]:
        key = self._over(ticket)
        return key, failed(key[1], self._sequences[key].visit, exc)

    def _over(self, ticket: int) -> Key:
        key = self._running.pop(ticket).key
        del self._tickets[key]
        return key
