"""What a running server did in a window of time, from its own metrics and its processes' CPU time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from tokenrouter.metrics_page import TAKEN, Scrape, fresh_scrape
from tools.tritonserver.server import TritonServer

ENTRY = "tokenrouter"


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: the metrics, and CPU seconds so far by process."""

    metrics: Scrape
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Window:
    """Between two marks.

    Attributes:
        seconds: between the moments at which the entry model took its numbers.
        tokens: committed.
        routes: model -> share of requests by where they went after a step, as drawn.
        figures: by name and model: ``mean_batch.small`` requests per step; ``mean_step_ms`` of a step, sampling and
            routing included; ``mean_wait_ms`` from ready, as the model's loop sees it, to the start of the step;
            ``utilisation``, share of the time in steps; ``mean_handoff_ms`` of hand-offs to a model that was idle, NaN
            without any; ``threshold``, ``all_ready``, ``deadline``: share of steps that started for this reason.
            ``cpu_s_per_1000_tokens`` is by process; ``load`` is the load generator.
    """

    seconds: float
    tokens: float
    routes: dict[str, dict[str, float]]
    figures: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Committed, all requests together."""
        return self.tokens / self.seconds


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
    tokens = delta.value("tokenrouter_tokens", model=ENTRY)
    figures: dict[str, float] = {}
    for name in models:
        busy_s = delta.value("tokenrouter_step_seconds_sum", model=name)
        figures |= {
            f"mean_batch.{name}": delta.mean("tokenrouter_batch_size", model=name),
            f"mean_step_ms.{name}": 1e3 * delta.mean("tokenrouter_step_seconds", model=name),
            f"mean_wait_ms.{name}": 1e3 * delta.mean("tokenrouter_ready_wait_seconds", model=name),
            f"utilisation.{name}": busy_s / delta.value(TAKEN, model=name),
            f"mean_handoff_ms.{name}": 1e3 * delta.mean("tokenrouter_handoff_seconds", model=name),
        }
        reasons = _shares(delta, "tokenrouter_steps_by_reason", "reason", name)
        figures |= {f"{reason}.{name}": share for reason, share in reasons.items()}
    for name, cpu_s in start.cpu_s.items():
        figures[f"cpu_s_per_1000_tokens.{name}"] = 1e3 * (end.cpu_s[name] - cpu_s) / tokens
    return Window(
        seconds=delta.value(TAKEN, model=ENTRY),
        tokens=tokens,
        routes={name: _shares(delta, "tokenrouter_routes", "target", name) for name in models},
        figures=figures,
    )


def _shares(delta: Scrape, name: str, label: str, model: str) -> dict[str, float]:
    """Every value of the label, also those with a share of 0."""
    total = delta.value(name, model=model)
    counts = {value: delta.value(name, model=model, **{label: value}) for value in delta.labels(name, label)}
    return {value: count / total for value, count in counts.items()} if total else {}
