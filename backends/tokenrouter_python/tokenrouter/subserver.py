"""The subserver of one model: scheduler, engine and local router in one decoding loop, without I/O or clock.

The shell feeds messages with `handle`, asks `poll` what to do at a time, executes the plan with `run_step`, and sends
what `outbox` holds. One engine step serves every ready request, extends and decodes mixed; the policy is asked once for
the whole batch; everything that the step has to tell goes out as one `Report` per orchestrator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from tokenrouter import sampling
from tokenrouter.batcher import Batch, DelayedBatcher, QueuePolicy, WaitUntil
from tokenrouter.engines.base import Engine, EngineRow, StepResult
from tokenrouter.errors import ConfigError, PolicyFailed, ProtocolError, RouterError
from tokenrouter.messages import (
    PROTOCOL_VERSION,
    Close,
    Codec,
    Hello,
    InFlight,
    ModelInfo,
    Open,
    Outcome,
    PolicySpec,
    Report,
    ReportRow,
    Resume,
    ToOrchestrator,
    ToSubserver,
)
from tokenrouter.policies import PolicyCache
from tokenrouter.policies.base import Handoff, Policy, PolicyContext, RouteBatch, Visit, destination_names
from tokenrouter.sequence import ModelSequence
from tokenrouter.statistics import SubserverStatistics

if TYPE_CHECKING:
    from torch import Tensor

Key: TypeAlias = tuple[int, int]
"""(peer, request): orchestrators number their requests independently."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step: which requests take part with how many new tokens, in the order of the batch."""

    batch: Batch[Key]
    rows: tuple[tuple[Key, int], ...]


@dataclass(slots=True)
class _Peer:
    """A connected orchestrator."""

    name: str
    models: tuple[str, ...]
    in_flight: int = 0
    requests: set[int] = field(default_factory=set)


