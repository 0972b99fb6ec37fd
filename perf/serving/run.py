"""A closed loop of endless responses against a server that emulates a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from perf.emulated.deployment import EmulatedDeployment
from perf.serving.window import ENTRY, Window, between, mark
from tokenrouter.metrics_page import scrape
from tools.dtmc.profile import Profile
from tools.load import ClosedLoop, LoadError, request_bytes
from tools.tritonserver.server import TritonServer

PROMPT = "abcdefgh"
ENDLESS = 1 << 19
"""Tokens of a response: hours."""

_POLL_S = 0.05
_PATIENCE_S = 15.0


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        warm_up_s: before the first window of every number in flight.
        seconds: length of a window.
        repeats: windows, one after the other.
        seed: of the responses and their prompts; the routing follows from one or the other.
        scripts: `policy_params` of the responses, in turn; empty for those of the deployment.
        fields: further inputs of every request.
    """

    warm_up_s: float = 2.0
    seconds: float = 10.0
    repeats: int = 3
    seed: int = 1
    scripts: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, index: int) -> str:
        return f"{PROMPT}{self._number(index):08x}"

    def request(self, index: int) -> bytes:
        """The request number `index`: endless, with a prompt and a seed of its own."""
        fields = dict(self.fields)
        if self.scripts:
            fields["policy_params"] = self.scripts[index % len(self.scripts)]
        seed = self._number(index)
        return request_bytes(ENTRY, self.prompt(index), max_tokens=ENDLESS, seed=seed, **fields)

    def _number(self, index: int) -> int:
        return (self.seed << 16) + index


def measure(
    server: TritonServer,
    models: Sequence[str],
    in_flight: int,
    plan: Plan,
    report: Callable[[str], None] = lambda text: None,
) -> list[Window]:
    """Keeps `in_flight` responses running and measures windows; afterwards the server is idle again.

    Raises:
        LoadError: a response ended or failed.
        TimeoutError: the server does not answer, or does not become idle.
    """
    with ClosedLoop(server.grpc_url, plan.request, in_flight) as loop:
        _wait_for(server, in_flight)
        time.sleep(plan.warm_up_s)
        marks = [mark(server)]
        for repeat in range(plan.repeats):
            report(f"window {repeat + 1} of {plan.repeats}")
            time.sleep(plan.seconds)
            marks.append(mark(server))
        loop.check()
        if loop.finished:
            raise LoadError(f"{loop.finished} responses ended early")
    _wait_for(server, 0)
    return [between(start, end, models) for start, end in pairwise(marks)]


def work_around_engines(
    profile: Profile, in_flight: Sequence[int], plan: Plan, *, policy: str, report: Callable[[str], None]
) -> dict[str, float]:
    """By model, ms that sampling, routing and waking up add to the engine's part of a step; mean over windows.

    Measured with eager thresholds at every number in flight, a quarter of the plan's window each.
    """
    short = replace(plan, seconds=max(1.0, plan.seconds / 4), repeats=1)
    added: dict[str, list[float]] = {name: [] for name in profile.names}
    with EmulatedDeployment(profile, policy, max(in_flight)).serve() as server:
        for n in in_flight:
            (window,) = measure(server, profile.names, n, short, report)
            for name, model in profile.models.items():
                batch = max(1, round(window.figures[f"mean_batch.{name}"]))
                added[name].append(window.figures[f"mean_step_ms.{name}"] - model.step_time_ms(batch))
    return {name: max(0.0, fmean(values)) for name, values in added.items()}


def _wait_for(server: TritonServer, in_flight: int) -> None:
    until = time.monotonic() + _PATIENCE_S
    while (found := scrape(server.metrics_url).value("tokenrouter_in_flight", model=ENTRY)) != in_flight:
        if time.monotonic() > until:
            raise TimeoutError(f"{found:g} requests in flight after {_PATIENCE_S:g} s, not {in_flight}")
        time.sleep(_POLL_S)
