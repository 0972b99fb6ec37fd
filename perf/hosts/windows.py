"""Windows of load on one way after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil

from perf.hosts.ways import Way
from tokenrouter.metrics_page import Scrape, scrape, still_busy
from tools.load import ClosedLoop, LoadError, request_bytes
from tools.tritonserver.server import TritonServer

_HANDOFF = "tokenrouter_handoff_seconds"
_ENDLESS = 1 << 19
_PUBLISHED_S = 1.3
"""A publisher's period, so that everything is on the page."""


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        seconds: length of a window, after `warm_up_s`.
        rounds: windows of every way; ways alternate, so that a busy machine meets all alike.
    """

    seconds: float = 5.0
    warm_up_s: float = 1.0
    rounds: int = 3


def measure(
    server: TritonServer,
    ways: Sequence[Way],
    in_flight: int,
    plan: Plan,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by way: hand-off times in ms, tokens per second, CPU seconds per 1,000 tokens.

    Raises:
        LoadError: a response ended or failed.
    """
    found: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    for number in range(plan.rounds):
        for way in ways:
            report(f"{in_flight} in flight, round {number + 1} of {plan.rounds}: {way.label}")
            found[way.name].append(_window(server, way, in_flight, plan))
    return {name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()}


def _window(server: TritonServer, way: Way, in_flight: int, plan: Plan) -> dict[str, float]:
    def request(number: int) -> bytes:
        return request_bytes(way.name, f"abcdefgh{number:08x}", max_tokens=_ENDLESS, seed=number)

    with ClosedLoop(server.grpc_url, request, in_flight) as loop:
        time.sleep(plan.warm_up_s + _PUBLISHED_S)
        before, began_s, cpu_before = _page(server), time.monotonic(), cpu_seconds(server)
        time.sleep(plan.seconds)
        spent, seconds, cpu = _page(server).since(before), time.monotonic() - began_s, cpu_seconds(server)
        loop.check()
        if loop.finished:
            raise LoadError(f"{loop.finished} responses ended early")
    still_busy(server.metrics_url)
    return figures(spent, seconds, {name: cpu[name] - cpu_before[name] for name in cpu}, way.name)


def figures(spent: Scrape, seconds: float, cpu_s: Mapping[str, float], entry: str) -> dict[str, float]:
    """What a window comes to."""
    tokens = spent.value("tokenrouter_tokens", model=entry)
    return {
        "handoff_p50_ms": 1e3 * spent.quantile(_HANDOFF, 0.5),
        "handoff_p99_ms": 1e3 * spent.quantile(_HANDOFF, 0.99),
        "handoff_mean_ms": 1e3 * spent.mean(_HANDOFF),
        "handoffs": spent.value(f"{_HANDOFF}_count"),
        "tokens_per_second": tokens / seconds,
        "cpu_s_per_1000_tokens": 1e3 * sum(cpu_s.values()) / max(1.0, tokens),
    }


def _page(server: TritonServer) -> Scrape:
    return scrape(server.metrics_url, "tokenrouter_tokens", _HANDOFF)


def cpu_seconds(server: TritonServer) -> dict[str, float]:
    """So far, of the models' processes and of tritonserver; that of the links and of the load is this process's."""
    pids = {"tritonserver": server.pid, **server.stub_pids()}
    times: dict[str, Any] = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items() if pid != os.getpid()}
    return {name: cpu.user + cpu.system for name, cpu in times.items()}
