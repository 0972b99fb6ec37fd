"""The orchestrator: admits requests, relays their hand-offs, owns what was written, and tells clients.

A state machine without I/O or clock. The shell calls `submit`, `cancel`, `receive`, `disconnected`, `stop_at` and
`tick` with the time; messages to subservers collect in `outbox`, and `take_updates` gives the news for clients. Send
the outbox first: hand-offs are urgent, and tokens become text only when updates are taken.

Who owns what, and so where to look: `lifecycle` what can happen to a request (a table), `admission` who waits and who
may run, `transcript` what was written, `generation` one request with its way through the models. Here they meet: what
comes in becomes events, events become messages and updates. What is done with one request is below: `visiting` brings
it to its models and ends it, `speculating` deals with its guesses.

One request, prompt [5, 6], under a policy that leaves the small model once:

=========================  =============================================  ==========================================
comes in                   event: state                                   goes out
=========================  =============================================  ==========================================
submit                     waiting; STARTED: visiting (KV reserved on     small: Open, tokens [5, 6]
                           both models)
small: STAY, tokens [9]    STAY: visiting                                 client: [9]
small: LEAVE to large, []  LEAVE: visiting                                large: Open, tokens [5, 6, 9]
large is gone              DISCONNECTED: stranded
large is back              CONNECTED: visiting                            large: Open, tokens [5, 6, 9]
large: LEAVE to small [8]  LEAVE: visiting                                client: [8]; small: Resume from 3, [8]
small: STOP, tokens [2]    STOP: over (KV free in the ledger)             client: [2] and the result; both: Close
=========================  =============================================  ==========================================

A hand-off carries only what the target has not seen; a model that lost a request (restart, eviction) is sent everything
again, and nothing is lost. Every visit has a number; what is said about an old one came too late and is dropped.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from tokenrouter.errors import RequestCancelled, RouterError, assert_never
from tokenrouter.messages import (
    Decision,
    InFlight,
    ModelInfo,
    Open,
    Outcome,
    PolicySpec,
    ReportRow,
    Resume,
    ToOrchestrator,
    ToSubserver,
)
from tokenrouter.orchestrator import errors
from tokenrouter.orchestrator.generation import Generation, Route, find_route
from tokenrouter.orchestrator.lifecycle import FINISH_REASONS, Event, State
from tokenrouter.orchestrator.settings import OrchestratorSettings
from tokenrouter.orchestrator.speculating import Speculating
from tokenrouter.orchestrator.transcript import Transcript
from tokenrouter.policies import PolicyCache
from tokenrouter.request import GenerationRequest
from tokenrouter.response import Update
from tokenrouter.timeline.trail import Trail


class Orchestrator(Speculating):
    """State machine of the entry model.

    Args:
        settings: see `OrchestratorSettings`.
        tokenizer: the deployment's tokenizer.
        policies: the policies of this process.
    """

    def __init__(self, settings: OrchestratorSettings, *, tokenizer: Tokenizer, policies: PolicyCache) -> None:
        super().__init__(settings)
        self._tokenizer = tokenizer
        self._policies = policies
        self._stop_ns: int | None = None
        self._next_key = 1

    # --- what the shell asks --------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Running requests."""
        return self._admission.running

    @property
    def queued(self) -> int:
        """Waiting requests."""
        return len(self._admission.queue)

    def reserved_blocks(self, replica: str) -> int:
        """KV blocks reserved on a replica for running requests."""
        return self._replicas.reserved_blocks(replica)

    def pinned(self, replica: str) -> int:
        """Running requests that are pinned to a replica."""
        return self._replicas.pinned(replica)

    def is_connected(self, replica: str) -> bool:
        """Whether a replica is connected."""
        return self._replicas.is_connected(replica)

    def keys(self) -> list[int]:
        """All requests that are not over."""
        return list(self._generations)

    def next_deadline_ns(self) -> int | None:
        """When `tick` has something to do, or None until something else happens."""
        return self._alarms.next_ns()

    def take_updates(self) -> list[Update]:
        """What clients have to be told since the last call, in order."""
        for generation in self._unwritten:
            try:
                generation.transcript.write()
            except BaseException as exc:
                self._break(generation, exc)
        self._unwritten.clear()
        updates, self._updates = self._updates, []
        return updates

    # --- what the shell tells -------------------------------------------------------------------------------------

    def route(self, request: GenerationRequest) -> Route:
        """How a request goes. Touches no state but the policies', so any thread may ask; may load a policy.

        Raises:
            RouterError: there is no such policy, it cannot be loaded, or it names no first model.
        """
        return find_route(request, self._policies.get(request.policy))

    def knows(self, policy: PolicySpec) -> bool:
        """Whether `route` need not load this policy; callable from any thread."""
        return self._policies.found(policy) is not None

    def check_length(self, prompt_tokens: int, *, at_least: bool = False) -> None:
        """See `Admission.check_length`; callable from any thread."""
        self._admission.check_length(prompt_tokens, at_least=at_least)

    def submit(
        self, request: GenerationRequest, *, now_ns: int, arrived_ns: int | None = None, route: Route | None = None
    ) -> int:
        """A request arrives; it starts at once if it can. Returns its key.

        Args:
            request: what is asked.
            now_ns: the time.
            arrived_ns: when it came, if that was earlier: that is its place in the queue.
            route: what `route` answered for it; asked here by default.

        Raises:
            RouterError: the request is refused; nothing was kept.
        """
        if self._stop_ns is not None and now_ns >= self._stop_ns:
            raise errors.stopping()
        self._now_ns = now_ns
        route = route or self.route(request)
        # One that comes while a turn works is taken in by that turn, whose clock was read before; no wait is negative.
        arrived_ns = now_ns if arrived_ns is None else min(arrived_ns, now_ns)
        transcript = Transcript(self._next_key, request, self._tokenizer)
        limit_ns = arrived_ns + self.settings.max_request_ns if self.settings.max_request_ns else None
        generation = Generation(
            self._next_key, request, route.policy, arrived_ns, transcript, route.first, limit_ns=limit_ns
        )
        generation.speculates = self.speculation.admits(request, route.policy)
        if request.explain:
            self.speculation.check_explained(request, route.policy)
            generation.decisions.append(Decision(0, -1, "", route.first, False, "entry", route.measures))
        if error := self._admission.misfit(generation):
            raise error
        give_up_ns = self._admission.queue.push(
            generation, now_ns=arrived_ns, deadline_ns=generation.deadline_ns, priority=request.priority
        )
        self._next_key += 1
        self._generations[generation.key] = generation
        self.statistics.accepted += 1
        self.trails.arrived(generation, now_ns)
        self._advance(now_ns)
        if generation.state is State.WAITING:
            self._alarms.add(give_up_ns, generation.key)
            if any(self._replicas.largest(model) is None for model in generation.models):
                self._alarms.add(arrived_ns + self.settings.connect_timeout_ns, generation.key)
        # Beside `give_up_ns`, because a request that was delayed or has started still has its own limit.
        self._alarms.add(generation.deadline_ns, generation.key)
        return generation.key

    def cancel(self, key: int, *, now_ns: int) -> None:
        """The client went away. Unknown keys (already over) are ignored."""
        self._now_ns = now_ns
        if generation := self._generations.get(key):
            error = RequestCancelled("the client cancelled the request or disconnected")
            self._fail(generation, Event.CANCELLED, error)
        self._advance(now_ns)

    def stop_at(self, at_ns: int, *, now_ns: int) -> None:
        """The server stops: what has not ended by then ends with an error, and later requests are refused.

        So no response that was cut short looks like a complete one. May be called again with another time.
        """
        self._stop_ns = at_ns
        self._alarms.add(at_ns)
        self.tick(now_ns=now_ns)

    def tick(self, *, now_ns: int) -> None:
        """Applies every deadline that has passed."""
        self._now_ns = now_ns
        self._alarms.pass_until(now_ns)
        if self._stop_ns is not None and now_ns >= self._stop_ns:
            for generation in list(self._generations.values()):
                self._fail(generation, Event.STOPPED, errors.stopping())
        for generation, expired in self._admission.queue.expired(now_ns=now_ns):
            self._fail(generation, Event.TIMED_OUT, expired)
        for generation in list(self._generations.values()):
            try:
                self._expire(generation, now_ns)
            except BaseException as exc:
                self._break(generation, exc)
        self._advance(now_ns)

    def _expire(self, generation: Generation, now_ns: int) -> None:
        """Ends a request whose time is over."""
        deadline_ns = generation.deadline_ns
        if generation.limit_ns is not None and now_ns >= generation.limit_ns:
            late = errors.too_late(generation, now_ns, self.settings.max_request_ns)
            self._fail(generation, Event.TIMED_OUT, late)
        elif deadline_ns is not None and now_ns >= deadline_ns:
            # What it has is a response, though cut short; one that still waited was refused before.
            self._finish(generation, Event.TIMED_OUT)
        elif error := self._admission.given_up(generation, now_ns=now_ns):
            self._fail(generation, Event.GAVE_UP, error)

    def receive(self, replica: str, message: ToOrchestrator, *, now_ns: int) -> None:
        """One message of a connected subserver.

        Raises:
            ProtocolError, ConfigError: the peer broke the protocol; close its connection.
        """
        self._now_ns = now_ns
        if isinstance(message, ModelInfo):
            self._greeted(replica, message)
        else:
            for row in message.rows:
                self._hear(replica, row, message.at_ns, now_ns)
        self._advance(now_ns)

    def _hear(self, replica: str, row: ReportRow, at_ns: int, now_ns: int) -> None:
        """One line of a report."""
        generation = self._generations.get(row.request)
        if generation is None:
            # Guesses of a response that is over are not unusual.
            self.statistics.stale_messages += row.outcome != Outcome.AHEAD
            return
        model = self._replicas.model_of(replica)
        if generation.pins.get(model) != replica:
            self.statistics.stale_messages += 1
            return
        follower = generation.follower
        if follower is None or not generation.speculates:
            self._heed(generation, model, row, at_ns, now_ns)
            return
        with self.trails.guesses(generation, follower, self.agreement(generation), row, now_ns):
            self._heed(generation, model, row, at_ns, now_ns)

    def _heed(self, generation: Generation, model: str, row: ReportRow, at_ns: int, now_ns: int) -> None:
        ahead = generation.ahead
        try:
            if ahead is not None and row.outcome == Outcome.AHEAD and ahead.leads(model, row.visit):
                self._guessed(generation, ahead, row)
            elif generation.expects(model, row.visit):
                self._apply(generation, row, at_ns, now_ns)
            elif row.outcome == Outcome.AHEAD:
                self.agreement(generation).rolled_back += len(row.guesses or ())
            else:
                self.statistics.stale_messages += 1
        except BaseException as exc:
            self._break(generation, exc)

    def disconnected(self, replica: str, *, now_ns: int) -> None:
        """A subserver is gone and with it all KV; those that are at it go on elsewhere, or wait, up to the limit."""
        if replica not in self._connected:
            # It broke the protocol before it said who it is. Nobody's patience begins anew.
            return
        self._replicas.disconnected(replica, now_ns=now_ns)
        del self._connected[replica]
        self._alarms.add(now_ns + self.settings.connect_timeout_ns)
        model = self._replicas.model_of(replica)
        lost = [generation for generation in self._generations.values() if generation.pins.get(model) == replica]
        for generation in lost:
            generation.visits.seen.pop(model, None)
            if generation.ahead is not None and generation.ahead.leader == model:
                generation.ahead.going = False
            if generation.state is State.VISITING and generation.visits.at == model:
                self._strand(generation, now_ns)
        self._resettle(now_ns)
        for generation in lost:
            # Before others take the room that those need who are at another model now.
            if generation.state is not State.OVER:
                self._has_place(generation, model)
        self._advance(now_ns)

    def unreachable(self, replica: str, why: str) -> None:
        """Why a replica is not connected, for requests that give up waiting for its model."""
        self._replicas.unreachable(replica, why)

    def undeliverable(self, message: ToSubserver, error: RouterError) -> None:
        """A message of `outbox` cannot travel: the request that it is about ends."""
        if isinstance(message, Open | Resume) and (generation := self._generations.get(message.request)):
            self._fail(generation, Event.BROKE, error)

    # --- who is followed ------------------------------------------------------------------------------------------

    def record(self, most: int | None, *, now_ns: int) -> None:
        """Keeps the trails of all requests from now on, in so many entries; None = all."""
        self.trails.start(self._generations.values(), most, now_ns)

    def recorded(self) -> tuple[list[Trail], int]:
        """No longer: the trails, and how many entries found no room."""
        return self.trails.stop(self._generations.values())

    # --- the queue ------------------------------------------------------------------------------------------------

    def _advance(self, now_ns: int) -> None:
        """Starts whoever can start, in order, and tells all replicas the number in flight."""
        admission = self._admission
        waits = self._resettle(now_ns)
        while not waits and (head := admission.queue.head()) is not None:
            # Asked again: a model that was away at the arrival may have come with less room, and the head would wait
            # for ever with all others behind it.
            if error := admission.misfit(head):
                self._fail(head, Event.REFUSED, error)
            elif admission.has_room(head):
                try:
                    self._start(head, now_ns)
                except BaseException as exc:
                    self._break(head, exc)
            else:
                break
        changed = self._replicas.changed
        while changed:
            replica = next(iter(changed))
            del changed[replica]
            number = self._replicas.pinned(replica)
            if self._connected.get(replica, number) != number:
                self._send_to(replica, InFlight(number))

    def _start(self, generation: Generation, now_ns: int) -> None:
        self.statistics.queue_wait.observe((now_ns - generation.arrived_ns) * 1e-9)
        generation.happens(Event.STARTED)
        self._admission.start(generation, now_ns=now_ns)
        self._visit(generation, generation.first, now_ns)

    # --- visits and hand-offs -------------------------------------------------------------------------------------

    def _greeted(self, replica: str, info: ModelInfo) -> None:
        """A subserver said who it is."""
        errors.check_greeting(replica, info)
        self.speculation.connected(self._replicas.model_of(replica), info)
        self._replicas.connected(replica, info)
        self._connected[replica] = 0

    def _apply(self, generation: Generation, row: ReportRow, left_ns: int, now_ns: int) -> None:
        """What a model reports of a request: tokens first, then what became of it."""
        if generation.ahead is not None:
            if not self._checked(generation, generation.ahead, row, left_ns, now_ns):
                return
            update = None
        else:
            if row.decisions:
                generation.decisions += row.decisions
            update = self._commit(generation, row, now_ns) if row.tokens else None
        outcome = Outcome.STOP if generation.transcript.stopped else row.outcome
        if update is not None and generation.request.stream and outcome not in FINISH_REASONS:
            self._updates.append(update)
        match outcome:
            case Outcome.STAY:
                generation.happens(outcome)
                if row.state is not None:
                    generation.visits.carried = row.state
            case Outcome.LEAVE:
                self._relay(generation, row, left_ns, now_ns)
            case Outcome.STOP | Outcome.LENGTH:
                self._finish(generation, outcome, update)
            case Outcome.AHEAD:
                self._ran_on(generation, row, left_ns, now_ns)
            case Outcome.LOST:
                self._revisit(generation, outcome, now_ns)
            case Outcome.FAILED:
                self._fail(generation, outcome, errors.remote(row.error, generation.visits.at))
            case _:
                assert_never(outcome)

    def _commit(self, generation: Generation, row: ReportRow, now_ns: int) -> Update:
        visits = generation.visits
        update = generation.commit(visits.at, row.tokens, row.log_probs, self.statistics, now_ns=now_ns)
        self._unwritten.append(generation)
        if visits.discarded is not None:
            generation.compared(visits.discarded == update.tokens[0], self.agreement(generation))
            visits.discarded = None
        return update
