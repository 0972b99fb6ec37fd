"""The subserver of one model: messages, visits and reports, without I/O or clock.

The shell feeds messages with `handle`, asks `poll` what to do at a time, executes the plan with `run_step`, and sends
what `outbox` holds. What runs the visits is a `runner.Runner`: one for engines that are stepped, one for engines that
own their loop. Everything that a plan has to tell goes out as one `Report` per orchestrator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenrouter.batcher import Batching, DelayedBatcher, WaitUntil
from tokenrouter.engines.base import Engine, LoopEngine
from tokenrouter.errors import ConfigError, ProtocolError, RouterError
from tokenrouter.messages import (
    PROTOCOL_VERSION,
    Close,
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
from tokenrouter.policies import PolicyCache, calls
from tokenrouter.policies.base import Policy, PolicyContext
from tokenrouter.statistics import SubserverStatistics
from tokenrouter.subserver.runner import Key, Plan, Runner, StepPlan, SubmitPlan, failed
from tokenrouter.subserver.sequence import ModelSequence
from tokenrouter.subserver.stepped import SteppingRunner
from tokenrouter.subserver.submitted import SubmittingRunner

__all__ = ["Key", "Plan", "StepPlan", "SubmitPlan", "Subserver"]

log = logging.getLogger(__name__)


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
        engine: a stepped engine, or one that owns its loop.
        batching: thresholds of delayed batching.
        shares: KV quota in blocks by the share that an orchestrator's `Hello` names. Together at most the pool.
        context: builds the policy context for a peer's list of models.
        clock_ns: CLOCK_MONOTONIC in ns; only used to time steps for the statistics.
    """

    def __init__(
        self,
        name: str,
        engine: Engine | LoopEngine,
        *,
        batching: Batching,
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
        self._batcher: DelayedBatcher[Key] = DelayedBatcher(batching, max_batch=info.max_batch)
        self._shares = shares
        self._context = context
        self._policies: dict[tuple[str, ...], PolicyCache] = {}
        self._peers: dict[int, _Peer] = {}
        self._sequences: dict[Key, ModelSequence] = {}
        runner: type[Any] = SteppingRunner if info.stepped else SubmittingRunner
        self._runner: Runner = runner(
            name, engine, self._batcher, self._sequences, statistics=self.statistics, clock_ns=clock_ns
        )

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
            sequence = self._sequence(message, self._peers[peer].models)
        except Exception as exc:
            self._reply(peer, failed(message.request, message.visit, exc), now_ns)
            return
        self._sequences[key] = sequence
        self._peers[peer].requests.add(message.request)
        self._arrive(key, sequence, message, now_ns)

    def _sequence(self, message: Open, models: tuple[str, ...]) -> ModelSequence:
        """The request with its KV."""
        policy = self.policy(message.policy, models)
        sequence = ModelSequence(
            model=self.name,
            tokens=message.tokens,
            prompt_tokens=message.prompt_tokens,
            sampling=message.sampling,
            policy=policy,
            handle=None,
            spec=message.policy,
        )
        sequence.banned = calls.mask(policy, self.name, self.engine.info.vocab_size)
        self._runner.admit(sequence)
        sequence.handle = self.engine.open(kv_tokens=message.kv_tokens, prompt_tokens=message.prompt_tokens)
        return sequence

    def _resume(self, peer: int, message: Resume, now_ns: int) -> None:
        key = (peer, message.request)
        sequence = self._sequences.get(key)
        if sequence is None or message.start > len(sequence.tokens):
            self._drop(key)
            self._reply(peer, ReportRow(message.request, message.visit, Outcome.LOST, []), now_ns)
            return
        self._runner.leave(key)
        sequence.splice(message.start, message.tokens)
        self._arrive(key, sequence, message, now_ns)

    def _arrive(self, key: Key, sequence: ModelSequence, message: Open | Resume, now_ns: int) -> None:
        sequence.arrive(visit=message.visit, source=message.source, state=message.state)
        try:
            sequence.plan = calls.receive(sequence)
        except RouterError as exc:
            self._reply(key[0], failed(message.request, message.visit, exc), now_ns)
            self._drop(key)
            return
        self._runner.arrive(key, sequence, now_ns=now_ns)
        idle_since_ns = self._runner.idle_since_ns
        self.statistics.arrived(now_ns=now_ns, left_ns=message.left_ns, idle_since_ns=idle_since_ns)

    def _reply(self, peer: int, row: ReportRow, now_ns: int) -> None:
        self.outbox.append((peer, Report(now_ns, [row])))

    def _drop(self, key: Key, peer: _Peer | None = None) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._runner.leave(key)
            self.engine.close(sequence.handle)
            (peer or self._peers[key[0]]).requests.discard(key[1])

    def policy(self, spec: PolicySpec, models: tuple[str, ...]) -> Policy:
        """The policy instance for a specification, in a deployment of these models."""
        if models not in self._policies:
            self._policies[models] = PolicyCache(self._context(models))
        return self._policies[models].get(spec)

    def listen(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when `poll` may have something although no message came."""
        self._runner.listen(wake)

    # --- plans --------------------------------------------------------------------------------------------------

    def poll(self, *, now_ns: int) -> Plan | WaitUntil | None:
        """What to do now: a plan to run, a time to look again, or None until something arrives. Changes nothing."""
        return self._runner.poll(in_flight=self.in_flight, now_ns=now_ns)

    def run_step(self, plan: Plan) -> None:
        """Executes a plan and puts what it has to tell into the outbox."""
        rows, now_ns = self._runner.run(plan)
        reports: dict[int, list[ReportRow]] = {}
        for key, row in rows:
            reports.setdefault(key[0], []).append(row)
            if row.outcome == Outcome.LEAVE:
                self._sequences[key].resident = False
            elif row.outcome != Outcome.STAY:
                self._drop(key)
            self.statistics.settled(row)
        self.outbox.extend((peer, Report(now_ns, peer_rows)) for peer, peer_rows in reports.items())
