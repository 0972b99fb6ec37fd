"""What a running server did in a window of time, from its own metrics and its processes' CPU time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from tools.metrics import TAKEN, Scrape, fresh_scrape
from tools.tritonserver.server import TritonServer

ENTRY = "tokenrouter"


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: the metrics, and CPU seconds so far by process."""

    metrics: Scrape
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Window:
    """Between two marks; dicts are by model unless they say otherwise.

    Attributes:
        seconds: between the moments at which the entry model took its numbers.
        tokens: committed.
        tokens_per_second: committed, all requests together.
        mean_batch: requests per step.
        mean_step_ms: time of a step, sampling and routing included.
        mean_wait_ms: from ready, as the model's loop sees it, to the start of the step.
        utilisation: share of the time in steps.
        reasons: share of steps by the reason why they started.
        mean_handoff_ms: of hand-offs to a model that was idle; NaN if there was none.
        routes: share of requests by where they went after a step, as drawn.
        cpu_s_per_1000_tokens: by process; ``load`` is the load generator.
    """

    seconds: float
    tokens: float
    tokens_per_second: float
    mean_batch: dict[str, float]
    mean_step_ms: dict[str, float]
    mean_wait_ms: dict[str, float]
    utilisation: dict[str, float]
    reasons: dict[str, dict[str, float]]
    mean_handoff_ms: dict[str, float]
    routes: dict[str, dict[str, float]]
    cpu_s_per_1000_tokens: dict[str, float]


def mark(server: TritonServer) -> Mark:
    """A mark just after the entry model has published: its page is complete and a few ms old.

    Raises:
        TimeoutError: it publishes nothing new, so nothing happens there.
    """
    return Mark(fresh_scrape(server.metrics_url, ENTRY), cpu_seconds(server))


def cpu_seconds(server: TritonServer, *, own: str = "load") -> dict[str, float]:
    """CPU seconds so far of tritonserver, every model's process, and this one, which is called `own`."""
    pids = {"tritonserver": server.pid, **server.stub_pids(), own: os.getpid()}
    times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
    return {name: cpu.user + cpu.system for name, cpu in times.items()}


def between(start: Mark, end: Mark, models: Sequence[str]) -> Window:
    """What happened between two marks."""
    delta = end.metrics.since(start.metrics)
    seconds = delta.value(TAKEN, model=ENTRY)
    tokens = delta.value("tokenrouter_tokens", model=ENTRY)
    busy = {name: delta.value("tokenrouter_step_seconds_sum", model=name) for name in models}
    return Window(
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        mean_batch={name: _mean(delta, "tokenrouter_batch_size", name) for name in models},
        mean_step_ms={name: 1e3 * _mean(delta, "tokenrouter_step_seconds", name) for name in models},
        mean_wait_ms={name: 1e3 * _mean(delta, "tokenrouter_ready_wait_seconds", name) for name in models},
        utilisation={name: busy[name] / delta.value(TAKEN, model=name) for name in models},
        reasons={name: _shares(delta, "tokenrouter_steps_by_reason", "reason", name) for name in models},
        mean_handoff_ms={name: 1e3 * _mean(delta, "tokenrouter_handoff_seconds", name) for name in models},
        routes={name: _shares(delta, "tokenrouter_routes", "target", name) for name in models},
        cpu_s_per_1000_tokens={name: 1e3 * (end.cpu_s[name] - cpu) / tokens for name, cpu in start.cpu_s.items()},
    )


def _mean(delta: Scrape, name: str, model: str) -> float:
    count = delta.value(f"{name}_count", model=model)
    return delta.value(f"{name}_sum", model=model) / count if count else math.nan


def _shares(delta: Scrape, name: str, label: str, model: str) -> dict[str, float]:
    total = delta.value(name, model=model)
    counts = {value: delta.value(name, model=model, **{label: value}) for value in delta.labels(name, label)}
    return {value: count / total for value, count in counts.items() if count}
