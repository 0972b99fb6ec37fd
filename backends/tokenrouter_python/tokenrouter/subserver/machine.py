"""The subserver of one model: messages, visits and reports, without I/O or clock.

The shell feeds messages with `handle`, asks `poll` what to do at a time, executes the plan with `run_step`, and sends
what `outbox` holds. Everything that a plan has to tell goes out as one `Report` per orchestrator.

A request holds KV here from its `Open` until it is gone:

| event                        | from     | to                                                                       |
| ---------------------------- | -------- | ------------------------------------------------------------------------ |
| `Open`                       | any      | waiting, with KV of its own                                              |
| `Resume`                     | not gone | waiting; gone with a row LOST if tokens before its first one are missing |
| `Resume`                     | gone     | gone, with a row LOST                                                    |
| either is refused            | any      | gone, with a row FAILED: by the policy, or by the engine                 |
| a plan that takes it is run  | waiting  | running                                                                  |
| row STAY                     | running  | waiting; still running in an engine that owns its loop                   |
| row LEAVE                    | running  | away; ahead if it may guess                                              |
| row STOP, LENGTH or FAILED   | running  | gone                                                                     |
| row AHEAD                    | ahead    | ahead                                                                    |
| `Settled`, guesses CHECKED   | ahead    | ahead                                                                    |
| `Settled`, CONFIRMED         | ahead    | waiting; ahead if it has left once more                                  |
| `Settled`, ROLLED_BACK       | ahead    | away                                                                     |
| `Guesses`                    | away     | waiting, if the leader left in them; else away                           |
| `Close`, or the peer is lost | any      | gone                                                                     |

An `Open` whose policy is not loaded yet awaits that first, and holds nothing.

Waiting, running and ahead (*resident*) it is its runner's; away nothing happens to it but that its KV is kept. Ahead it
takes part in steps as long as it may guess.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from tokenrouter.batcher import Batching, WaitUntil
from tokenrouter.engines.base import KvEngine
from tokenrouter.errors import ConfigError, ProtocolError, RouterError, contained
from tokenrouter.messages import (
    Close,
    Fate,
    Guesses,
    Hello,
    InFlight,
    Open,
    Outcome,
    PolicySpec,
    Report,
    ReportRow,
    Resume,
    Settled,
    ToOrchestrator,
    ToSubserver,
)
from tokenrouter.policies import PolicyCache, calls
from tokenrouter.policies.base import Policy, PolicyContext
from tokenrouter.policies.cache import MAX_BYTES, Loading, attempt
from tokenrouter.subserver.peers import Peer, Reception
from tokenrouter.subserver.runner import Plan, Runner, failed
from tokenrouter.subserver.sequence import ModelSequence
from tokenrouter.timeline.steps import StepLog

log = logging.getLogger(__name__)

AboutOne: TypeAlias = Open | Resume | Guesses | Settled
Loaded: TypeAlias = Callable[["Policy | Exception", int], None]
Loader: TypeAlias = Callable[[Loading, Loaded], None]
"""Attempts a loading, in any thread, then tells what came of it, and when, in the machine's own thread."""


