"""Tables and plots of what was compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from perf.compare.cells import BY_NAME, OURS, Cell
from perf.compare.results import Results
from perf.figure import drawn
from perf.rows import markdown_of, table

_TITLE = {
    "emulated": "emulated: step times and routing rates are given, everything else is real",
    "torch": "demo pair, torch engine on the CPU",
}
_LATENCIES = {"ttft": "first token", "itl": "between tokens", "e2e": "whole response"}


def _others(results: Results) -> list[str]:
    measured = results.systems()
    return [name for name in BY_NAME if name in measured and name != OURS]


def _rates(results: Results, cell: Cell) -> dict[str, str]:
    """Tokens per second by system; in brackets ours over that system."""
    rates = {OURS: f"{results.number(cell, OURS):.1f}"}
    for name in _others(results):
        rate = results.number(cell, name)
        rates[name] = "-" if math.isnan(rate) else f"{rate:.1f} ({results.ratio(cell, name):.2f})"
    return rates


def _times(results: Results, cell: Cell, columns: Sequence[str], form: str) -> dict[str, str]:
    """Some latencies in ms, by system."""
    return {
        name: " / ".join(format(results.number(cell, name, column), form) for column in columns)
        if results.row(cell, name)
        else "-"
        for name in (OURS, *_others(results))
    }


def tables(results: Results, engine: str) -> list[Table]:
    """Throughput with ratios, and latencies, per cell."""
    rates, times = [], []
    for cell in results.cells():
        named = {"policy": cell.policy, "workload": cell.workload, "n": str(cell.in_flight)}
        rates.append({**named, **_rates(results, cell)})
        for what, text in _LATENCIES.items():
            columns = (f"{what}_p50_ms", f"{what}_p99_ms")
            times.append({**named, "ms: p50 / p99": text, **_times(results, cell, columns, ".1f")})
            named = dict.fromkeys(named, "")
    return [
        table(rates, f"tokens/s (ours is x times as fast); {_TITLE[engine]}"),
        table(times, _TITLE[engine]),
    ]


def markdown(results: Results, workload: str) -> str:
    """Two Markdown tables of a workload: throughput with ratios, and latencies.

    Those are of the first token (p50), between tokens (mean) and of the whole response (p50), in ms.
    """
    rates, times = [], []
    for cell in results.cells():
        if cell.workload == workload:
            named = {f"{workload}: policy": cell.policy, "in flight": str(cell.in_flight)}
            rates.append({**named, **_rates(results, cell)})
            times.append({**named, **_times(results, cell, ("ttft_p50_ms", "itl_mean_ms", "e2e_p50_ms"), ".0f")})
    return f"{markdown_of(rates)}\n\n{markdown_of(times)}"


def losses(results: Results) -> list[tuple[Cell, str, float]]:
    """Cells with routing in which a routed baseline is as fast as ours, or faster: cell, baseline, ratio.

    Speculative hand-off is ours as well.
    """
    routed = [name for name in _others(results) if BY_NAME[name].routed and not BY_NAME[name].ahead]
    found = [(cell, name, results.ratio(cell, name)) for cell in results.cells() for name in routed]
    return [(cell, name, ratio) for cell, name, ratio in found if ratio <= 1.0]


def plot(results: Results, path: Path, engine: str) -> None:
    """Ours over each baseline: a panel per workload and number in flight, a group of bars per policy."""
    cells, names = results.cells(), [name for name in _others(results) if not BY_NAME[name].ahead]
    numbers = sorted({cell.in_flight for cell in cells})
    policies, workloads = list(dict.fromkeys(cell.policy for cell in cells)), results.workloads()
    size = (4.6 * len(numbers), 2.5 * len(workloads) + 0.8)
    title = f"TokenRouter against each baseline ({_TITLE[engine]})"
    with drawn(path, len(workloads), len(numbers), size=size, title=title) as grid:
        first = grid[0][0]
        for row, workload in zip(grid, workloads, strict=True):
            for axes, n in zip(row, numbers, strict=True):
                axes.sharey(first)
                _panel(axes, results, [Cell(policy, workload, n) for policy in policies], names)
                axes.set_title(f"{workload}, {n} in flight", fontsize=9)
            row[0].set_ylabel("tokens/s, ours / other", fontsize=8)
        first.figure.legend(
            *first.get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=8, frameon=False
        )


def _panel(axes: Any, results: Results, cells: Sequence[Cell], names: Sequence[str]) -> None:
    width = 0.85 / max(1, len(names))
    for k, name in enumerate(names):
        heights = [results.ratio(cell, name) for cell in cells]
        places = [group + (k - (len(names) - 1) / 2) * width for group in range(len(cells))]
        axes.bar(places, heights, width, label=name, color=f"C{k}", hatch="" if BY_NAME[name].routed else "//")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cells)), [cell.policy for cell in cells], fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
