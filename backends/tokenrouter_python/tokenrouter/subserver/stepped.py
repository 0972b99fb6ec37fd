"""Runs visits on a stepped engine: one step serves every ready request, extends and decodes mixed.

The policy is asked once per step for all of its requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from tokenrouter import sampling
from tokenrouter.batcher import Batch, Reason, WaitUntil
from tokenrouter.engines.base import Engine, EngineRow, StepResult
from tokenrouter.errors import PolicyFailed, RouterError
from tokenrouter.messages import Outcome, ReportRow
from tokenrouter.policies import calls
from tokenrouter.policies.base import Handoff, Policy, RouteBatch
from tokenrouter.subserver.runner import Rows, Runner, failed
from tokenrouter.subserver.sequence import ModelSequence

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Shares: TypeAlias = tuple[tuple[ModelSequence, int], ...]
"""New tokens per request."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step: which requests take part with how many new tokens, in the order of the batch, and why now."""

    rows: Shares
    reason: Reason
    runner: SteppingRunner = field(repr=False)

    def run(self) -> tuple[Rows, int]:
        return self.runner.run(self.rows, self.reason)


class SteppingRunner(Runner[Engine]):
    """See `runner.Runner`. Whoever decodes here waits for the next step, as arrivals do."""

    def arrive(self, sequence: ModelSequence, *, now_ns: int) -> None:
        self.engine.truncate(sequence.handle, sequence.kv_length)
        self._waiting.add(sequence, now_ns=now_ns)

    def leave(self, sequence: ModelSequence) -> None:
        self._waiting.discard(sequence)

    def poll(self, *, in_flight: int, now_ns: int) -> StepPlan | WaitUntil | None:
        """The step to run, as delayed batching says."""
        decision = self._waiting.poll(in_flight=in_flight, now_ns=now_ns)
        if not isinstance(decision, Batch):
            return decision
        return StepPlan(tuple(self._share_out(decision.keys)), decision.reason, self)

    def _share_out(self, ready: Sequence[ModelSequence]) -> Iterator[tuple[ModelSequence, int]]:
        """New tokens per request under the token budget: decodes first, then extends in the order of arrival."""
        budget = self.engine.info.max_num_tokens
        unseen = {sequence: sequence.unseen for sequence in ready}
        for sequence in sorted(ready, key=lambda sequence: unseen[sequence] > 1):
            share = min(unseen[sequence], budget)
            if share == 0:
                return
            budget -= share
            yield sequence, share

    def run(self, rows: Shares, reason: Reason) -> tuple[Rows, int]:
        """One step. A failing policy fails only its own requests, a failing engine the requests of this step."""
        started_ns = self._clock_ns()
        sequences = tuple([sequence for sequence, _ in rows])
        self.statistics.step_started(reason, [started_ns - self._waiting.ready_since(each) for each in sequences])
        self._waiting.take(Batch(sequences, reason))
        try:
            told = self._step(rows)
        except Exception as exc:
            log.exception("step of %s failed", sequences[0].model)
            told = {sequence: failed(sequence.request, sequence.visit, exc) for sequence in sequences}
        now_ns = self.idle_since_ns = self._clock_ns()
        new_tokens = sum([share for _, share in rows])
        self.statistics.step_finished(len(rows), new_tokens, new_tokens - len(rows), now_ns - started_ns)
        for sequence in sequences:
            if sequence not in told or told[sequence].outcome == Outcome.STAY:
                # Residents and unfinished prefills are ready again.
                self._waiting.add(sequence, now_ns=now_ns)
        return [(sequence, told[sequence]) for sequence in sequences if sequence in told], now_ns

    def _step(self, rows: Shares) -> dict[ModelSequence, ReportRow]:
        """Forward pass, sampling, routing; what becomes of every request that got logits."""
        emitting = [sequence for sequence, share in rows if share == sequence.unseen]
        engine_rows = [_engine_row(sequence, share) for sequence, share in rows]
        with self.pulse.excused():
            result = self.engine.step(engine_rows)
        for sequence, share in rows:
            sequence.kv_length += share
        return self._decide(emitting, result) if emitting else {}

    def _decide(self, sequences: Sequence[ModelSequence], result: StepResult) -> dict[ModelSequence, ReportRow]:
        tokens = sampling.sample(result.logits, sequences)
        token_ids: list[int] = tokens.tolist()
        log_probs: list[float] | None = None
        if any(sequence.sampling.log_probs for sequence in sequences):
            log_probs = sampling.log_probs(result.logits, tokens).tolist()
        targets = _route(sequences, tokens, result)
        rows = {}
        for i, (sequence, target) in enumerate(zip(sequences, targets, strict=True)):
            log_prob = log_probs[i] if log_probs is not None and sequence.sampling.log_probs else None
            rows[sequence] = _row(sequence, token_ids[i], target, log_prob)
        return rows


def _engine_row(sequence: ModelSequence, share: int) -> EngineRow:
    start = sequence.kv_length
    return EngineRow(sequence.handle, sequence.tokens[start : start + share], emit=share == sequence.unseen)


def _route(sequences: Sequence[ModelSequence], tokens: Tensor, result: StepResult) -> list[str | PolicyFailed]:
    """The next model per request, or why the policy could not say; each policy is asked once for all its rows."""
    targets: list[str | PolicyFailed] = [sequence.then for sequence in sequences]
    groups: dict[Policy, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if not sequence.at_limit:
            groups.setdefault(sequence.policy, []).append(i)
    for policy, index in groups.items():
        answer: Sequence[str | PolicyFailed]
        try:
            answer = calls.route(policy, _batch(index, sequences, tokens, result))
        except RouterError as exc:
            answer = [PolicyFailed(str(exc))] * len(index)
        for i, target in zip(index, answer, strict=True):
            targets[i] = target
    return targets


def _batch(index: list[int], sequences: Sequence[ModelSequence], tokens: Tensor, result: StepResult) -> RouteBatch:
    whole = len(index) == len(sequences)
    return RouteBatch(
        model=sequences[0].model,
        rows=sequences if whole else [sequences[i] for i in index],
        tokens=tokens if whole else tokens[index],
        logits=result.logits if whole else result.logits[index],
        hidden=result.hidden if whole or result.hidden is None else result.hidden[index],
    )


def _row(sequence: ModelSequence, token: int, target: str | PolicyFailed, log_prob: float | None) -> ReportRow:
    """One request's line of the report; commits the token unless the policy discards it."""
    handoff, kept = Handoff(keep_token=True), None
    try:
        if isinstance(target, PolicyFailed):
            raise target
        if target == sequence.model:
            kept = calls.kept_state(sequence)
        else:
            handoff = calls.send(sequence, target)
    except PolicyFailed as exc:
        return failed(sequence.request, sequence.visit, exc)
    outcome = Outcome.STAY if target == sequence.model else Outcome.LEAVE
    tokens: list[int] = []
    if handoff.keep_token:
        sequence.commit(token)
        tokens.append(token)
        outcome = sequence.end() or outcome
    if handoff.state is not None:
        sequence.state = handoff.state
    leaves = outcome == Outcome.LEAVE
    return ReportRow(
        sequence.request,
        sequence.visit,
        outcome,
        tokens,
        target if leaves else "",
        sequence.state if leaves else kept,
        [log_prob] if log_prob is not None and tokens else None,
    )