class Subserver:
    """State machine of one model's decoding loop.

    Args:
        name: of the replica: what it is called on the token channel.
        runner: with the model's engine.
        shares: KV quota in blocks by the share that an orchestrator's `Hello` names, of each that names it. Together at
            most the pool.
        context: builds the policy context for a peer's list of models.
        policy_cache_bytes: most that loaded policies of one such list hold.
        model: the model that it is a replica of, as policies know it; by default it has the same name.
        orchestrators: most of one entry model that may be connected, each with its share; 0 = no limit.
    """

    def __init__(
        self,
        name: str,
        runner: Runner[KvEngine],
        *,
        shares: dict[str, int],
        context: Callable[[tuple[str, ...]], PolicyContext],
        policy_cache_bytes: int = MAX_BYTES,
        model: str = "",
        orchestrators: int = 0,
    ) -> None:
        info = runner.engine.info
        if info.max_num_tokens <= info.max_batch:
            raise ConfigError(
                f"model {name!r}: max_num_tokens ({info.max_num_tokens}) must exceed max_batch_size "
                f"({info.max_batch}), or a full batch of decodes would leave no room for any prefill"
            )
        if sum(shares.values()) > info.kv_blocks:
            raise ConfigError(f"model {name!r}: shares {shares} exceed the pool of {info.kv_blocks} KV blocks")
        self.name = name
        self.model = model or name
        self.engine = runner.engine
        self.statistics = runner.statistics
        self.pulse = runner.pulse
        self.outbox: list[tuple[int, ToOrchestrator]] = []
        self._runner = runner
        self._reception = Reception(name, self.model, shares=shares, orchestrators=orchestrators)
        self._context = context
        self._policy_cache_bytes = policy_cache_bytes
        self._policies: dict[tuple[str, ...], PolicyCache] = {}
        self._loader: Loader | None = None
        self._awaiting: dict[tuple[tuple[str, ...], PolicySpec], list[tuple[int, Open]]] = {}
        self._peers: dict[int, Peer] = {}

    # --- messages -----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests in flight at all orchestrators."""
        return sum([peer.in_flight for peer in self._all_peers()])

    @property
    def open_sequences(self) -> int:
        """Requests that hold KV here."""
        return len(self.held())

    def held(self) -> set[tuple[int, int]]:
        """The requests that hold KV here, as peer and request; callable from any thread."""
        return {(number, request) for number, peer in list(self._peers.items()) for request in list(peer.sequences)}

    @property
    def residents(self) -> int:
        """Requests that decode here now."""
        return sum(each.resident for peer in self._all_peers() for each in list(peer.sequences.values()))

    @property
    def batching(self) -> Batching:
        """How the model batches."""
        return self._runner.batching

    @property
    def threshold(self) -> int:
        """The threshold now in force, B of `in_flight`."""
        return self._runner.threshold(self.in_flight)

    def _all_peers(self) -> list[Peer]:
        """A copy, because the thread that publishes metrics asks while peers come and go."""
        return list(self._peers.values())

    def handle(self, peer: int, message: ToSubserver, *, now_ns: int) -> None:
        """One message from an orchestrator.

        Raises:
            ProtocolError: the peer broke the protocol; close its connection.
        """
        if isinstance(message, Hello):
            self._greet(peer, message, now_ns)
            return
        if peer not in self._peers:
            raise ProtocolError(f"{type(message).__name__} before Hello")
        self._peers[peer].in_flight = message.in_flight
        if isinstance(message, Close):
            self._drop(peer, message.request)
        elif not isinstance(message, InFlight):
            try:
                self._take(peer, message, now_ns)
            except BaseException as exc:
                self._fail(peer, message, exc, now_ns)

    def _take(self, peer: int, message: AboutOne, now_ns: int) -> None:
        """A message about a request."""
        if isinstance(message, Open):
            self._open(peer, message, now_ns)
        elif isinstance(message, Resume):
            self._resume(peer, message, now_ns)
        elif isinstance(message, Guesses):
            self._guessed(peer, message, now_ns)
        else:
            self._settled(peer, message, now_ns)

    def _fail(self, peer: int, message: AboutOne, exc: BaseException, now_ns: int) -> None:
        """Whatever a message raised is told to the request that it is about, and to no other."""
        error = contained(exc)
        if not isinstance(error, RouterError):
            log.error("request %d of peer %d broke", message.request, peer, exc_info=error)
        self._reply(peer, failed(message.request, message.visit, error), now_ns)
        self._drop(peer, message.request)

    def disconnected(self, peer: int) -> None:
        """An orchestrator is gone: its requests are dropped and their KV is freed."""
        gone = self._peers.pop(peer, None)
        for waiting in self._awaiting.values():
            waiting[:] = [(other, message) for other, message in waiting if other != peer]
        if gone is not None:
            for sequence in gone.sequences.values():
                self._runner.release(sequence)

    def _greet(self, peer: int, hello: Hello, now_ns: int) -> None:
        self._peers[peer] = self._reception.admit(peer, hello, self._peers)
        self._prepare(hello, now_ns)
        greeting = self._reception.greeting(hello, self.engine.info, speculates=self._runner.speculates)
        self.outbox.append((peer, greeting))

    def _prepare(self, hello: Hello, now_ns: int) -> None:
        """Loads what the deployment's policy needs here, so that the first request does not wait for it."""
        cache = self._cache(hello.models)

        def loaded(outcome: Policy | Exception, _: int) -> None:
            if isinstance(outcome, Exception):
                # Its requests will be told; others are not concerned.
                policy, peer = hello.policy.name, hello.peer
                log.error("policy %s of %s cannot run at %s", policy, peer, self.name, exc_info=outcome)

        self._load(lambda: cache.pin(hello.policy), loaded, now_ns)

    def _load(self, loading: Loading, loaded: Loaded, now_ns: int) -> None:
        if self._loader is None:
            loaded(attempt(loading), now_ns)
        else:
            self._loader(loading, loaded)

    def _open(self, peer: int, message: Open, now_ns: int) -> None:
        self._drop(peer, message.request)
        key = (self._peers[peer].models, message.policy)
        cache = self._cache(key[0])
        if (policy := cache.found(message.policy)) is not None:
            self._enter(peer, message, policy, now_ns)
        elif key in self._awaiting:
            self._awaiting[key].append((peer, message))
        else:
            self._awaiting[key] = [(peer, message)]
            self._load(lambda: cache.get(message.policy), partial(self._loaded, key), now_ns)

    def _loaded(self, key: tuple[tuple[str, ...], PolicySpec], outcome: Policy | Exception, now_ns: int) -> None:
        """A policy is there, or cannot be loaded: the requests that waited for it go on, in their order."""
        for peer, message in self._awaiting.pop(key):
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                self._enter(peer, message, outcome, now_ns)
            except BaseException as exc:
                self._fail(peer, message, exc, now_ns)

    def _enter(self, peer: int, message: Open, policy: Policy, now_ns: int) -> None:
        sequence = self._admit(peer, message, policy)
        self._peers[peer].sequences[message.request] = sequence
        self._arrive(sequence, message, now_ns)

    def _admit(self, peer: int, message: Open, policy: Policy) -> ModelSequence:
        """The request with its KV."""
        known = _known(message)
        self._runner.check_tokens(known, len(known), message.kv_tokens)
        sequence = ModelSequence(
            peer=peer,
            request=message.request,
            model=self.model,
            tokens=message.tokens,
            prompt_tokens=message.prompt_tokens,
            sampling=message.sampling,
            policy=policy,
            spec=message.policy,
            lease=message.kv_tokens,
        )
        sequence.remembers = calls.remembers(policy, self.model)
        pair = len(policy.models) == 2 and policy.speculates() and not sequence.remembers
        sequence.leader = policy.models[0] if pair and self._runner.speculates else ""
        sequence.explain = message.explain
        sequence.banned = calls.mask(policy, self.model, self.engine.info.vocab_size)
        self._runner.admit(sequence, kv_tokens=message.kv_tokens)
        return sequence

    def _resume(self, peer: int, message: Resume, now_ns: int) -> None:
        sequence = self._peers[peer].sequences.get(message.request)
        if sequence is None or message.start > len(sequence.tokens):
            self._drop(peer, message.request)
            self._reply(peer, ReportRow(message.request, message.visit, Outcome.LOST, []), now_ns)
            return
        known = _known(message)
        self._runner.check_tokens(known, message.start + len(known), sequence.lease)
        self._runner.leave(sequence)
        sequence.splice(message.start, message.tokens)
        self._arrive(sequence, message, now_ns)

    def _arrive(self, sequence: ModelSequence, message: Open | Resume, now_ns: int) -> None:
        sequence.arrive(visit=message.visit, source=message.source, state=message.state)
        calls.enter(sequence, source=message.source)
        # A visit of limited length would end elsewhere than its guesses say.
        sequence.depth = message.depth if sequence.visit_limit is None else 0
        sequence.guesses.extend(message.guesses)
        sequence.following = bool(message.guesses)
        self._runner.arrive(sequence, now_ns=now_ns)
        idle_since_ns = self._runner.idle_since_ns
        self.statistics.arrived(now_ns=now_ns, left_ns=message.left_ns, idle_since_ns=idle_since_ns)

    def _guessed(self, peer: int, message: Guesses, now_ns: int) -> None:
        """Further guesses. If the large model handed back, and they show where the small one left, it goes on here."""
        for waiting, opened in [each for queue in self._awaiting.values() for each in queue]:
            if (waiting, opened.request, opened.visit) == (peer, message.request, message.visit):
                opened.guesses.extend(message.guesses)
        sequence = self._peers[peer].sequences.get(message.request)
        if sequence is None or sequence.visit != message.visit or not sequence.following:
            return
        sequence.follow(message.start, message.guesses)
        guesses = [guess.token for guess in sequence.guesses]
        self._runner.check_tokens(guesses, len(sequence.tokens) + len(guesses), sequence.lease)
        if sequence.resident or sequence.take_leaders() or not sequence.guesses:
            return
        sequence.reuse()
        sequence.resident = True
        calls.enter(sequence, source=sequence.leader)
        self._runner.arrive(sequence, now_ns=now_ns)
        self.statistics.entered(1)

    def _settled(self, peer: int, message: Settled, now_ns: int) -> None:
        sequence = self._peers[peer].sequences.get(message.request)
        if sequence is None or sequence.visit != message.visit or not sequence.ahead:
            if message.fate == Fate.CONFIRMED:
                self._reply(peer, ReportRow(message.request, message.visit, Outcome.LOST, []), now_ns)
            return
        own = sequence.settle(message.length, message.fate)
        back = message.fate == Fate.CONFIRMED
        left = message.left + (back and sequence.ahead)
        self.statistics.confirmed(message.wrote + own, left, message.left + back, sequence.policy.other(self.model))
        sequence.resident = message.fate != Fate.ROLLED_BACK
        self._runner.settled(sequence, now_ns=now_ns)

    def _reply(self, peer: int, row: ReportRow, now_ns: int) -> None:
        self.outbox.append((peer, Report(now_ns, [row])))

    def _drop(self, peer: int, request: int) -> None:
        for waiting in self._awaiting.values():
            waiting[:] = [each for each in waiting if (each[0], each[1].request) != (peer, request)]
        sequence = self._peers[peer].sequences.pop(request, None)
        if sequence is not None:
            self._runner.release(sequence)

    def _cache(self, models: tuple[str, ...]) -> PolicyCache:
        """The policies of a deployment of these models."""
        if models not in self._policies:
            self._policies[models] = PolicyCache(
                self._context(models), most_bytes=self._policy_cache_bytes, prepared_for=self.model
            )
        return self._policies[models]

    def overlap(self, meanwhile: Callable[[], None]) -> bool:
        """Whether `run_step` will call `meanwhile` while the engine computes; one that owns its loop does so anyway."""
        return self._runner.overlap(meanwhile)

    def load_with(self, loader: Loader) -> None:
        """Policies are loaded by `loader` from now on, elsewhere if it likes. By default they are at once."""
        self._loader = loader

    def listen(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when `poll` may have something although no message came."""
        self._runner.listen(wake)

    def record(self, most: int | None) -> None:
        """Keeps every step from now on, in so many entries; None = all. Callable from any thread."""
        self._runner.step_log = StepLog(most)

    def recorded(self) -> tuple[StepLog, dict[int, str]]:
        """No longer: the steps, and the names of the orchestrators by number."""
        step_log, self._runner.step_log = self._runner.step_log, None
        return step_log or StepLog(0), {number: peer.name for number, peer in list(self._peers.items())}

    # --- plans --------------------------------------------------------------------------------------------------

    def poll(self, *, now_ns: int) -> Plan | WaitUntil | None:
        """What to do now: a plan to run, a time to look again, or None until something arrives. Changes nothing."""
        return self._runner.poll(in_flight=self.in_flight, now_ns=now_ns)

    def run_step(self, plan: Plan) -> None:
        """Executes a plan and puts what it has to tell into the outbox."""
        rows, now_ns = plan.run()
        reports: dict[int, list[ReportRow]] = {}
        for sequence, row in rows:
            reports.setdefault(sequence.peer, []).append(row)
            if row.outcome == Outcome.LEAVE:
                sequence.resident = sequence.ahead
            elif row.outcome not in (Outcome.STAY, Outcome.AHEAD):
                self._drop(sequence.peer, sequence.request)
            if row.returned is None:
                self.statistics.settled(row)
            else:
                self.statistics.decided(row, row.returned, sequence.leader)
        self.outbox.extend((peer, Report(now_ns, peer_rows)) for peer, peer_rows in reports.items())


def _known(message: Open | Resume) -> list[int]:
    """The tokens that a message brings, with those that are guessed."""
    return [*message.tokens, *[guess.token for guess in message.guesses]] if message.guesses else message.tokens