class Subserver:
    """State machine of one model's decoding loop.

    Args:
        name: the model's name in the deployment.
        engine: a stepped engine.
        queue_policy: thresholds of delayed batching.
        shares: KV quota in blocks by the share that an orchestrator's `Hello` names. Together at most the pool.
        context: builds the policy context for a peer's list of models.
        clock_ns: CLOCK_MONOTONIC in ns; only used to time steps for the statistics.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        queue_policy: QueuePolicy,
        shares: dict[str, int],
        context: Callable[[tuple[str, ...]], PolicyContext],
        clock_ns: Callable[[], int],
    ) -> None:
        info = engine.info
        if info.max_num_tokens <= info.max_batch:
            raise ConfigError(
                f"model {name!r}: max_num_tokens ({info.max_num_tokens}) must exceed max_batch_size "
                f"({info.max_batch}), or a full batch of decodes would leave no room for any prefill"
            )
        if sum(shares.values()) > info.kv_blocks:
            raise ConfigError(f"model {name!r}: shares {shares} exceed the pool of {info.kv_blocks} KV blocks")
        self.name = name
        self.engine = engine
        self.statistics = SubserverStatistics()
        self.outbox: list[tuple[int, ToOrchestrator]] = []
        self._batcher: DelayedBatcher[Key] = DelayedBatcher(queue_policy, max_batch=info.max_batch)
        self._shares = shares
        self._context = context
        self._clock_ns = clock_ns
        self._policies: dict[tuple[str, ...], PolicyCache] = {}
        self._peers: dict[int, _Peer] = {}
        self._sequences: dict[Key, ModelSequence] = {}
        self._idle_since_ns = 0

    # --- messages -----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests in flight at all orchestrators."""
        return sum(peer.in_flight for peer in self._peers.values())

    @property
    def open_sequences(self) -> int:
        """Requests that hold KV here."""
        return len(self._sequences)

    @property
    def residents(self) -> int:
        """Requests that decode here now."""
        return sum(sequence.resident for sequence in list(self._sequences.values()))

    def handle(self, peer: int, message: ToSubserver, *, now_ns: int) -> None:
        """One message from an orchestrator.

        Raises:
            ProtocolError: the peer broke the protocol; close its connection.
        """
        if isinstance(message, Hello):
            self._greet(peer, message)
            return
        if not isinstance(message, Open | Resume | Close | InFlight):
            raise ProtocolError(f"{type(message).__name__} is not for a subserver")
        if peer not in self._peers:
            raise ProtocolError(f"{type(message).__name__} before Hello")
        self._peers[peer].in_flight = message.in_flight
        if isinstance(message, Open):
            self._open(peer, message, now_ns)
        elif isinstance(message, Resume):
            self._resume(peer, message, now_ns)
        elif isinstance(message, Close):
            self._drop((peer, message.request))

    def disconnected(self, peer: int) -> None:
        """An orchestrator is gone: its requests are dropped and their KV is freed."""
        gone = self._peers.pop(peer, None)
        if gone is not None:
            for request in list(gone.requests):
                self._drop((peer, request), gone)

    def _greet(self, peer: int, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(f"{hello.peer} speaks version {hello.version} of the protocol, not {PROTOCOL_VERSION}")
        if peer in self._peers:
            raise ProtocolError(f"{hello.peer} sent Hello twice")
        if hello.share not in self._shares:
            raise ProtocolError(f"{hello.peer} asks for the unknown KV share {hello.share!r}")
        if self.name not in hello.models:
            raise ProtocolError(f"{hello.peer} does not list this model, {self.name}, among {hello.models}")
        self._peers[peer] = _Peer(hello.peer, hello.models)
        self._prepare(hello)
        info = self.engine.info
        self.outbox.append(
            (
                peer,
                ModelInfo(
                    version=PROTOCOL_VERSION,
                    model=self.name,
                    engine=info.name,
                    emulated=info.emulated,
                    vocab_size=info.vocab_size,
                    max_context=info.max_context,
                    block_tokens=info.block_tokens,
                    kv_blocks=self._shares[hello.share],
                ),
            )
        )

    def _prepare(self, hello: Hello) -> None:
        """Loads what the deployment's policy needs here, so that the first request does not wait for it."""
        try:
            self.policy(hello.policy, hello.models).prepare(self.name)
        except Exception:
            # Its requests will be told; others are not concerned.
            log.exception("policy %s of %s cannot run at %s", hello.policy.name, hello.peer, self.name)

    def _open(self, peer: int, message: Open, now_ns: int) -> None:
        key = (peer, message.request)
        self._drop(key)
        try:
            policy = self.policy(message.policy, self._peers[peer].models)
            banned = self._mask(policy)
            handle = self.engine.open(kv_tokens=message.kv_tokens, prompt_tokens=message.prompt_tokens)
        except Exception as exc:
            self._reply(peer, _failed(message.request, message.visit, exc), now_ns)
            return
        self._sequences[key] = sequence = ModelSequence(
            model=self.name,
            tokens=message.tokens,
            prompt_tokens=message.prompt_tokens,
            sampling=message.sampling,
            policy=policy,
            handle=handle,
        )
        sequence.banned = banned
        self._peers[peer].requests.add(message.request)
        self._arrive(key, sequence, message, now_ns)

    def _resume(self, peer: int, message: Resume, now_ns: int) -> None:
        key = (peer, message.request)
        sequence = self._sequences.get(key)
        if sequence is None or message.start > len(sequence.tokens):
            self._drop(key)
            self._reply(peer, ReportRow(message.request, message.visit, Outcome.LOST, []), now_ns)
            return
        self._batcher.discard(key)
        sequence.splice(message.start, message.tokens)
        self.engine.truncate(sequence.handle, sequence.kv_length)
        self._arrive(key, sequence, message, now_ns)

    def _arrive(self, key: Key, sequence: ModelSequence, message: Open | Resume, now_ns: int) -> None:
        sequence.arrive(visit=message.visit, source=message.source, state=message.state)
        try:
            sequence.plan = self._receive(sequence)
        except RouterError as exc:
            self._reply(key[0], _failed(message.request, message.visit, exc), now_ns)
            self._drop(key)
            return
        self._batcher.add(key, now_ns=now_ns)
        self.statistics.arrived(now_ns=now_ns, left_ns=message.left_ns, idle_since_ns=self._idle_since_ns)

    def _mask(self, policy: Policy) -> Sequence[int]:
        with _policy_errors(policy, "mask"):
            width = self.engine.info.vocab_size
            banned = policy.mask(self.name, width)
            if len(banned) and not 0 <= min(banned) <= max(banned) < width:
                raise PolicyFailed(f"mask returned ids from {min(banned)} to {max(banned)}; they lie in [0, {width})")
            return banned

    def _receive(self, sequence: ModelSequence) -> Visit:
        with _policy_errors(sequence.policy, "receive"):
            plan = sequence.policy.receive(sequence)
            if plan.limit is not None and (plan.limit < 1 or plan.then not in sequence.policy.models):
                raise PolicyFailed(f"receive returned {plan}; a limit is at least 1 and names a model to go on with")
            return plan

    def _reply(self, peer: int, row: ReportRow, now_ns: int) -> None:
        self.outbox.append((peer, Report(now_ns, [row])))

    def _drop(self, key: Key, peer: _Peer | None = None) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._batcher.discard(key)
            self.engine.close(sequence.handle)
            (peer or self._peers[key[0]]).requests.discard(key[1])

    def policy(self, spec: PolicySpec, models: tuple[str, ...]) -> Policy:
        """The policy instance for a specification, in a deployment of these models."""
        if models not in self._policies:
            self._policies[models] = PolicyCache(self._context(models))
        return self._policies[models].get(spec)

    # --- steps --------------------------------------------------------------------------------------------------

    def poll(self, *, now_ns: int) -> StepPlan | WaitUntil | None:
        """What to do now: a step to run, a time to look again, or None until a message arrives. Changes nothing."""
        decision = self._batcher.poll(in_flight=self.in_flight, now_ns=now_ns)
        if not isinstance(decision, Batch):
            return decision
        return StepPlan(decision, tuple(self._share_out(decision.keys)))

    def _share_out(self, keys: Sequence[Key]) -> Iterator[tuple[Key, int]]:
        """New tokens per request under the token budget: decodes first, then extends in the order of arrival."""
        budget = self.engine.info.max_num_tokens
        unseen = {key: self._sequences[key].unseen for key in keys}
        for key in sorted(keys, key=lambda key: unseen[key] > 1):
            share = min(unseen[key], budget)
            if share == 0:
                return
            budget -= share
            yield key, share

    def run_step(self, plan: StepPlan) -> None:
        """Executes a plan: forward pass, sampling, routing, reports into the outbox.

        A failing policy fails only its own requests, a failing engine the requests of this step.
        """
        started_ns = self._clock_ns()
        keys = tuple(key for key, _ in plan.rows)
        self.statistics.step_started(plan.batch.reason, [started_ns - self._batcher.ready_since(key) for key in keys])
        self._batcher.take(Batch(keys, plan.batch.reason))
        sequences = [self._sequences[key] for key in keys]
        shares = [share for _, share in plan.rows]
        emitting = [
            key for key, sequence, share in zip(keys, sequences, shares, strict=True) if share == sequence.unseen
        ]
        try:
            result = self.engine.step([_engine_row(s, share) for s, share in zip(sequences, shares, strict=True)])
            for sequence, share in zip(sequences, shares, strict=True):
                sequence.kv_length += share
            rows = self._decide(emitting, result)
        except Exception as exc:
            log.exception("step of %s failed", self.name)
            rows = {key: _failed(key[1], self._sequences[key].visit, exc) for key in keys}
        now_ns = self._idle_since_ns = self._clock_ns()
        self.statistics.step_finished(len(keys), sum(shares), sum(s - 1 for s in shares), now_ns - started_ns)
        self._settle(keys, rows, now_ns)

    def _settle(self, keys: Sequence[Key], rows: dict[Key, ReportRow], now_ns: int) -> None:
        """Residents and unfinished prefills are ready again; everything else leaves, ends, or is dropped."""
        reports: dict[int, list[ReportRow]] = {}
        for key in keys:
            row = rows.get(key)
            if row is not None:
                reports.setdefault(key[0], []).append(row)
            if row is None or row.outcome == Outcome.STAY:
                self._batcher.add(key, now_ns=now_ns)
            elif row.outcome == Outcome.LEAVE:
                self._sequences[key].resident = False
            else:
                self._drop(key)
            self.statistics.settled(row)
        self.outbox.extend((peer, Report(now_ns, peer_rows)) for peer, peer_rows in reports.items())

    def _decide(self, keys: Sequence[Key], result: StepResult) -> dict[Key, ReportRow]:
        """What becomes of every request that got logits."""
        if not keys:
            return {}
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
        targets: list[str | PolicyFailed] = [self.name] * len(sequences)
        groups: dict[Policy, list[int]] = {}
        for i, sequence in enumerate(sequences):
            limit = sequence.plan.limit
            if limit is not None and sequence.visit_tokens + 1 >= limit:
                targets[i] = sequence.plan.then
            else:
                groups.setdefault(sequence.policy, []).append(i)
        for policy, index in groups.items():
            try:
                answer = self._ask(policy, index, sequences, tokens, result)
            except RouterError as exc:
                answer = [PolicyFailed(str(exc))] * len(index)
            for i, target in zip(index, answer, strict=True):
                targets[i] = target
        return targets

    def _ask(
        self,
        policy: Policy,
        index: list[int],
        sequences: Sequence[ModelSequence],
        tokens: Tensor,
        result: StepResult,
    ) -> list[str | PolicyFailed]:
        whole = len(index) == len(sequences)
        batch = RouteBatch(
            model=self.name,
            rows=sequences if whole else [sequences[i] for i in index],
            tokens=tokens if whole else tokens[index],
            logits=result.logits if whole else result.logits[index],
            hidden=result.hidden if whole or result.hidden is None else result.hidden[index],
        )
        with _policy_errors(policy, "route"):
            return list(destination_names(policy.route(batch), batch, policy.models))

    def _row(
        self, request: int, sequence: ModelSequence, token: int, target: str | PolicyFailed, log_prob: float | None
    ) -> ReportRow:
        """One request's line of the report; commits the token unless the policy discards it."""
        if isinstance(target, PolicyFailed):
            return _failed(request, sequence.visit, target)
        limited = sequence.plan.limit is not None and sequence.visit_tokens + 1 >= sequence.plan.limit
        handoff = Handoff(keep_token=True)
        if target != self.name:
            try:
                handoff = self._send(sequence, target, handoff if limited else None)
            except PolicyFailed as exc:
                return _failed(request, sequence.visit, exc)
        outcome = Outcome.STAY if target == self.name else Outcome.LEAVE
        tokens: list[int] = []
        if handoff.keep_token:
            sequence.commit(token)
            tokens.append(token)
            outcome = _ended(sequence, token) or outcome
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

    def _send(self, sequence: ModelSequence, target: str, handoff: Handoff | None) -> Handoff:
        """What travels: `handoff` or what the policy says, with the state as the other side will see it."""
        with _policy_errors(sequence.policy, "send"):
            handoff = handoff or sequence.policy.send(sequence, target)
            state = sequence.state if handoff.state is None else handoff.state
            # Here, because a state that cannot travel is this policy's failure and must not end the loop. The copy also
            # keeps the two sides apart where no wire does.
            return Handoff(bool(handoff.keep_token), Codec.copy_state(state))


class _policy_errors:
    """Turns whatever a policy raises into `PolicyFailed` that names the policy and the method."""

    def __init__(self, policy: Policy, method: str) -> None:
        self._where = f"policy {policy.name or type(policy).__name__!r}, {method}"

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        if isinstance(exc, Exception):
            raise PolicyFailed(f"{self._where}: {type(exc).__name__}: {exc}") from exc


def _engine_row(sequence: ModelSequence, share: int) -> EngineRow:
    start = sequence.kv_length
    return EngineRow(sequence.handle, sequence.tokens[start : start + share], emit=share == sequence.unseen)


def _ended(sequence: ModelSequence, token: int) -> Outcome | None:
    if token in sequence.sampling.end_ids:
        return Outcome.STOP
    if sequence.position >= sequence.sampling.max_tokens:
        return Outcome.LENGTH
    return None


def _failed(request: int, visit: int, exc: Exception) -> ReportRow:
    slug = exc.slug if isinstance(exc, RouterError) else "engine_failed"
    text = str(exc) if isinstance(exc, RouterError) else f"{type(exc).__name__}: {exc}"
    return ReportRow(request, visit, Outcome.FAILED, [], error=(slug, text))
