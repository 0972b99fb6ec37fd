"""One deployment after the other, served and simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from perf.emulated.deployment import EmulatedDeployment
from perf.plan.served import requests_of, served_times
from perf.plan.simulated import simulated_times
from perf.plan.times import percentiles, typical_first_ms
from perf.serving.run import Plan, work_around_engines
from tokenrouter.metrics_page import scrape
from tools.dtmc.profile import Profile
from tools.plan.demand import Arrival, Demand
from tools.progress import Report

MAX_INFLIGHT = 64
_CALIBRATED_AT = (1, 4)
_LONE = 31


@dataclass(frozen=True)
class Study:
    """What is measured.

    Attributes:
        profile: step times and routing; KV is not limited.
        demand: Poisson arrivals.
        requests: that are counted, after `warm_up`.
        seed: of everything that is drawn.
        around_ms: see `EmulatedDeployment`.
    """

    profile: Profile
    demand: Demand
    requests: int
    warm_up: int
    seed: int
    around_ms: Mapping[str, float] = field(default_factory=dict)

    def calibrated(self, report: Report) -> Study:
        """The same with engines that are faster by what comes on top of them."""
        plan = Plan(warm_up_s=1.0, seconds=8.0)
        around_ms = work_around_engines(
            self._unlimited(), _CALIBRATED_AT, plan, policy="markov", report=lambda _: report("calibrating", 0.0)
        )
        return replace(self, around_ms=around_ms)

    def row(self, replicas: Mapping[str, int], report: Report) -> dict[str, Any]:
        """Serves and simulates one deployment.

        Raises:
            LoadError: the server fails a request.
            ValueError: replicas of no model.
        """
        name = " ".join(f"{model}={count}" for model, count in replicas.items())
        count = self.warm_up + self.requests
        counted = range(self.warm_up, count)
        profile = self._unlimited()
        emulated = EmulatedDeployment(profile, "markov", MAX_INFLIGHT, around_ms=self.around_ms, replicas=replicas)
        report(f"{name}: serving {count} requests", 0.0)
        prompt = self.demand.prompt_tokens
        lone = Demand(1.0, trace=tuple(Arrival(float(second), prompt, 1) for second in range(_LONE)))
        with emulated.serve() as server:
            found = served_times(server.grpc_url, requests_of(self.demand, count=count, seed=self.seed))
            handoff_ms = 1e3 * scrape(server.metrics_url).mean("tokenrouter_handoff_seconds")
            # Last, for the first requests of a server are slow.
            alone = served_times(server.grpc_url, requests_of(lone, count=_LONE, seed=self.seed))
        served = percentiles(found, counted)
        report(f"{name}: simulating", 0.5)
        like_served = msgspec.structs.replace(profile, handoff_ms=handoff_ms)
        run = partial(simulated_times, like_served, replicas, max_inflight=MAX_INFLIGHT, seed=self.seed)
        simulated = percentiles(run(self.demand, count=count), counted)
        # What lies between the client and the first step, which the simulator does not have.
        front_ms = typical_first_ms(alone) - typical_first_ms(run(lone, count=_LONE))
        for key in ("ttft_p50_ms", "ttft_p99_ms"):
            simulated[key] += front_ms
        differences = {key: simulated[key] / served[key] - 1.0 for key in served}
        worst: float = max(differences.values(), key=abs)
        return {
            "replicas": name,
            "kind": "emulated",
            "rate": self.demand.rate,
            "requests": self.requests,
            "prompt_tokens": self.demand.prompt_tokens,
            "output_tokens": self.demand.output_tokens,
            **{f"{key}.served": round(value, 3) for key, value in served.items()},
            **{f"{key}.simulated": round(value, 3) for key, value in simulated.items()},
            **{f"{key}.difference": round(value, 4) for key, value in differences.items()},
            "worst_difference": round(worst, 4),
            "handoff_ms": round(handoff_ms, 4),
            "front_ms": round(front_ms, 4),
            **{f"around_ms.{model}": round(ms, 4) for model, ms in self.around_ms.items()},
        }

    def _unlimited(self) -> Profile:
        """The emulated engines have KV for everything."""
        models = {name: msgspec.structs.replace(each, kv_tokens=None) for name, each in self.profile.models.items()}
        return msgspec.structs.replace(self.profile, models=models)
