"""Throughput along each model's threshold, the others held at their best, and its plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tools.dtmc.errors import DtmcError
from tools.dtmc.network import Network, build_network
from tools.dtmc.profile import Profile
from tools.dtmc.race import Vector
from tools.dtmc.search import SEARCH_TRANSITIONS, exact_or_sampled
from tools.dtmc.solve import Solver
from tools.progress import Report, silent

Simulate = Callable[[Profile, int, Mapping[str, int]], float]


@dataclass(frozen=True, slots=True)
class Point:
    """Throughput at one threshold, in tokens per second.

    Attributes:
        threshold: B of the model that is varied.
        standard_error: of it; 0 when the chain was solved exactly.
    """

    threshold: int
    tokens_per_second: float
    standard_error: float
    simulated_tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """One curve per model through the point `thresholds`."""

    inflight: int
    thresholds: dict[str, int]
    curves: dict[str, list[Point]]


def sweep(
    profile: Profile,
    inflight: int,
    thresholds: Mapping[str, int],
    *,
    simulate: Simulate | None = None,
    report: Report = silent,
) -> Sweep:
    """Varies each model's threshold over its feasible range around `thresholds`."""
    solver = Solver(build_network(profile, inflight), SEARCH_TRANSITIONS)
    centre = solver.network.threshold_vector(thresholds)
    lines = [_line(solver.network, centre, model) for model in range(len(centre))]
    total, done = sum(map(len, lines)), 0
    curves: dict[str, list[Point]] = {}
    for model, (name, line) in enumerate(zip(profile.names, lines, strict=True)):
        curves[name] = []
        for vector in line:
            report(f"varying the threshold of {name}", done / total)
            rate, error = exact_or_sampled(solver, vector)
            named = dict(zip(profile.names, vector, strict=True))
            simulated = simulate(profile, inflight, named) if simulate else None
            curves[name].append(Point(vector[model], rate, error, simulated))
            done += 1
    return Sweep(inflight, dict(zip(profile.names, centre, strict=True)), curves)


def plot(result: Sweep, path: Path) -> None:
    """Draws the curves, and marks the best point of each, into a file whose suffix gives the format."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in result.curves.items():
        _draw(axes, name, points, result)
    axes.set_xlabel("threshold B of the model that is varied (requests)")
    axes.set_ylabel("throughput (tokens/s)")
    axes.set_title(f"Delayed batching, {result.inflight} requests in flight")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.12)  # room for the labels of the best points
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as exc:
        raise DtmcError(f"--plot {path}: {exc}") from exc


def _line(network: Network, centre: Vector, model: int) -> list[Vector]:
    """The feasible vectors that differ from `centre` in one place at most."""
    others = sum(centre) - centre[model] - (len(centre) - 1)
    highest = min(int(network.max_batch[model]), network.inflight - others)
    return [(*centre[:model], threshold, *centre[model + 1 :]) for threshold in range(1, highest + 1)]


def _draw(axes: Axes, name: str, points: list[Point], result: Sweep) -> None:
    others = ", ".join(f"B_{other}={b}" for other, b in result.thresholds.items() if other != name)
    at = [point.threshold for point in points]
    rates = [point.tokens_per_second for point in points]
    (line,) = axes.plot(at, rates, marker="o", markersize=3, label=f"B_{name}" + (f" ({others})" if others else ""))
    best = max(points, key=lambda point: point.tokens_per_second)
    axes.plot(best.threshold, best.tokens_per_second, marker="*", markersize=14, color=line.get_color(), linestyle="")
    axes.annotate(
        f"{best.threshold}: {best.tokens_per_second:.1f}",
        (best.threshold, best.tokens_per_second),
        textcoords="offset points",
        xytext=(0, 9),
        ha="center",
    )
    simulated = [(p.threshold, p.simulated_tokens_per_second) for p in points if p.simulated_tokens_per_second]
    if simulated:
        label = f"B_{name}, simulated"
        axes.plot(*zip(*simulated, strict=True), marker="x", linestyle="", color=line.get_color(), label=label)
