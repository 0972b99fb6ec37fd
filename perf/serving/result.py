"""Measured windows beside the Markov model's prediction."""

from __future__ import annotations

import csv
import io
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
        """Median over the windows."""
        return median(window.tokens_per_second for window in self.windows)

    @property
    def spread(self) -> float:
        """Largest minus smallest window, relative to the median."""
        rates = [window.tokens_per_second for window in self.windows]
        return (max(rates) - min(rates)) / self.tokens_per_second

    @property
    def difference(self) -> float | None:
        """Measured against the chain, relative."""
        return None if self.chain is None else self.tokens_per_second / self.chain.tokens_per_second - 1.0

    @property
    def difference_as_drawn(self) -> float | None:
        """Mean of the windows against the chain with the routing that they drew: without the luck of draws."""
        if self.as_drawn is None:
            return None
        tokens, seconds = (sum(getattr(w, name) for w in self.windows) for name in ("tokens", "seconds"))
        return float(tokens / seconds / self.as_drawn - 1.0)

    @property
    def efficiency(self) -> float:
        """Measured over what the chain gives with its best thresholds."""
        return self.tokens_per_second / self.limit

    def middle(self, field: str) -> dict[str, float]:
        """Median of a field that is a dict of numbers, by its keys."""
        values: list[dict[str, float]] = [getattr(window, field) for window in self.windows]
        return {name: median(value[name] for value in values) for name in values[0]}

    def reasons(self, model: str) -> dict[str, float]:
        """Mean share of steps by reason."""
        names = {name for window in self.windows for name in window.reasons[model]}
        count = len(self.windows)
        return {name: sum(w.reasons[model].get(name, 0.0) for w in self.windows) / count for name in sorted(names)}


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


def rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """One flat row per result, for CSV and JSON. Numbers are emulated: step times are the profile's."""
    table = []
    for result in results:
        row: dict[str, object] = {
            "kind": "emulated",
            "profile_times_are_of": "whole steps" if result.around_ms else "engines",
            "in_flight": result.in_flight,
            "setting": result.label,
            "thresholds": " ".join(f"{name}={b}" for name, b in result.thresholds.items()),
            "tokens_per_second": round(result.tokens_per_second, 2),
            "spread": round(result.spread, 4),
            "windows": len(result.windows),
            "window_s": round(median(window.seconds for window in result.windows), 2),
            "chain_tokens_per_second": None if result.chain is None else round(result.chain.tokens_per_second, 2),
            "difference": None if result.difference is None else round(result.difference, 4),
            "as_drawn_tokens_per_second": None if result.as_drawn is None else round(result.as_drawn, 2),
            "difference_as_drawn": None if (d := result.difference_as_drawn) is None else round(d, 4),
            "simulated_tokens_per_second": None if result.simulated is None else round(result.simulated, 2),
            "limit_tokens_per_second": round(result.limit, 2),
            "efficiency": round(result.efficiency, 4),
        }
        for measure in ("mean_batch", "mean_step_ms", "mean_wait_ms", "utilisation", "mean_handoff_ms"):
            row |= {f"{measure}.{name}": round(value, 4) for name, value in result.middle(measure).items()}
        row |= {f"around_ms.{name}": round(value, 4) for name, value in result.around_ms.items()}
        for name in result.thresholds:
            if result.chain is not None:
                row[f"chain_mean_batch.{name}"] = round(result.chain.mean_batch[name], 4)
            row |= {f"{reason}.{name}": round(share, 4) for reason, share in result.reasons(name).items()}
        row |= {f"cpu_s_per_1000_tokens.{n}": round(v, 4) for n, v in result.middle("cpu_s_per_1000_tokens").items()}
        table.append(row)
    return table


def to_csv(table: Sequence[dict[str, object]]) -> str:
    """CSV text; columns in the order of their first appearance."""
    columns = list(dict.fromkeys(column for row in table for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
