"""Requests at their models: a visit begins or waits for a model that is away, is handed over, and ends.

What the orchestrator holds of requests and knows of models is here. What models report is read by its two heirs:
`speculating` what concerns guesses, `machine` everything else.
"""

from __future__ import annotations

import logging
from collections import deque

from tokenrouter.errors import InternalError, RouterError, contained
from tokenrouter.messages import Close, Outcome, ReportRow, ToSubserver
from tokenrouter.orchestrator.admission import Admission
from tokenrouter.orchestrator.alarms import Alarms
from tokenrouter.orchestrator.eligibility import Eligibility
from tokenrouter.orchestrator.generation import Ahead, Generation
from tokenrouter.orchestrator.lifecycle import FINISH_REASONS, AnyEvent, Event, State
from tokenrouter.orchestrator.settings import OrchestratorSettings
from tokenrouter.orchestrator.trails import Trails
from tokenrouter.response import Update
from tokenrouter.speculation import Agreement
from tokenrouter.statistics import OrchestratorStatistics

log = logging.getLogger(__name__)


class Visiting:
    """The part of the orchestrator that brings requests to models, and ends them; see the module's text."""

    def __init__(self, settings: OrchestratorSettings) -> None:
        self.settings = settings
        self.statistics = OrchestratorStatistics()
        self.speculation = Eligibility(settings.speculation)
        self.trails = Trails()
        self.outbox: list[tuple[str, ToSubserver]] = []
        self._admission = Admission(
            settings.all_replicas,
            max_inflight=settings.max_inflight,
            connect_timeout_ns=settings.connect_timeout_ns,
            queue=settings.queue,
            priorities=settings.priorities,
        )
        self._replicas = self._admission.replicas
        self._generations: dict[int, Generation] = {}
        # Those whose next model is not there, or full without the replica that was lost; the first of them goes first.
        self._stranded: dict[int, Generation] = {}
        self._updates: list[Update] = []
        self._unwritten: list[Generation] = []
        # Connected replicas, with the number in flight that each was told last.
        self._connected: dict[str, int] = {}
        self._alarms = Alarms()
        # When what is worked on now came in.
        self._now_ns = 0

    def agreement(self, generation: Generation) -> Agreement:
        """That of the request's policy."""
        return self.speculation.agreement[generation.request.policy.name]

    # --- visits and hand-offs -------------------------------------------------------------------------------------

    def _relay(self, generation: Generation, row: ReportRow, left_ns: int, now_ns: int) -> None:
        """A hand-off: the target is sent what it has not seen."""
        visits = generation.visits
        visits.fruitless += 1
        if error := generation.misrouted(row.target):
            self._fail(generation, Outcome.FAILED, error)
            return
        generation.happens(Outcome.LEAVE)
        source = visits.at
        visits.seen[source] = len(generation.transcript.tokens)
        visits.carried = row.state
        generation.hand_off(self.statistics)
        if row.guesses and visits.depth:
            generation.ahead = Ahead(source, row.visit, visits.seen[source] + len(row.guesses), deque(row.guesses))
        else:
            visits.discarded = row.guesses[0].token if row.guesses else None
        self._visit(generation, row.target, now_ns, source=source, left_ns=left_ns)

    def _visit(self, generation: Generation, model: str, now_ns: int, *, source: str = "", left_ns: int = 0) -> None:
        """A request goes to a model, or waits for it."""
        if model == generation.policy.models[0]:
            generation.visits.depth = self.speculation.depth(generation)
        if self._has_place(generation, model):
            number = self._in_flight_at(generation, model)
            self._send(generation, model, generation.visit(model, in_flight=number, source=source, left_ns=left_ns))
            if generation.follower is not None:
                self.trails.visited(generation, generation.follower, now_ns, source=source, left_ns=left_ns)
        else:
            generation.visits.at = model
            self._strand(generation, now_ns)
            self._alarms.add(now_ns + self.settings.connect_timeout_ns, generation.key)

    def _has_place(self, generation: Generation, model: str) -> bool:
        """Whether its replica of the model is there, or another one has taken its place."""
        replica = generation.pins[model]
        if self._replicas.is_connected(replica):
            return True
        moved = self._replicas.pin(generation, model)
        self.statistics.moved += moved
        return moved

    def _strand(self, generation: Generation, now_ns: int) -> None:
        generation.happens(Event.DISCONNECTED)
        generation.since_ns = now_ns
        self._stranded[generation.key] = generation
        if generation.follower is not None:
            generation.follower.leave(now_ns)

    def _revisit(self, generation: Generation, event: AnyEvent, now_ns: int) -> None:
        """A model has lost what it held of a request: it is sent everything again."""
        generation.happens(event)
        self._stranded.pop(generation.key, None)
        visits = generation.visits
        visits.seen.pop(visits.at, None)
        self.statistics.recovered += 1
        self._visit(generation, visits.at, now_ns)

    def _resettle(self, now_ns: int) -> bool:
        """Those stranded go on if their replica is back, or another one has room, the first of them first.

        Returns whether one still waits for room; nobody starts meanwhile, or it might wait for ever.
        """
        waits = False
        for generation in list(self._stranded.values()):
            model = generation.visits.at
            if self._has_place(generation, model):
                try:
                    self._revisit(generation, Event.CONNECTED, now_ns)
                except BaseException as exc:
                    self._break(generation, exc)
            else:
                waits |= self._replicas.fits(model, generation.kv_tokens)
        return waits

    # --- the end --------------------------------------------------------------------------------------------------

    def _finish(self, generation: Generation, event: AnyEvent, update: Update | None = None) -> None:
        """The response is complete, or as complete as its time allows."""
        reason = FINISH_REASONS[event]
        update = generation.transcript.finish(update)
        update.result = generation.result(reason)
        self._close(generation, event, reason)
        self.statistics.finished[reason] += 1
        self._updates.append(update)

    def _fail(self, generation: Generation, event: AnyEvent, error: RouterError) -> None:
        self._close(generation, event, error.slug)
        self.statistics.failed[error.slug] += 1
        self._updates.append(Update(generation.key, error=error))

    def _break(self, generation: Generation, exc: BaseException) -> None:
        """What raised at one request is a bug of ours; it ends that request and nobody else's."""
        error = contained(exc)
        log.error("request %d broke", generation.key, exc_info=exc)
        if generation.state is not State.OVER:
            self._fail(generation, Event.BROKE, InternalError(f"internal error: {type(error).__name__}: {error}"))

    def _close(self, generation: Generation, event: AnyEvent, end: str) -> None:
        """Gives back what a request holds: its place in the queue, or KV in the ledger and on the models."""
        waited = generation.state is State.WAITING
        if generation.follower is not None:
            self.trails.over(generation, generation.follower, end, self._now_ns)
        generation.happens(event)
        del self._generations[generation.key]
        self._alarms.drop(generation.key)
        self._stranded.pop(generation.key, None)
        if generation.ahead is not None:
            self.agreement(generation).rolled_back += len(generation.ahead.guesses)
        if waited:
            self._admission.queue.discard(generation)
            return
        self._admission.release(generation)
        for model in generation.visits.seen:
            self._send(generation, model, Close(generation.key, self._in_flight_at(generation, model)))

    # --- what is sent ---------------------------------------------------------------------------------------------

    def _in_flight_at(self, generation: Generation, model: str) -> int:
        return self._replicas.pinned(generation.pins[model])

    def _send(self, generation: Generation, model: str, message: ToSubserver) -> None:
        self._send_to(generation.pins[model], message)

    def _send_to(self, replica: str, message: ToSubserver) -> None:
        self._connected[replica] = self._replicas.pinned(replica)
        self.outbox.append((replica, message))
