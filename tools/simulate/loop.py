"""The event loop: production state machines, virtual time.

What happens at one instant, in this order: steps end and their reports reach the orchestrator; requests of clients
arrive; messages are delivered to models that are idle; and only when nobody has anything to say any more, every idle
model asks its subserver for the next step. So models that complete together complete jointly, as in the Markov model.
As in `loops.decoding`, messages that arrive during a step are handled at its end, after the step's own residents.

Reports take no time; every message of the orchestrator takes the profile's hand-off time, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from tokenrouter.batcher import WaitUntil
from tokenrouter.messages import Guesses, Open, Report, Resume, Settled, ToSubserver
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.request import GenerationRequest
from tokenrouter.subserver.machine import Subserver
from tokenrouter.subserver.stepped import StepPlan
from tools.dtmc.errors import ThresholdError
from tools.simulate.deployment import NEVER_NS, PEER, Deployment
from tools.simulate.engine import VirtualClock
from tools.simulate.meter import Meter, Step

OnStep = Callable[[Step], None]


class Clients(Protocol):
    """Where requests come from."""

    def request(self) -> GenerationRequest:
        """The next request."""
        ...

    def gap_ns(self) -> int:
        """Time to the next arrival of the open loop."""
        ...


_CLIENTS = -1
_VISITS = (Open, Resume, Guesses, Settled)


@dataclass(slots=True)
class _Lane:
    """One replica. `inbox` holds (due, message); `step` runs now and `reports` become known when it ends."""

    index: int
    model: int
    subserver: Subserver
    clock: VirtualClock
    inbox: deque[tuple[int, ToSubserver]] = field(default_factory=deque)
    step: Step | None = None
    reports: list[Report] = field(default_factory=list)
    look_ns: int = NEVER_NS


class EventLoop:
    """Advances from instant to instant.

    Args:
        inflight: number of requests that the closed loop keeps; None is the open loop.
        handoff_ns: time of a message from the orchestrator to a model.
        streams: whether clients stream, and tokens are counted as they come to them: with speculation one row of a
            report says little of what it commits.
        think_ns: closed loop: from the end of a response to the next request in its place.
        meter: what counts; a new one by default.
        running: requests that are there from the start.

    Attributes:
        submitted: how many requests there were; the last one's key.
    """

    def __init__(
        self,
        deployment: Deployment,
        clients: Clients,
        *,
        inflight: int | None,
        handoff_ns: int,
        think_ns: int = 0,
        streams: bool = False,
        on_step: OnStep | None = None,
        meter: Meter | None = None,
        running: Iterable[GenerationRequest] = (),
    ) -> None:
        self.submitted = 0
        self._streams = streams
        self.now_ns = 0
        self.orchestrator: Orchestrator = deployment.orchestrator
        parts = zip(deployment.model_of, deployment.subservers, deployment.clocks, strict=True)
        self._lanes = [_Lane(index, model, subserver, clock) for index, (model, subserver, clock) in enumerate(parts)]
        self._by_name = {lane.subserver.name: lane for lane in self._lanes}
        # Lanes to which something happens at this instant; the others have nothing new to do.
        self._touched: set[int] = set(range(len(self._lanes)))
        self._clients = clients
        self._closed = inflight is not None
        self._handoff_ns = handoff_ns
        self._think_ns = think_ns
        self._returns: deque[int] = deque()
        self._on_step = on_step
        self._times: list[tuple[int, int]] = []
        self.meter = meter or Meter(deployment.model_of)
        self._next_arrival_ns = NEVER_NS if self._closed else self._at(clients.gap_ns())
        for request in running:
            self._enter(request)
        for _ in range(inflight or 0):
            self._submit()
        self._settle()

    def advance(self) -> None:
        """Goes to the next instant at which something happens and does all of it.

        Raises:
            ThresholdError: nothing will ever happen again: every model waits for its threshold.
        """
        now_ns = self._next_ns()
        self.meter.instant(now_ns, self.orchestrator.in_flight)
        self.now_ns = now_ns
        for index in sorted(self._touched):
            lane = self._lanes[index]
            if lane.step is not None and lane.step.end_ns == now_ns:
                self._finish(lane, lane.step)
        while self._next_arrival_ns <= now_ns:
            self._submit()
            self._next_arrival_ns = self._at(self._next_arrival_ns + max(1, self._clients.gap_ns()))
        while self._returns and self._returns[0] <= now_ns:
            self._returns.popleft()
            self._submit()
        self._settle()

    def _next_ns(self) -> int:
        """The next instant; who is concerned is `_touched` then."""
        times = self._times
        while times:
            at_ns, lane = heappop(times)
            if at_ns > self.now_ns:
                self._touched = {lane}
                while times and times[0][0] == at_ns:
                    self._touched.add(heappop(times)[1])
                self._touched.discard(_CLIENTS)
                return at_ns
        raise ThresholdError(
            f"deadlock after {self.now_ns * 1e-9:.3f} s: every model waits for its threshold; lower the thresholds "
            "until the sum of (B - 1) is below the requests in flight, or set max_queue_delay_ms"
        )

    def _at(self, at_ns: int, lane: int = _CLIENTS) -> int:
        heappush(self._times, (at_ns, lane))
        return at_ns

    def _submit(self) -> None:
        self._enter(self._clients.request())

    def _enter(self, request: GenerationRequest) -> None:
        self.submitted = self.orchestrator.submit(request, now_ns=self.now_ns)
        self.meter.arrived(self.submitted, self.now_ns)

    def _finish(self, lane: _Lane, step: Step) -> None:
        """A step is over: its reports reach the orchestrator."""
        lane.step = None
        self.meter.step_finished(lane.index, step)
        for report in lane.reports:
            for row in report.rows:
                target = self._by_name[row.target].model if row.target else lane.model
                self.meter.row(lane.index, row, target, self.now_ns)
                if row.tokens and not self._streams:
                    self.meter.token(row.request, len(row.tokens), self.now_ns)
            self.orchestrator.receive(lane.subserver.name, report, now_ns=self.now_ns)
        lane.reports.clear()
        self._news()

    def _news(self) -> None:
        """Requests that are over; the closed loop starts others in their place."""
        updates = self.orchestrator.take_updates()
        for update in updates:
            if update.error is not None:
                raise update.error
            if update.tokens and self._streams:
                self.meter.token(update.key, len(update.tokens), self.now_ns)
            if update.result is not None:
                self.meter.ended(update.key, update.result)
                if self._closed and self._think_ns:
                    self._returns.append(self._at(self.now_ns + self._think_ns))
                elif self._closed:
                    self._submit()

    def _settle(self) -> None:
        """Delivers what is due, then starts steps."""
        self._route()
        idle = [lane for lane in map(self._lanes.__getitem__, sorted(self._touched)) if lane.step is None]
        for lane in idle:
            self._deliver(lane)
        for lane in idle:
            self._start(lane)

    def _route(self) -> None:
        """The orchestrator's messages are on their way."""
        outbox = self.orchestrator.outbox
        if not outbox:
            return
        due_ns = self.now_ns + self._handoff_ns
        reached = set()
        for name, message in outbox:
            lane = self._by_name[name]
            lane.inbox.append((due_ns, message))
            reached.add(lane.index)
        outbox.clear()
        if self._handoff_ns:
            for index in reached:
                self._at(due_ns, index)
        else:
            self._touched |= reached

    def _deliver(self, lane: _Lane) -> None:
        while lane.inbox and lane.inbox[0][0] <= self.now_ns:
            due_ns, message = lane.inbox.popleft()
            lane.subserver.handle(PEER, message, now_ns=self.now_ns)
            if isinstance(message, _VISITS):
                self.meter.ready(lane.index, message.request, due_ns)
        if lane.subserver.outbox:
            # Only a failure is told outside a step; it ends the simulation.
            for _, report in lane.subserver.outbox:
                self.orchestrator.receive(lane.subserver.name, report, now_ns=self.now_ns)
            self._news()

    def _start(self, lane: _Lane) -> None:
        plan = lane.subserver.poll(now_ns=self.now_ns)
        if isinstance(plan, StepPlan):
            self._run(lane, plan)
        elif isinstance(plan, WaitUntil) and plan.at_ns < NEVER_NS and plan.at_ns != lane.look_ns:
            lane.look_ns = self._at(plan.at_ns, lane.index)

    def _run(self, lane: _Lane, plan: StepPlan) -> None:
        """Runs a step now; what it has to say is kept until its end."""
        requests = tuple([sequence.request for sequence, _ in plan.rows])
        lane.clock.now_ns = self.now_ns
        lane.subserver.run_step(plan)
        extended = sum([share for _, share in plan.rows]) - len(requests)
        lane.step = Step(lane.subserver.name, self.now_ns, lane.clock.now_ns, requests, extended, plan.reason.value)
        lane.reports = [message for _, message in lane.subserver.outbox if isinstance(message, Report)]
        lane.subserver.outbox.clear()
        self._at(lane.step.end_ns, lane.index)
        self.meter.step_started(lane.index, lane.step)
        if self._on_step is not None:
            self._on_step(lane.step)
