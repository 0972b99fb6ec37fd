"""Runs visits on a stepped engine: one step serves every ready request, extends and decodes mixed.

The policy is asked once per step for all of its requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tokenrouter import sampling
from tokenrouter.batcher import Batch, DelayedBatcher, WaitUntil
from tokenrouter.engines.base import Engine, EngineRow, StepResult
from tokenrouter.errors import PolicyFailed, RouterError
from tokenrouter.messages import Outcome, ReportRow
from tokenrouter.policies import calls
from tokenrouter.policies.base import Handoff, Policy, RouteBatch
from tokenrouter.statistics import SubserverStatistics
from tokenrouter.subserver.runner import Key, Plan, Rows, StepPlan, failed
from tokenrouter.subserver.sequence import ModelSequence

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class SteppingRunner:
    """See `runner.Runner`.

    Args:
        name: of the model.
        engine: a stepped engine.
        batcher: delayed batching over ready requests, residents included.
        sequences: by key, kept by the subserver.
        statistics: told of every step.
        clock_ns: CLOCK_MONOTONIC in ns; only used to time steps.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        batcher: DelayedBatcher[Key],
        sequences: Mapping[Key, ModelSequence],
        *,
        statistics: SubserverStatistics,
        clock_ns: Callable[[], int],
    ) -> None:
        self.idle_since_ns = 0
        self._name = name
        self._engine = engine
        self._batcher = batcher
        self._sequences = sequences
        self._statistics = statistics
        self._clock_ns = clock_ns

    def admit(self, sequence: ModelSequence) -> None:
        """A stepped engine serves every request."""

    def arrive(self, key: Key, sequence: ModelSequence, *, now_ns: int) -> None:
        """The request is ready."""
        self._engine.truncate(sequence.handle, sequence.kv_length)
        self._batcher.add(key, now_ns=now_ns)

    def leave(self, key: Key) -> None:
        """The request is not ready any more."""
        self._batcher.discard(key)

    def listen(self, wake: Callable[[], None]) -> None:
        """A stepped engine never has news."""

    def poll(self, *, in_flight: int, now_ns: int) -> StepPlan | WaitUntil | None:
        """The step to run, as delayed batching says."""
        decision = self._batcher.poll(in_flight=in_flight, now_ns=now_ns)
        if not isinstance(decision, Batch):
            return decision
        return StepPlan(decision, tuple(self._share_out(decision.keys)))

    def _share_out(self, keys: Sequence[Key]) -> Iterator[tuple[Key, int]]:
        """New tokens per request under the token budget: decodes first, then extends in the order of arrival."""
        budget = self._engine.info.max_num_tokens
        unseen = {key: self._sequences[key].unseen for key in keys}
        for key in sorted(keys, key=lambda key: unseen[key] > 1):
            share = min(unseen[key], budget)
            if share == 0:
                return
            budget -= share
            yield key, share

    def run(self, plan: Plan) -> tuple[Rows, int]:
        """One step. A failing policy fails only its own requests, a failing engine the requests of this step."""
        assert isinstance(plan, StepPlan)
        started_ns = self._clock_ns()
        keys = tuple(key for key, _ in plan.rows)
        self._statistics.step_started(plan.batch.reason, [started_ns - self._batcher.ready_since(key) for key in keys])
        self._batcher.take(Batch(keys, plan.batch.reason))
        shares = [share for _, share in plan.rows]
        try:
            rows = self._step(keys, shares)
        except Exception as exc:
            log.exception("step of %s failed", self._name)
            rows = {key: failed(key[1], self._sequences[key].visit, exc) for key in keys}
        now_ns = self.idle_since_ns = self._clock_ns()
        self._statistics.step_finished(len(keys), sum(shares), sum(s - 1 for s in shares), now_ns - started_ns)
        for key in keys:
            if key not in rows or rows[key].outcome == Outcome.STAY:
                # Residents and unfinished prefills are ready again.
                self._batcher.add(key, now_ns=now_ns)
        return [(key, rows[key]) for key in keys if key in rows], now_ns

    def _step(self, keys: Sequence[Key], shares: Sequence[int]) -> dict[Key, ReportRow]:
        """Forward pass, sampling, routing; what becomes of every request that got logits."""
        sequences = [self._sequences[key] for key in keys]
        pairs = list(zip(sequences, shares, strict=True))
        emitting = [key for key, (sequence, share) in zip(keys, pairs, strict=True) if share == sequence.unseen]
        result = self._engine.step([_engine_row(sequence, share) for sequence, share in pairs])
        for sequence, share in pairs:
            sequence.kv_length += share
        return self._decide(emitting, result) if emitting else {}

    def _decide(self, keys: Sequence[Key], result: StepResult) -> dict[Key, ReportRow]:
        sequences = [self._sequences[key] for key in keys]
        tokens = sampling.sample(result.logits, sequences)
        token_ids: list[int] = tokens.tolist()
        log_probs: list[float] | None = None
        if any(sequence.sampling.log_probs for sequence in sequences):
            log_probs = sampling.log_probs(result.logits, tokens).tolist()
        targets = self._route(sequences, tokens, result)
        rows = {}
        for i, (key, sequence, target) in enumerate(zip(keys, sequences, targets, strict=True)):
            log_prob = log_probs[i] if log_probs is not None and sequence.sampling.log_probs else None
            rows[key] = self._row(key[1], sequence, token_ids[i], target, log_prob)
        return rows

    def _route(
        self, sequences: Sequence[ModelSequence], tokens: Tensor, result: StepResult
    ) -> list[str | PolicyFailed]:
        """The next model per request, or why the policy could not say; each policy is asked once for all its rows."""
        targets: list[str | PolicyFailed] = [self._name] * len(sequences)
        groups: dict[Policy, list[int]] = {}
        for i, sequence in enumerate(sequences):
            if sequence.at_limit:
                targets[i] = sequence.plan.then
            else:
                groups.setdefault(sequence.policy, []).append(i)
        for policy, index in groups.items():
            answer: Sequence[str | PolicyFailed]
            try:
                answer = calls.route(policy, self._batch(index, sequences, tokens, result))
            except RouterError as exc:
                answer = [PolicyFailed(str(exc))] * len(index)
            for i, target in zip(index, answer, strict=True):
                targets[i] = target
        return targets

    def _batch(
        self, index: list[int], sequences: Sequence[ModelSequence], tokens: Tensor, result: StepResult
    ) -> RouteBatch:
        whole = len(index) == len(sequences)
        return RouteBatch(
            model=self._name,
            rows=sequences if whole else [sequences[i] for i in index],
            tokens=tokens if whole else tokens[index],
            logits=result.logits if whole else result.logits[index],
            hidden=result.hidden if whole or result.hidden is None else result.hidden[index],
        )

    def _row(
        self, request: int, sequence: ModelSequence, token: int, target: str | PolicyFailed, log_prob: float | None
    ) -> ReportRow:
        """One request's line of the report; commits the token unless the policy discards it."""
        handoff = Handoff(keep_token=True)
        try:
            if isinstance(target, PolicyFailed):
                raise target
            if target != self._name:
                handoff = calls.send(sequence, target)
        except PolicyFailed as exc:
            return failed(request, sequence.visit, exc)
        outcome = Outcome.STAY if target == self._name else Outcome.LEAVE
        tokens: list[int] = []
        if handoff.keep_token:
            sequence.commit(token)
            tokens.append(token)
            outcome = sequence.end() or outcome
        if handoff.state is not None:
            sequence.state = handoff.state
        leaves = outcome == Outcome.LEAVE
        return ReportRow(
            request,
            sequence.visit,
            outcome,
            tokens,
            target if leaves else "",
            sequence.state if leaves else None,
            [log_prob] if log_prob is not None and tokens else None,
        )


def _engine_row(sequence: ModelSequence, share: int) -> EngineRow:
    start = sequence.kv_length
    return EngineRow(sequence.handle, sequence.tokens[start : start + share], emit=share == sequence.unseen)
