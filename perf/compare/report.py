"""Tables and plots of what was compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from perf.compare.cells import BY_NAME, OURS, Cell
from perf.compare.results import Results

_TITLE = {
    "emulated": "emulated: step times and routing rates are given, everything else is real",
    "torch": "demo pair, torch engine on the CPU",
}


def tables(results: Results, engine: str) -> list[Table]:
    """Throughput with ratios, and latencies, per cell."""
    return [_throughput(results, engine), _latency(results, engine)]


def _others(results: Results) -> list[str]:
    measured = results.systems()
    return [name for name in BY_NAME if name in measured and name != OURS]


def _throughput(results: Results, engine: str) -> Table:
    table = Table(
        "policy",
        "workload",
        "n",
        OURS,
        *_others(results),
        title=f"tokens/s (ours is x times as fast); {_TITLE[engine]}",
    )
    for cell in results.cells():
        ours = results.number(cell, OURS, "tokens_per_second")
        others = []
        for name in _others(results):
            number = results.number(cell, name, "tokens_per_second")
            others.append("-" if math.isnan(number) else f"{number:.1f} ({results.ratio(cell, name):.2f}x)")
        table.add_row(cell.policy, cell.workload, str(cell.in_flight), f"{ours:.1f}", *others)
    return table


def _latency(results: Results, engine: str) -> Table:
    names = [OURS, *_others(results)]
    table = Table("policy", "workload", "n", "ms: p50 / p99", *names, title=_TITLE[engine])
    for cell in results.cells():
        for what, text in (("ttft", "first token"), ("itl", "between tokens"), ("e2e", "whole response")):
            values = [
                f"{results.number(cell, name, f'{what}_p50_ms'):.1f} / "
                f"{results.number(cell, name, f'{what}_p99_ms'):.1f}"
                if results.row(cell, name)
                else "-"
                for name in names
            ]
            first = (cell.policy, cell.workload, str(cell.in_flight)) if what == "ttft" else ("", "", "")
            table.add_row(*first, text, *values)
    return table


def markdown(results: Results, workload: str) -> str:
    """Two Markdown tables of a workload: tokens per second with ratios in brackets, and latencies."""
    names = _others(results)
    chosen = [cell for cell in results.cells() if cell.workload == workload]
    head = f"| {workload}: policy | in flight | {OURS} | {' | '.join(names)} |\n|---|---|---|" + "---|" * len(names)
    rates, times = [head], [head]
    for cell in chosen:
        start = f"| {cell.policy} | {cell.in_flight} |"
        values = [f"{results.number(cell, OURS, 'tokens_per_second'):.1f}"]
        values += [_cell(results, cell, name) for name in names]
        rates.append(f"{start} {' | '.join(values)} |")
        times.append(f"{start} {' | '.join(_times(results, cell, name) for name in (OURS, *names))} |")
    return "\n".join(rates) + "\n\n" + "\n".join(times)


def _cell(results: Results, cell: Cell, name: str) -> str:
    number = results.number(cell, name, "tokens_per_second")
    return "-" if math.isnan(number) else f"{number:.1f} ({results.ratio(cell, name):.2f})"


def _times(results: Results, cell: Cell, name: str) -> str:
    """First token p50, between tokens mean, whole response p50, in ms."""
    if results.row(cell, name) is None:
        return "-"
    columns = ("ttft_p50_ms", "itl_mean_ms", "e2e_p50_ms")
    return " / ".join(f"{results.number(cell, name, column):.0f}" for column in columns)


def losses(results: Results) -> list[tuple[Cell, str, float]]:
    """Cells with routing in which a routed baseline is as fast as ours, or faster: cell, baseline, ratio."""
    found = []
    for cell in results.cells():
        for name in _others(results):
            ratio = results.ratio(cell, name)
            if BY_NAME[name].routed and ratio <= 1.0:
                found.append((cell, name, ratio))
    return found


def plot(results: Results, path: Path, engine: str) -> None:
    """Ours over each baseline: a panel per workload and number in flight, a group of bars per policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    cells = results.cells()
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    numbers = sorted({cell.in_flight for cell in cells})
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    names = _others(results)
    figure, axes = pyplot.subplots(
        len(workloads),
        len(numbers),
        figsize=(4.6 * len(numbers), 2.5 * len(workloads) + 0.8),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for i, workload in enumerate(workloads):
        for j, n in enumerate(numbers):
            _panel(axes[i][j], results, [Cell(policy, workload, n) for policy in policies], names)
            axes[i][j].set_title(f"{workload}, {n} in flight", fontsize=9)
        axes[i][0].set_ylabel("tokens/s, ours / other", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(8, len(labels)), fontsize=8, frameon=False)
    figure.suptitle(f"TokenRouter against each baseline ({_TITLE[engine]})", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axes: Any, results: Results, cells: Sequence[Cell], names: Sequence[str]) -> None:
    width = 0.85 / max(1, len(names))
    for k, name in enumerate(names):
        heights = [results.ratio(cell, name) for cell in cells]
        places = [group + (k - (len(names) - 1) / 2) * width for group in range(len(cells))]
        axes.bar(places, heights, width, label=name, color=f"C{k}", hatch="" if BY_NAME[name].routed else "//")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cells)), [cell.policy for cell in cells], fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", linewidth=0.3)
