"""The requests of a study in the simulator, from an empty deployment on."""

from __future__ import annotations

from collections.abc import Mapping

from perf.plan.times import Times
from tokenrouter.response import Result
from tools.dtmc.profile import Profile
from tools.plan.demand import Demand, Source
from tools.simulate.deployment import build_deployment
from tools.simulate.engine import nanoseconds
from tools.simulate.loop import EventLoop
from tools.simulate.meter import Meter
from tools.simulate.run import collector_paused


class _Notes(Meter):
    """Every arrival and every token of the first requests."""

    def __init__(self, model_of: tuple[int, ...], count: int) -> None:
        super().__init__(model_of)
        self.times: dict[int, list[float]] = {}
        self.left = self._count = count

    def arrived(self, request: int, now_ns: int) -> None:
        """See `Meter.arrived`; keys count from 1."""
        super().arrived(request, now_ns)
        if request <= self._count:
            self.times[request - 1] = [now_ns * 1e-9]

    def token(self, request: int, count: int, now_ns: int) -> None:
        """See `Meter.token`."""
        super().token(request, count, now_ns)
        if request <= self._count:
            self.times[request - 1].append(now_ns * 1e-9)

    def ended(self, request: int, result: Result) -> None:
        """See `Meter.ended`."""
        super().ended(request, result)
        self.left -= request <= self._count


def simulated_times(
    profile: Profile, replicas: Mapping[str, int], demand: Demand, *, count: int, max_inflight: int, seed: int
) -> Times:
    """When the tokens of the first `count` requests come."""
    deployment = build_deployment(
        profile, max_inflight=max_inflight, thresholds={}, max_queue_delay_ns=None, replicas=replicas, limited_kv=True
    )
    notes = _Notes(deployment.model_of, count)
    source = Source(demand, deployment.policy, seed)
    with collector_paused():
        loop = EventLoop(
            deployment, source, inflight=None, handoff_ns=nanoseconds(profile.handoff_ms), meter=notes
        )  # fmt: skip
        while notes.left:
            loop.advance()
    return notes.times
