"""The one thread of a process that talks to Triton about responses.

Sending a response blocks until Triton has taken it, some 0.1 to 0.4 ms. In the orchestrator's thread that would delay
hand-offs, so a thread of its own sends; when it falls behind, the updates of a request that wait are merged into one
response. It also asks, up to five times a second per request, whether the client is still there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from tokenrouter.errors import InternalError, contained
from tokenrouter.response import Update

log = logging.getLogger(__name__)

_CANCEL_POLL_S = 0.2
# Asking is a round trip to Triton; with many requests each is asked about less often.
_CANCEL_GAP_S = 0.005
# Triton's own thread sets the answer, unlocks, and only then wakes us (PbCancel::ReportIsCancelled). A sender that is
# freed in between is gone under that thread, and the process dies. So many questions take more than a second.
_KEPT = 256


class Sender(Protocol):
    """One request's way to its client."""

    def send(self, update: Update) -> None:
        """Sends responses; blocks."""
        ...

    def cancelled(self) -> bool: ...


S = TypeVar("S", bound=Sender)


class Responder(Generic[S]):
    """See the module's text.

    Args:
        name: of the thread.
        on_cancelled: called in this thread, once per sender whose client went away.
    """

    def __init__(self, name: str, on_cancelled: Callable[[S], None]) -> None:
        self._on_cancelled = on_cancelled
        self._pending: OrderedDict[S, Update] = OrderedDict()
        self._watched: OrderedDict[S, None] = OrderedDict()
        self._asked: deque[S] = deque(maxlen=_KEPT)
        self._failed: set[S] = set()
        self._next_poll = 0.0
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"responder-{name}", daemon=True)
        self._thread.start()

    def watch(self, sender: S) -> None:
        """Asks from now on whether the client went away."""
        with self._changed:
            self._watched[sender] = None
            self._changed.notify()

    def put(self, sender: S, update: Update) -> None:
        """Sends an update soon; callable from any thread, never blocks."""
        with self._changed:
            waiting = self._pending.get(sender)
            if waiting is None:
                self._pending[sender] = update
                self._changed.notify()
            else:
                waiting.merge(update)

    def stop(self, *, within_s: float | None = None) -> None:
        """Sends what waits and ends the thread; within a time, if Triton may not take it any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(within_s)
        self._asked.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._pending or self._stopping or self._poll_due()):
                    self._changed.wait(self._patience_s())
                item = self._pending.popitem(last=False) if self._pending else None
                if item is None and self._stopping:
                    return
            if item is not None:
                self._send(*item)
            self._ask()

    def _send(self, sender: S, update: Update) -> None:
        if sender not in self._failed:
            try:
                sender.send(update)
            except BaseException as exc:
                self._fail(sender, update, contained(exc))
        if update.final:
            self._failed.discard(sender)
            with self._changed:
                self._watched.pop(sender, None)

    def _fail(self, sender: S, update: Update, exc: Exception) -> None:
        """A response that cannot be sent ends its request, with an error if at least that can be sent."""
        log.error("a response cannot be sent", exc_info=exc)
        with self._changed:
            self._watched.pop(sender, None)
        if not update.final:
            # What comes until the request has ended would lack what could not be sent.
            self._failed.add(sender)
            self._on_cancelled(sender)
        error = InternalError(f"the response cannot be sent: {type(exc).__name__}: {exc}")
        with suppress(Exception):
            sender.send(Update(update.key, error=error))

    def _ask(self) -> None:
        """Asks about the next sender in turn. Never about one that is over: Triton has freed what it would look at."""
        with self._changed:
            if not self._poll_due():
                return
            suspect = next(iter(self._watched))
            self._watched.move_to_end(suspect)
            self._next_poll = time.monotonic() + max(_CANCEL_POLL_S / len(self._watched), _CANCEL_GAP_S)
            self._asked.append(suspect)
        try:
            gone = suspect.cancelled()
        except Exception:
            log.exception("a client cannot be asked about")
            gone = True
        if gone:
            with self._changed:
                self._watched.pop(suspect, None)
            self._on_cancelled(suspect)

    def _poll_due(self) -> bool:
        return bool(self._watched) and time.monotonic() >= self._next_poll

    def _patience_s(self) -> float | None:
        return max(0.0, self._next_poll - time.monotonic()) if self._watched else None
