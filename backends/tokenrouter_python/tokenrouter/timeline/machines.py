"""Recordings of machines that run in one process: the offline engine's, the simulator's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenrouter.timeline.recording import VERSION, About, Recording

if TYPE_CHECKING:
    from tokenrouter.orchestrator.machine import Orchestrator
    from tokenrouter.subserver.machine import Subserver


class MachineRecorder:
    """Records from now on, everything.

    Args:
        orchestrator, subservers: which.
        name: that the orchestrator gave in its `Hello`.
        now_ns: the time.
    """

    def __init__(self, orchestrator: Orchestrator, subservers: Iterable[Subserver], *, name: str, now_ns: int) -> None:
        self._orchestrator = orchestrator
        self._subservers = list(subservers)
        self._name = name
        self._began_ns = now_ns
        orchestrator.record(None, now_ns=now_ns)
        for subserver in self._subservers:
            subserver.record(None)

    def stop(self, *, now_ns: int) -> list[Recording]:
        """Until now: the orchestrator's recording, then one per model."""
        trails, _ = self._orchestrator.recorded()
        found = [Recording(self._about(self._name, now_ns, {}), [], trails)]
        for subserver in self._subservers:
            log, peers = subserver.recorded()
            found.append(Recording(self._about(subserver.name, now_ns, peers), log.steps, []))
        return found

    def _about(self, model: str, now_ns: int, peers: dict[int, str]) -> About:
        return About(VERSION, model, self._began_ns, now_ns, 0, peers)
