"""The loop of the entry model: requests come from other threads, everything else over the carrier."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Protocol

from tokenrouter.channel.carrier import Carrier, Connected, Disconnected, Event, Received, Unreachable
from tokenrouter.channel.clocks import from_peer, to_peer
from tokenrouter.channel.outgoing import encoded, send_all
from tokenrouter.errors import ConfigError, InternalError, ProtocolError, RouterError, contained
from tokenrouter.loops.sleeping import nothing, timeout_s
from tokenrouter.loops.slices import shorten_slices
from tokenrouter.messages import Hello, ToSubserver, decode_for_orchestrator, encode
from tokenrouter.orchestrator.errors import stopping
from tokenrouter.orchestrator.generation import Route
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.pulse import Pulse
from tokenrouter.request import GenerationRequest
from tokenrouter.response import Update
from tokenrouter.timeline.trail import Trail

log = logging.getLogger(__name__)

# For the loop to answer another thread.
_PATIENCE_S = 30.0


class Reply(Protocol):
    """Where the news about one request goes."""

    def update(self, update: Update) -> None:
        """Tokens, the end, or both. Called in the loop's thread, must not block; after a final one never again."""
        ...


class OrchestratorLoop:
    """Drives one orchestrator.

    Args:
        orchestrator: the state machine.
        carrier: a carrier that dials all its models by name.
        hello: what subservers are told first.
        changed: called in the loop's thread whenever statistics may have changed; cheap.
        broke: called in the loop's thread when an exception has ended it, after everybody has been told.

    Attributes:
        pulse: of the loop.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        carrier: Carrier,
        *,
        hello: Hello,
        changed: Callable[[], None] = nothing,
        broke: Callable[[], None] = nothing,
    ) -> None:
        self.pulse = Pulse()
        self._broke = broke
        self._orchestrator = orchestrator
        self._carrier = carrier
        self._hello = encode(hello)
        self._changed = changed
        self._inbox: deque[Callable[[int], None]] = deque()
        self._replies: dict[int, Reply] = {}
        self._keys: dict[Reply, int] = {}
        self._peers: dict[str, int] = {}
        self._models: dict[int, str] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"orchestrator-{hello.peer}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: GenerationRequest, reply: Reply, *, arrived_ns: int, route: Route | None = None) -> None:
        """Hands a request over; callable from any thread. Everything else is told to `reply`.

        Without `route` the loop's thread looks for it, which may take long; see `Orchestrator.route`.
        """
        self._call(lambda now_ns: self._submit(request, route, reply, arrived_ns, now_ns))

    def refuse(self, reply: Reply, error: RouterError) -> None:
        """A request that is no valid one is told so, and counted; callable from any thread."""
        self._call(lambda _: self._refuse(reply, error))

    def cancel(self, reply: Reply) -> None:
        """The client of this reply went away; callable from any thread. Nothing happens if the request is over."""
        self._call(lambda now_ns: self._cancel(reply, now_ns))

    def record(self, most: int | None) -> None:
        """See `Orchestrator.record`; callable from any thread."""
        self._call(lambda now_ns: self._orchestrator.record(most, now_ns=now_ns))

    def recorded(self) -> tuple[list[Trail], int]:
        """See `Orchestrator.recorded`; callable from any thread but the loop's."""
        answer: Future[tuple[list[Trail], int]] = Future()
        self._call(lambda _: answer.set_result(self._orchestrator.recorded()))
        return answer.result(_PATIENCE_S)

    def stop_at(self, at_ns: int) -> None:
        """Requests that have not ended by then (`time.monotonic_ns`) are told that the server stops.

        Callable from any thread; see `Orchestrator.stop_at`.
        """
        self._call(lambda now_ns: self._orchestrator.stop_at(at_ns, now_ns=now_ns))

    def stop(self) -> None:
        """Ends the loop; requests that still run are told that the server stops."""
        self._stopping = True
        self._carrier.wake()
        self._thread.join()

    def _call(self, action: Callable[[int], None]) -> None:
        """Runs `action(now_ns)` in the loop's thread, or here if that has ended."""
        self._inbox.append(action)
        self._carrier.wake()
        if not self._thread.is_alive():
            self._drain(time.monotonic_ns())

    def _run(self) -> None:
        shorten_slices()
        broke = self._turns()
        self._stopping = True
        for key, reply in self._replies.items():
            self._tell(reply, Update(key, error=stopping()))
        self._carrier.close()
        self._drain(time.monotonic_ns())
        if broke:
            self._broke()

    def _turns(self) -> bool:
        """Until the loop is to stop. Returns whether an exception ended it."""
        try:
            while not self._stopping:
                self._turn()
        except BaseException:
            log.exception("the orchestrator loop ended")
            return True
        return False

    def _turn(self) -> None:
        now_ns = time.monotonic_ns()
        deadline_ns = self._orchestrator.next_deadline_ns()
        events = self._carrier.poll(timeout_s(deadline_ns, now_ns=now_ns))
        with self.pulse.working():
            self._work(events, deadline_ns)
        self._changed()

    def _work(self, events: Iterable[Event], deadline_ns: int | None) -> None:
        now_ns = time.monotonic_ns()
        for event in events:
            self._handle(event, now_ns)
        self._drain(now_ns)
        if deadline_ns is not None and now_ns >= deadline_ns:
            self._orchestrator.tick(now_ns=now_ns)
        self._deliver()

    def _drain(self, now_ns: int) -> None:
        while True:
            try:
                action = self._inbox.popleft()
            except IndexError:  # not asked for beforehand: while the loop ends, two threads may be here
                return
            try:
                action(now_ns)
            except BaseException:
                log.exception("what one request asked for failed")

    def _submit(
        self, request: GenerationRequest, route: Route | None, reply: Reply, arrived_ns: int, now_ns: int
    ) -> None:
        try:
            if self._stopping:
                raise stopping()
            key = self._orchestrator.submit(request, now_ns=now_ns, arrived_ns=arrived_ns, route=route)
        except RouterError as exc:
            self._refuse(reply, exc)
        except BaseException as exc:
            error = contained(exc)
            log.exception("a request cannot be taken in")
            self._refuse(reply, InternalError(f"{type(error).__name__}: {error}"))
        else:
            self._replies[key] = reply
            self._keys[reply] = key

    def _refuse(self, reply: Reply, error: RouterError) -> None:
        self._orchestrator.statistics.failed[error.slug] += 1
        self._tell(reply, Update(0, error=error))

    def _cancel(self, reply: Reply, now_ns: int) -> None:
        key = self._keys.get(reply)
        if key is not None and not self._stopping:
            self._orchestrator.cancel(key, now_ns=now_ns)

    def _deliver(self) -> None:
        """Messages first: a hand-off is more urgent than a token on its way to a client."""
        orchestrator = self._orchestrator
        while orchestrator.outbox:
            messages, orchestrator.outbox = orchestrator.outbox, []
            send_all(self._carrier, self._payloads(messages))
        for update in orchestrator.take_updates():
            if (reply := self._replies.get(update.key)) is not None:
                if update.final:
                    del self._replies[update.key], self._keys[reply]
                self._tell(reply, update)

    def _tell(self, reply: Reply, update: Update) -> None:
        """News for one client. The request of one that cannot be told ends."""
        try:
            reply.update(update)
        except BaseException:
            log.exception("request %d cannot be told", update.key)
            self.cancel(reply)

    def _payloads(self, messages: list[tuple[str, ToSubserver]]) -> Iterator[tuple[int, bytes]]:
        """What goes to which peer; a request whose message cannot travel fails, which may send others."""
        for model, message in messages:
            if (peer := self._peers.get(model)) is not None:
                try:
                    yield peer, encoded(to_peer(message, self._carrier.offset_ns(peer)))
                except ProtocolError as exc:
                    self._orchestrator.undeliverable(message, exc)

    def _handle(self, event: Event, now_ns: int) -> None:
        if isinstance(event, Connected):
            self._models[event.peer] = event.address
            self._carrier.send(event.peer, self._hello)
        elif isinstance(event, Disconnected):
            model = self._models.pop(event.peer)
            if self._peers.get(model) == event.peer:
                del self._peers[model]
                self._orchestrator.disconnected(model, now_ns=now_ns)
        elif isinstance(event, Unreachable):
            log.warning("model %s cannot be reached: %s", event.address, event.why)
            self._orchestrator.unreachable(event.address, event.why)
        else:
            self._received(event, now_ns)

    def _received(self, event: Received, now_ns: int) -> None:
        model = self._models.get(event.peer)
        if model is None:
            return
        self._peers[model] = event.peer
        try:
            message = from_peer(decode_for_orchestrator(event.payload), self._carrier.offset_ns(event.peer))
            self._orchestrator.receive(model, message, now_ns=now_ns)
        except (ProtocolError, ConfigError) as exc:
            log.error("the orchestrator drops model %s: %s", model, exc)
            self._carrier.drop(event.peer, str(exc))
        except BaseException:
            # It comes back, and is sent everything again.
            log.exception("the orchestrator drops model %s", model)
            self._carrier.drop(event.peer, "one of its messages broke the orchestrator's loop")
