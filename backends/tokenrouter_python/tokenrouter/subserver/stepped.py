"""Runs visits on a stepped engine: one step serves every ready request, extends and decodes mixed.

The policy is asked once per step for all of its requests. Where guesses are checked, several positions of a request may
be decided in one step: then it is asked once more for those that go on, until nobody does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from tokenrouter import sampling
from tokenrouter.batcher import Batch, Reason, WaitUntil
from tokenrouter.engines.base import Engine, EngineRow, StepResult
from tokenrouter.errors import PolicyFailed, RouterError
from tokenrouter.messages import Decision, Guess, Measure, Outcome, ReportRow
from tokenrouter.policies import calls
from tokenrouter.policies.base import Handoff, Policy, RouteBatch
from tokenrouter.subserver.check import Check
from tokenrouter.subserver.runner import Rows, Runner, failed
from tokenrouter.subserver.sequence import ModelSequence

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Shares: TypeAlias = tuple[tuple[ModelSequence, int], ...]
"""New tokens per request."""
_KEEPS = Handoff(keep_token=True)


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

    speculates: ClassVar[bool] = True

    def overlap(self, meanwhile: Callable[[], None]) -> bool:
        self._meanwhile = meanwhile
        return True

    def arrive(self, sequence: ModelSequence, *, now_ns: int) -> None:
        self.engine.truncate(sequence.handle, sequence.kv_length)
        self._waiting.add(sequence, now_ns=now_ns)

    def leave(self, sequence: ModelSequence) -> None:
        self._waiting.discard(sequence)

    def settled(self, sequence: ModelSequence, *, now_ns: int) -> None:
        """What was rolled back is forgotten; what was confirmed makes room for further guesses."""
        self.engine.truncate(sequence.handle, sequence.kv_length)
        if not (sequence.resident and sequence.ready):
            self._waiting.discard(sequence)
        elif sequence not in self._waiting:
            self._waiting.add(sequence, now_ns=now_ns)

    def poll(self, *, in_flight: int, now_ns: int) -> StepPlan | WaitUntil | None:
        """The step to run, as delayed batching says."""
        decision = self._waiting.poll(in_flight=in_flight, now_ns=now_ns)
        if not isinstance(decision, Batch):
            return decision
        return StepPlan(self._share_out(decision.keys), decision.reason, self)

    def _share_out(self, ready: Sequence[ModelSequence]) -> Shares:
        """New tokens per request under the token budget: decodes first, then extends in the order of arrival."""
        wanted = [(sequence, sequence.unseen) for sequence in ready]
        shares = [each for each in wanted if each[1] == 1]
        if len(shares) < len(wanted):
            shares += [each for each in wanted if each[1] > 1]
        budget = self.engine.info.max_num_tokens
        return tuple(shares if sum([share for _, share in shares]) <= budget else _cut(shares, budget))

    def run(self, rows: Shares, reason: Reason) -> tuple[Rows, int]:
        """One step. A failing policy fails only its own requests, a failing engine the requests of this step."""
        started_ns = self._clock_ns()
        sequences = tuple([sequence for sequence, _ in rows])
        self.statistics.step_started(reason, [started_ns - self._waiting.ready_since(each) for each in sequences])
        if (step_log := self.step_log) is not None:
            members = [self._member(sequence, share) for sequence, share in rows]
            step = self._logged(members, reason, started_ns, running=len(rows))
            checked = self.statistics.checked_positions
        self._waiting.take(Batch(sequences, reason))
        try:
            told = self._step(rows)
        except Exception as exc:
            log.exception("step of %s failed", sequences[0].model)
            told = {each: row for each in sequences if (row := _failed(each, exc)) is not None}
        now_ns = self.idle_since_ns = self._clock_ns()
        if step_log is not None:
            step.end_ns, step.checked = now_ns, self.statistics.checked_positions - checked
            step_log.add(step)
        new_tokens = sum([share for _, share in rows])
        self.statistics.step_finished(len(rows), new_tokens, new_tokens - len(rows), now_ns - started_ns)
        for sequence in sequences:
            if _goes_on(sequence, told.get(sequence)):
                self._waiting.add(sequence, now_ns=now_ns)
        return [(sequence, told[sequence]) for sequence in sequences if sequence in told], now_ns

    def _step(self, rows: Shares) -> dict[ModelSequence, ReportRow]:
        """Forward pass, sampling, routing; what becomes of every request that got logits."""
        engine_rows = [_engine_row(sequence, share) for sequence, share in rows]
        with self.pulse.excused():
            result = self.engine.step(engine_rows, self._meanwhile)
        for sequence, share in rows:
            sequence.kv_length += share
        emitting = [sequence for (sequence, _), row in zip(rows, engine_rows, strict=True) if row.emit]
        if len(emitting) == result.logits.shape[0] and not any(each.following for each in emitting):
            return self._decide(emitting, result)
        return self._check(emitting, [row.emit for row in engine_rows if row.emit], result)

    def _check(
        self, sequences: Sequence[ModelSequence], emit: Sequence[int], result: StepResult
    ) -> dict[ModelSequence, ReportRow]:
        """Decides the first position of all, then further ones of those whose guesses were right."""
        first = [end - count for end, count in zip(accumulate(emit), emit, strict=True)]
        places = zip(sequences, first, emit, strict=True)
        checks = [Check(sequence, place, count) for sequence, place, count in places if sequence.following]
        told = rows = self._decide(sequences, _rows_of(result, first))
        going = checks
        while going := [check for check in going if check.take(rows[check.sequence])]:
            rows = self._decide([each.sequence for each in going], _rows_of(result, [each.index for each in going]))
        for check in checks:
            self.statistics.checks += check.guessed > 0
            self.statistics.checked_positions += check.decided if check.guessed else 0
            self.engine.truncate(check.sequence.handle, check.sequence.kv_length)
            told[check.sequence] = check.row()
        return told

    def _decide(self, sequences: Sequence[ModelSequence], result: StepResult) -> dict[ModelSequence, ReportRow]:
        """What becomes of each request at its next position, by its row of logits; nothing of one that stalls."""
        if not sequences:
            return {}
        tokens = sampling.sample(result.logits, sequences)
        token_ids: list[int] = tokens.tolist()
        log_probs: list[float] | None = None
        if any(sequence.sampling.log_probs for sequence in sequences):
            log_probs = sampling.log_probs(result.logits, tokens).tolist()
        measures = _explained(sequences, tokens, result) if self.explaining else {}
        targets = _route(sequences, tokens, result)
        rows = {}
        for i, (sequence, target) in enumerate(zip(sequences, targets, strict=True)):
            log_prob = log_probs[i] if log_probs is not None and sequence.sampling.log_probs else None
            row = _row(sequence, token_ids[i], target, log_prob, measures.get(sequence, ()) if measures else ())
            if row is not None:
                rows[sequence] = row
        return rows


def _cut(shares: Sequence[tuple[ModelSequence, int]], budget: int) -> Iterator[tuple[ModelSequence, int]]:
    """What of these shares a budget of tokens allows; the first ones get all of theirs."""
    for sequence, wanted in shares:
        share = min(wanted, budget)
        if share == 0:
            return
        budget -= share
        yield sequence, share


def _engine_row(sequence: ModelSequence, share: int) -> EngineRow:
    """The next tokens of a request, with logits at every position that may have to be decided."""
    start, known = sequence.kv_length, len(sequence.tokens)
    stop = start + share
    tokens = sequence.tokens[start:stop]
    if stop > known:
        tokens += [guess.token for guess in islice(sequence.guesses, max(0, start - known), stop - known)]
    return EngineRow(sequence.handle, tokens, emit=max(0, stop - max(start, known - 1)))


def _rows_of(result: StepResult, index: list[int]) -> StepResult:
    return StepResult(result.logits[index], None if result.hidden is None else result.hidden[index])


def _goes_on(sequence: ModelSequence, row: ReportRow | None) -> bool:
    """Whether a request takes part in the next step: residents, unfinished prefills, and those that may guess."""
    if sequence.ahead:
        return sequence.ready
    return row is None or row.outcome == Outcome.STAY


def _failed(sequence: ModelSequence, exc: Exception) -> ReportRow | None:
    """The row of a request whose step failed; one that is ahead loses nothing but a guess."""
    if sequence.ahead:
        sequence.stalled = True
        return None
    return failed(sequence.request, sequence.visit, exc)


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


def _explained(
    sequences: Sequence[ModelSequence], tokens: Tensor, result: StepResult
) -> dict[ModelSequence, Sequence[Measure]]:
    """What policies look at, of requests that ask for it; before `_route`, which may change what they remember."""
    groups: dict[Policy, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if sequence.explain and not sequence.at_limit:
            groups.setdefault(sequence.policy, []).append(i)
    found: dict[ModelSequence, Sequence[Measure]] = {}
    for policy, index in groups.items():
        try:
            told = calls.explain(policy, _batch(index, sequences, tokens, result))
        except RouterError:
            log.exception("a decision cannot be explained")
            continue
        found.update(zip([sequences[i] for i in index], told, strict=True))
    return found


def _decision(sequence: ModelSequence, token: int, target: str, kept: bool, measures: Sequence[Measure]) -> Decision:
    """Why; called before the token is committed."""
    why = "visit limit" if sequence.at_limit else "policy"
    return Decision(sequence.position, token, sequence.model, target, kept, why, tuple(measures))


def _batch(index: list[int], sequences: Sequence[ModelSequence], tokens: Tensor, result: StepResult) -> RouteBatch:
    whole = len(index) == len(sequences)
    return RouteBatch(
        model=sequences[0].model,
        rows=sequences if whole else [sequences[i] for i in index],
        tokens=tokens if whole else tokens[index],
        logits=result.logits if whole else result.logits[index],
        hidden=result.hidden if whole or result.hidden is None else result.hidden[index],
    )


def _row(
    sequence: ModelSequence,
    token: int,
    target: str | PolicyFailed,
    log_prob: float | None,
    measures: Sequence[Measure] = (),
) -> ReportRow | None:
    """One request's line of the report; commits the token unless the policy discards it."""
    if sequence.ahead:
        return _guess(sequence, token, target, log_prob, measures)
    handoff, kept = _KEEPS, None
    try:
        if isinstance(target, PolicyFailed):
            raise target
        if target == sequence.model:
            kept = calls.kept_state(sequence) if sequence.remembers else None
        else:
            handoff = calls.send(sequence, target)
    except PolicyFailed as exc:
        return failed(sequence.request, sequence.visit, exc)
    outcome = Outcome.STAY if target == sequence.model else Outcome.LEAVE
    tokens: list[int] = []
    decision = _decision(sequence, token, target, handoff.keep_token, measures) if sequence.explain else None
    if handoff.keep_token:
        sequence.commit(token)
        tokens.append(token)
        outcome = sequence.end() or outcome
    if handoff.state is not None:
        sequence.state = handoff.state
    leaves = outcome == Outcome.LEAVE
    # What a state says cannot be known before the other model has had it.
    comparable = leaves and not tokens and sequence.leader == sequence.model and not sequence.state
    if comparable and sequence.depth:
        sequence.guess(token, left=True)
    return ReportRow(
        sequence.request,
        sequence.visit,
        outcome,
        tokens,
        target if leaves else "",
        sequence.state if leaves else kept,
        [log_prob] if log_prob is not None and tokens else None,
        guesses=[Guess(token, True, log_prob)] if comparable else None,
        decisions=None if decision is None else [decision],
    )


def _guess(
    sequence: ModelSequence,
    token: int,
    target: str | PolicyFailed,
    log_prob: float | None,
    measures: Sequence[Measure],
) -> ReportRow | None:
    """The line of a request that is ahead. Where its policy fails or carries more than a token along, it waits.

    If the position turns out to be this model's to write, it is decided once more, and fails then as it has to.
    """
    left = target != sequence.model
    try:
        if isinstance(target, PolicyFailed):
            raise target
        handoff = calls.send(sequence, target) if left else Handoff(keep_token=False)
    except PolicyFailed:
        handoff = _KEEPS
    if handoff.keep_token or handoff.state:
        sequence.stalled = True
        return None
    decision = None
    if sequence.explain and not isinstance(target, PolicyFailed):
        decision = _decision(sequence, token, target, not left, measures)
    sequence.guess(token, left)
    guesses = [Guess(token, left, log_prob, decision)]
    return ReportRow(sequence.request, sequence.visit, Outcome.AHEAD, [], guesses=guesses)
