"""One profile and policy, measured under settings of thresholds and numbers in flight: a row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from perf.emulated.deployment import EAGER, EmulatedDeployment, Thresholds
from perf.serving.result import beside_model, figures, rates
from perf.serving.run import Plan, measure, work_around_engines
from tokenrouter.speculation import Speculation
from tools.dtmc.network import parse_counts
from tools.dtmc.profile import Profile
from tools.dtmc.search import SearchResult, search
from tools.simulate.run import throughput

Best = Callable[[int], SearchResult]
"""The chain's best thresholds by number in flight."""
Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Study:
    """What all rows share; all but `plan`, `in_flight` and `simulate` are those of an `EmulatedDeployment`."""

    profile: Profile
    policy: str
    plan: Plan
    in_flight: Sequence[int]
    simulate: bool = False
    around_ms: Mapping[str, float] = field(default_factory=dict)
    agreement: float | None = None
    speculation: Speculation | None = None

    def calibrated(self, report: Report) -> Study:
        """The same with engines that are faster by what comes on top of them."""
        around_ms = work_around_engines(
            self.profile, self.in_flight, self.plan, policy=self.policy, report=lambda _: report("calibrating", 0.0)
        )
        return replace(self, around_ms=around_ms)

    def rows(self, names: Sequence[str], tuned_for: int, report: Report) -> Iterator[dict[str, Any]]:
        """All rows of settings, see `setting`; `tuned_for` adds those of that function unless it is 0."""

        @cache
        def best(in_flight: int) -> SearchResult:
            return search(self.profile, in_flight, report=report)

        settings = [setting(name, self.in_flight, best) for name in names]
        for thresholds in [*settings, *tuned(tuned_for, best)]:
            yield from self.served(thresholds, best, report)

    def served(self, thresholds: Thresholds, best: Best, report: Report) -> Iterator[dict[str, Any]]:
        """Starts one server with these thresholds and measures every number in flight. Emulated, say the rows."""
        names, most = self.profile.names, max(self.in_flight)
        deployment = EmulatedDeployment(
            self.profile, self.policy, most, thresholds, self.around_ms, self.agreement, self.speculation
        )
        with deployment.serve() as server:
            for done, n in enumerate(self.in_flight):

                def told(stage: str, n: int = n, share: float = done / len(self.in_flight)) -> None:
                    report(f"{thresholds.label}, {n} in flight: {stage}", share)

                windows = measure(server, names, n, self.plan, told)
                chosen = thresholds.at(n, names)
                predictions = beside_model(self.profile, n, chosen, windows, best(n).tokens_per_second)
                simulated = None
                if self.simulate and predictions["difference"] is not None:
                    simulated = round(self._simulated(n, chosen), 2)
                yield {
                    "policy": self.policy,
                    "kind": "emulated",
                    "profile_times_are_of": "whole steps" if self.around_ms else "engines",
                    "in_flight": n,
                    "setting": thresholds.label,
                    "thresholds": " ".join(f"{name}={b}" for name, b in chosen.items()),
                    **rates(windows),
                    **predictions,
                    "simulated_tokens_per_second": simulated,
                    **self._ahead(),
                    **figures(windows),
                    **{f"around_ms.{name}": round(ms, 4) for name, ms in self.around_ms.items()},
                }

    def _simulated(self, in_flight: int, thresholds: Mapping[str, int]) -> float:
        agreement = 1.0 if self.agreement is None else self.agreement
        return throughput(self.profile, in_flight, thresholds, speculation=self.speculation, agreement=agreement)

    def _ahead(self) -> dict[str, float | int]:
        """Columns; none where agreement means nothing."""
        found: dict[str, float | int] = {} if self.agreement is None else {"agreement": round(self.agreement, 4)}
        return found if self.speculation is None else {**found, "depth": self.speculation.depth}


def setting(name: str, in_flight: Sequence[int], best: Best) -> Thresholds:
    """``eager``, ``best`` (a table of the best at the given numbers in flight), or thresholds like small=1,large=3.

    Raises:
        ThresholdError: none of these.
    """
    if name == "eager":
        return EAGER
    if name == "best":
        return Thresholds("best", {n: best(n).thresholds for n in in_flight})
    return Thresholds(name, {0: parse_counts(name, "--thresholds")})


def tuned(most: int, best: Best) -> list[Thresholds]:
    """A table for 1..`most` in flight, and the thresholds for `most` at any number in flight; nothing for 0."""
    if not most:
        return []
    return [
        Thresholds(f"table 1..{most}", {n: best(n).thresholds for n in range(1, most + 1)}),
        Thresholds(f"fixed for {most}", {0: best(most).thresholds}),
    ]
