"""The loop of one model, whose thread owns the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from tokenrouter.batcher import WaitUntil
from tokenrouter.channel.carrier import Carrier, Connected, Disconnected, Event, Received
from tokenrouter.channel.outgoing import reported, send_all
from tokenrouter.errors import ProtocolError
from tokenrouter.loops.sleeping import nothing, timeout_s
from tokenrouter.loops.slices import shorten_slices, usual_slices
from tokenrouter.messages import Outcome, Report, ToOrchestrator, decode_for_subserver
from tokenrouter.policies.cache import Loading, attempt

if TYPE_CHECKING:
    from tokenrouter.subserver.machine import Loaded, Subserver

log = logging.getLogger(__name__)

_DRAIN_CHECK_S = 0.05


class DecodingLoop:
    """Drives one subserver: reads messages, runs steps, sends reports.

    Args:
        build: makes the subserver; called in the loop's own thread, which then owns the engine.
        carrier: a carrier that listens.
        changed: called in the loop's thread whenever statistics may have changed; cheap.
        broke: called in the loop's thread when an exception has ended it, after everything is freed.
        clock_ns: that of the carrier and of the engine.
    """

    def __init__(
        self,
        build: Callable[[], Subserver],
        carrier: Carrier,
        *,
        changed: Callable[[], None] = nothing,
        broke: Callable[[], None] = nothing,
        name: str = "decoding",
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._build = build
        self._carrier = carrier
        self._changed = changed
        self._broke = broke
        self._inbox: deque[Callable[[int], None]] = deque()
        self._elsewhere: set[int] = set()
        self._stopping = False
        self._overlaps = False  # until it is known whether steps leave time for something else
        # When to ask for a plan again, if nothing happens before; None = never.
        self._look_ns: int | None = 0
        self._built: Future[Subserver] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Subserver:
        """Starts the thread and waits until the engine is loaded; raises whatever loading it raised."""
        self._thread.start()
        return self._built.result()

    def drain(self, within_s: float) -> None:
        """Waits until requests that hold KV here are over, at most so many seconds.

        Orchestrators of this host end with the model, and those of other hosts go on opening requests here: of theirs
        only what is open now is waited for. The rest is sent to another replica, or here again when the model is back.
        """
        held, end_s = self._built.result().held, time.monotonic() + within_s
        begun = held()
        while time.monotonic() < end_s and any(each in begun or each[0] not in self._elsewhere for each in held()):
            time.sleep(_DRAIN_CHECK_S)

    def stop(self) -> None:
        """Ends the loop after the current step and frees the engine."""
        self._stopping = True
        self._carrier.wake()
        self._thread.join()

    def _run(self) -> None:
        usual_slices()  # not those that Triton passed on, because the engine's own threads inherit them
        try:
            subserver = self._build()
            subserver.listen(self._carrier.wake)
            subserver.load_with(self._load)
            self._overlaps = subserver.overlap(partial(self._send, subserver))
        except BaseException as exc:
            self._carrier.close()
            self._built.set_exception(exc)
            return
        if not subserver.engine.info.computes_here:  # else it would take the cores from all that only wakes up
            shorten_slices()
        self._built.set_result(subserver)
        broke = self._turns(subserver)
        try:
            self._carrier.close()
            subserver.engine.shutdown()
        finally:
            if broke:
                self._broke()

    def _turns(self, subserver: Subserver) -> bool:
        """Until the loop is to stop. Returns whether an exception ended it."""
        try:
            while not self._stopping:
                self._turn(subserver)
        except BaseException:
            log.exception("the decoding loop of %s ended", subserver.name)
            return True
        return False

    def _load(self, loading: Loading, loaded: Loaded) -> None:
        """Loads a policy in a thread of its own, since others decode meanwhile."""

        def load() -> None:
            outcome = attempt(loading)
            self._inbox.append(partial(loaded, outcome))
            self._carrier.wake()

        threading.Thread(target=load, name="load-policy", daemon=True).start()

    def _turn(self, subserver: Subserver) -> None:
        events = self._carrier.poll(timeout_s(self._look_ns, now_ns=self._clock_ns()))
        with subserver.pulse.working():
            self._work(subserver, events)
        self._changed()

    def _work(self, subserver: Subserver, events: Sequence[Event]) -> None:
        now_ns = self._clock_ns()
        for event in events:
            self._handle(subserver, event, now_ns)
        while self._inbox:
            self._inbox.popleft()(now_ns)
        plan = subserver.poll(now_ns=now_ns)
        if plan is None or isinstance(plan, WaitUntil):
            # A time is known, or only a message or the engine's news will wake this thread.
            self._look_ns = None if plan is None else plan.at_ns
            self._send(subserver)
        else:
            self._look_ns = now_ns
            subserver.run_step(plan)
            if not self._overlaps or any(map(_presses, subserver.outbox)):
                self._send(subserver)

    def _send(self, subserver: Subserver) -> None:
        rows = [(peer, payload) for peer, message in subserver.outbox for payload in reported(message)]
        send_all(self._carrier, rows)
        subserver.outbox.clear()

    def _handle(self, subserver: Subserver, event: Event, now_ns: int) -> None:
        if isinstance(event, Disconnected):
            subserver.disconnected(event.peer)
            self._elsewhere.discard(event.peer)
        elif isinstance(event, Connected):
            if event.elsewhere:
                self._elsewhere.add(event.peer)
        elif isinstance(event, Received):
            try:
                subserver.handle(event.peer, decode_for_subserver(event.payload), now_ns=now_ns)
            except ProtocolError as exc:
                log.error("%s drops a peer: %s", subserver.name, exc)
                self._carrier.drop(event.peer, str(exc))
            except BaseException:
                # Only the peer that sent it pays; it comes back and sends everything again.
                log.exception("%s drops a peer", subserver.name)
                self._carrier.drop(event.peer, "one of its messages broke this model's loop")


def _presses(told: tuple[int, ToOrchestrator]) -> bool:
    """Whether somebody waits for it. What is told of requests that all stay may wait until the next step computes."""
    message = told[1]
    return not isinstance(message, Report) or any(row.outcome != Outcome.STAY for row in message.rows)
