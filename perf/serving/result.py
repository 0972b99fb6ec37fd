"""Measured windows beside the Markov model's prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import msgspec

from perf.serving.window import Window
from tools.dtmc.errors import ThresholdError
from tools.dtmc.profile import Profile
from tools.dtmc.solve import Solution, solve


@dataclass(frozen=True)
class Result:
    """One number in flight under one setting of thresholds; medians over the windows.

    Attributes:
        label: how the thresholds are called.
        in_flight: responses that ran all the time.
        thresholds: of every model.
        windows: what was measured.
        chain: prediction for these thresholds, or None where it does not apply.
        limit: tokens per second of the chain with its best thresholds.
        as_drawn: tokens per second of the chain with the routing that the windows happened to draw, or None.
        simulated: tokens per second of the simulator, or None.
        around_ms: by how much engines were faster, so that whole steps take the profile's time; empty if not at all.
    """

    label: str
    in_flight: int
    thresholds: dict[str, int]
    windows: tuple[Window, ...]
    chain: Solution | None
    limit: float
    as_drawn: float | None = None
    simulated: float | None = None
    around_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return median(window.tokens_per_second for window in self.windows)

    @property
    def spread(self) -> float:
        """Largest minus smallest window, relative to the median."""
        rates = [window.tokens_per_second for window in self.windows]
        return (max(rates) - min(rates)) / self.tokens_per_second

    @property
    def predicted(self) -> float | None:
        """Tokens per second of the chain."""
        return None if self.chain is None else self.chain.tokens_per_second

    @property
    def difference(self) -> float | None:
        """Measured against the chain, relative."""
        return None if self.predicted is None else self.tokens_per_second / self.predicted - 1.0

    @property
    def difference_as_drawn(self) -> float | None:
        """Mean of the windows against the chain with the routing that they drew: without the luck of draws."""
        if self.as_drawn is None:
            return None
        rate = sum(window.tokens for window in self.windows) / sum(window.seconds for window in self.windows)
        return rate / self.as_drawn - 1.0

    @property
    def efficiency(self) -> float:
        """Measured over what the chain gives with its best thresholds."""
        return self.tokens_per_second / self.limit

    def middle(self, measure: str) -> dict[str, float]:
        """Median of a field that is a dict of numbers, by its keys."""
        values: list[dict[str, float]] = [getattr(window, measure) for window in self.windows]
        return {name: median(value[name] for value in values) for name in values[0]}

    def reasons(self, model: str) -> dict[str, float]:
        """Mean share of steps by reason."""
        names = sorted({name for window in self.windows for name in window.reasons[model]})
        return {name: fmean(window.reasons[model].get(name, 0.0) for window in self.windows) for name in names}

    def row(self) -> dict[str, object]:
        """For CSV and JSON. Numbers are emulated: step times are the profile's."""
        return {
            "kind": "emulated",
            "profile_times_are_of": "whole steps" if self.around_ms else "engines",
            "in_flight": self.in_flight,
            "setting": self.label,
            "thresholds": " ".join(f"{name}={b}" for name, b in self.thresholds.items()),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "spread": round(self.spread, 4),
            "windows": len(self.windows),
            "window_s": round(median(window.seconds for window in self.windows), 2),
            "chain_tokens_per_second": _rounded(self.predicted, 2),
            "difference": _rounded(self.difference, 4),
            "as_drawn_tokens_per_second": _rounded(self.as_drawn, 2),
            "difference_as_drawn": _rounded(self.difference_as_drawn, 4),
            "simulated_tokens_per_second": _rounded(self.simulated, 2),
            "limit_tokens_per_second": round(self.limit, 2),
            "efficiency": round(self.efficiency, 4),
            **self._by_model(),
            **_columns("cpu_s_per_1000_tokens.{}", self.middle("cpu_s_per_1000_tokens")),
        }

    def _by_model(self) -> dict[str, object]:
        columns: dict[str, object] = {}
        for measure in ("mean_batch", "mean_step_ms", "mean_wait_ms", "utilisation", "mean_handoff_ms"):
            columns |= _columns(measure + ".{}", self.middle(measure))
        columns |= _columns("around_ms.{}", self.around_ms)
        for name in self.thresholds:
            if self.chain is not None:
                columns[f"chain_mean_batch.{name}"] = round(self.chain.mean_batch[name], 4)
            columns |= _columns("{}." + name, self.reasons(name))
        return columns


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _columns(name: str, values: Mapping[str, float]) -> dict[str, object]:
    return {name.format(key): round(value, 4) for key, value in values.items()}


def predict(profile: Profile, in_flight: int, thresholds: dict[str, int]) -> Solution | None:
    """The chain's prediction; None for thresholds that would deadlock without the server's own ways out."""
    try:
        return solve(profile, in_flight, thresholds)
    except ThresholdError:
        return None


def drawn_profile(profile: Profile, windows: Sequence[Window]) -> Profile:
    """The profile with the routing that the windows drew."""
    routing = {}
    for name in profile.names:
        shares = {target: fmean(window.routes[name].get(target, 0.0) for window in windows) for target in profile.names}
        total = sum(shares.values())
        routing[name] = {target: share / total for target, share in shares.items()} if total else profile.routing[name]
    return msgspec.structs.replace(profile, routing=routing)
