"""One soak: load, samples, and what is left behind."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perf.load.soak.clients import Clients, Served, Workload
from perf.load.soak.memory import Growth, Sample, Watch, growth
from tokenrouter.metrics_page import still_busy
from tools.tritonserver.server import TritonServer

_ERROR_LINE = re.compile(r"^E\d{4} .*$", re.MULTILINE)


@dataclass(frozen=True)
class Plan:
    """How long to load the server and to look at its processes.

    Attributes:
        warm_up_s: is not judged.
        interval_s: between looks.
        limit: relative growth that counts as flat.
    """

    seconds: float
    in_flight: int
    warm_up_s: float
    interval_s: float = 2.0
    limit: float = 0.02


@dataclass
class Outcome(Served):
    """What came of it; `errors` has processes that ended, too.

    Attributes:
        seconds: of load.
        hung: clients that never came back.
        held: gauges that did not return to 0.
        log_errors: error lines that the server's log got.
    """

    seconds: float = 0.0
    hung: int = 0
    held: dict[str, float] = field(default_factory=dict)
    log_errors: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Everything that must not be; empty for a good soak."""
        return [
            *self.errors,
            *([f"{self.hung} clients hang"] if self.hung else []),
            *(f"{name} is {value:g} after all requests have ended" for name, value in self.held.items()),
            *(f"server's log: {line}" for line in self.log_errors),
            *(str(growth) for growth in self.growth if not growth.flat),
        ]

    def facts(self, plan: Plan, workload: Workload) -> dict[str, Any]:
        """What is kept, without the samples."""
        return {
            "in_flight": plan.in_flight,
            "seconds": round(self.seconds, 1),
            "warm_up_s": plan.warm_up_s,
            "policies": list(workload.policies),
            "cancel_every": workload.cancel_every,
            "requests": self.requests,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "longest_response_s": round(self.longest_s, 3),
            "held_after": self.held,
            "log_errors": self.log_errors,
            "failures": self.failures,
            "growth": [growth.facts() for growth in self.growth],
        }


def soak(server: TritonServer, workload: Workload, plan: Plan, report: Callable[[str, float], None]) -> Outcome:
    """Loads a running server and watches it; afterwards the server is idle again. Reports at every look how far it is.

    Raises:
        ValueError: too short to judge memory.
    """
    outcome, logged = Outcome(), len(server.log_text())
    clients = Clients(server.grpc_url, workload, plan.in_flight, outcome)
    watch = Watch({"tritonserver": server.pid, **dict(sorted(server.stub_pids().items()))})
    started = time.monotonic()
    clients.start()
    while (elapsed := time.monotonic() - started) < plan.seconds and not (outcome.errors or watch.ended):
        report(_progress(outcome, watch.look()), elapsed / plan.seconds)
        time.sleep(min(plan.interval_s, plan.seconds - elapsed))
    outcome.seconds = time.monotonic() - started
    outcome.hung = clients.stop()
    outcome.errors += [f"process {name} ended" for name in watch.ended]
    outcome.samples = watch.samples
    if not outcome.errors:
        outcome.held = still_busy(server.metrics_url)
        outcome.growth = growth(watch.samples, warm_up_s=plan.warm_up_s, limit=plan.limit)
    outcome.log_errors = _ERROR_LINE.findall(server.log_text()[logged:])
    return outcome


def _progress(served: Served, newest: Mapping[str, Sample]) -> str:
    memory = ", ".join(f"{name} {sample.values['rss_mib']:.1f}" for name, sample in newest.items())
    return f"{served.requests.total()} requests, {served.tokens} tokens, MiB: {memory}"
