"""Answers requests for a recording: what this model did for a while, in one response."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from tokenrouter.errors import InternalError, InvalidRequest, Overloaded, RouterError, contained
from tokenrouter.loops.orchestrating import OrchestratorLoop
from tokenrouter.timeline.recording import MOST_ENTRIES, VERSION, About, Recording
from tokenrouter.timeline.steps import StepLog
from tokenrouter.triton.replies import TritonReply

if TYPE_CHECKING:
    from tokenrouter.subserver.machine import Subserver

log = logging.getLogger(__name__)

SWITCH = "TOKENROUTER_TIMELINE"
"""Environment variable; 0 refuses all recordings."""


class Recorder:
    """One recording at a time, bounded in time and entries, so that no client can make a model hold memory.

    Args:
        name: of the model.
        loop: whose requests are followed.
        subserver: whose steps are kept, or None.
    """

    def __init__(self, name: str, loop: OrchestratorLoop, subserver: Subserver | None) -> None:
        self._name = name
        self._loop = loop
        self._subserver = subserver
        self._one = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, reply: TritonReply, ms: int) -> None:
        """Records for so many milliseconds, then answers.

        Raises:
            InvalidRequest: recordings are switched off.
            Overloaded: one is being made.
        """
        if os.environ.get(SWITCH) == "0":
            raise InvalidRequest(f"this server makes no recordings: it was started with {SWITCH}=0")
        if self._stopping.is_set() or not self._one.acquire(blocking=False):
            raise Overloaded(f"a recording of {self._name} is being made; ask again when it is over")
        self._thread = threading.Thread(target=self._run, args=(reply, ms), name="timeline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends a recording now, with an answer; the loop still runs."""
        self._stopping.set()
        if (thread := self._thread) is not None:
            thread.join()

    def _run(self, reply: TritonReply, ms: int) -> None:
        try:
            lines = list(self._record(ms).lines())
            reply.tell(b"\n".join(lines).decode())
        except BaseException as exc:
            error = contained(exc)
            log.exception("no recording of %s", self._name)
            self._loop.refuse(reply, error if isinstance(error, RouterError) else InternalError(f"{error!r}"))
        finally:
            self._one.release()

    def _record(self, ms: int) -> Recording:
        subserver = self._subserver
        began_ns = time.monotonic_ns()
        self._loop.record(MOST_ENTRIES)
        if subserver is not None:
            subserver.record(MOST_ENTRIES)
        self._stopping.wait(ms * 1e-3)
        steps, peers = (StepLog(0), {}) if subserver is None else subserver.recorded()
        trails, dropped = self._loop.recorded()
        ended_ns = time.monotonic_ns()
        about = About(VERSION, self._name, began_ns, ended_ns, dropped + steps.budget.dropped, peers)
        return Recording(about, steps.steps, trails)
