"""Plain routing and speculative hand-off in alternating windows: a row per number in flight and agreement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from perf.emulated.deployment import EmulatedDeployment, Thresholds
from perf.serving.run import Plan, measure
from perf.serving.window import ENTRY
from perf.speculation.responses import Responses, served
from tokenrouter.metrics_page import scrape
from tokenrouter.speculation import Speculation
from tools.dtmc.profile import Profile
from tools.dtmc.search import search
from tools.progress import Report
from tools.simulate.search import SpeculativeResult, search_speculation
from tools.tritonserver.server import TritonServer


@dataclass(frozen=True)
class Study:
    """What all rows share.

    Attributes:
        profile: of `routing.routed` for the policy.
        plan: of one window.
        repeats: windows of each kind.
        depth: most guesses per request.
    """

    profile: Profile
    policy: str
    plan: Plan
    repeats: int
    depth: int

    def rows(self, in_flight: Sequence[int], agreements: Sequence[float], report: Report) -> Iterator[dict[str, Any]]:
        """All rows. Emulated, say the rows."""
        plainly = {n: search(self.profile, n, report=report) for n in in_flight}
        for done, agreement in enumerate(agreements):
            found = {
                n: search_speculation(self.profile, n, agreement, depths=(self.depth,), plain=plainly[n], report=report)
                for n in in_flight
            }
            plain = self._deployment(agreement, {n: row.plain_thresholds for n, row in found.items()})
            ahead = self._deployment(agreement, {n: row.thresholds for n, row in found.items()}, ahead=True)
            with plain.serve() as waiting, ahead.serve() as guessing:
                for n in in_flight:
                    report(f"agreement {agreement:g}, {n} in flight", done / len(agreements))
                    yield self._row(found[n], waiting, guessing)

    def _deployment(
        self, agreement: float, thresholds: dict[int, dict[str, int]], *, ahead: bool = False
    ) -> EmulatedDeployment:
        return EmulatedDeployment(
            self.profile,
            self.policy,
            max(thresholds),
            Thresholds("best", thresholds),
            agreement=agreement,
            speculation=Speculation(self.depth) if ahead else None,
        )

    def _row(self, found: SpeculativeResult, plain: TritonServer, ahead: TritonServer) -> dict[str, Any]:
        n, names = found.inflight, self.profile.names
        before = scrape(ahead.metrics_url, ENTRY)
        rates: tuple[list[float], list[float]] = [], []
        for repeat in range(self.repeats):
            # Other responses in every window, the same on both sides.
            plan = replace(self.plan, seed=self.plan.seed + repeat)
            for server, found_rates in zip((plain, ahead), rates, strict=True):
                (window,) = measure(server, names, n, plan)
                found_rates.append(window.tokens_per_second)
        delta = scrape(ahead.metrics_url, ENTRY).since(before)
        compared = delta.value("tokenrouter_discarded_tokens", model=ENTRY)
        waiting, guessing = (served(server.grpc_url, self.plan, n) for server in (plain, ahead))
        return {
            "kind": "emulated",
            "policy": self.policy,
            "inflight": n,
            "agreement": found.agreement,
            "depth": self.depth,
            "plain_tokens_per_second": round(median(rates[0]), 1),
            "speculative_tokens_per_second": round(median(rates[1]), 1),
            "ratio": round(median(rates[1]) / median(rates[0]), 3),
            "ideal_ratio": round(found.ratio, 3),
            "agreement_measured": round(delta.value("tokenrouter_agreed_tokens", model=ENTRY) / max(1.0, compared), 4),
            "identical": waiting.exact == guessing.exact,
            "plain_thresholds": _text(found.plain_thresholds),
            "speculative_thresholds": _text(found.thresholds),
            "ideal_plain_tokens_per_second": round(found.plain_tokens_per_second, 1),
            "ideal_speculative_tokens_per_second": round(found.tokens_per_second, 1),
            "plain_spread": _spread(rates[0]),
            "speculative_spread": _spread(rates[1]),
            **_times("plain", waiting),
            **_times("speculative", guessing),
        }


def _text(thresholds: dict[str, int]) -> str:
    return " ".join(f"{name}={b}" for name, b in thresholds.items())


def _spread(rates: Sequence[float]) -> float:
    """From the smallest to the largest window, relative to the median."""
    return round((max(rates) - min(rates)) / median(rates), 4)


def _times(kind: str, found: Responses) -> dict[str, float]:
    """Percentiles in ms, as columns."""
    return {
        f"{kind}_{what}_ms_{name}": round(1e3 * value, 2)
        for what, times in (("inter_token", found.between_s), ("first_token", found.first_s))
        for name, value in (("p50", _quantile(times, 0.5)), ("p99", _quantile(times, 0.99)))
    }


def _quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
