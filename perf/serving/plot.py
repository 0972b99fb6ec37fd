"""`python -m perf.serving.plot`: the CSV of `perf.serving` as a plot and as a Markdown table."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer

Row = dict[str, str]

_PROCESSES = {
    "tritonserver": "tritonserver",
    "orchestrator": "tokenrouter",
    "small": "small",
    "large": "large",
    "load generator": "load",
}


def read(path: Path) -> list[Row]:
    """Rows of the CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(rows: list[Row]) -> str:
    """A table: measured, chain, simulator, per number in flight and setting."""
    columns = ("in flight", "thresholds", "measured tokens/s", "Markov model", "difference", "as drawn", "simulator")
    lines = [f"| {' | '.join(columns)} | of the best possible |", "|" + "---|" * (len(columns) + 1)]
    for row in sorted(rows, key=lambda row: int(row["in_flight"])):
        lines.append(
            f"| {row['in_flight']} | {row['setting']}: {row['thresholds']} | {float(row['tokens_per_second']):.1f} "
            f"| {_number(row['chain_tokens_per_second'])} | {_percent(row['difference'], '+')} "
            f"| {_percent(row.get('difference_as_drawn') or '', '+')} "
            f"| {_number(row['simulated_tokens_per_second'])} | {_percent(row['efficiency'])} |"
        )
    return "\n".join(lines)


def efficiency(rows: list[Row]) -> str:
    """A table: measured beside the best possible, and CPU seconds per 1,000 tokens by process."""
    processes = {name: f"cpu_s_per_1000_tokens.{key}" for name, key in _PROCESSES.items()}
    columns = ("in flight", "thresholds", "tokens/s", "best possible", "efficiency", *(f"CPU, {p}" for p in processes))
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in sorted(rows, key=lambda row: int(row["in_flight"])):
        cpu = " | ".join(f"{float(row[column]):.2f}" for column in processes.values())
        lines.append(
            f"| {row['in_flight']} | {row['thresholds']} | {_number(row['tokens_per_second'])} "
            f"| {_number(row['limit_tokens_per_second'])} | {_percent(row['efficiency'])} | {cpu} |"
        )
    return "\n".join(lines)


def _number(text: str) -> str:
    return f"{float(text):.1f}" if text else "-"


def _percent(text: str, sign: str = "") -> str:
    return f"{float(text):{sign}.1%}" if text else "-"


def plot(rows: list[Row], path: Path) -> None:
    """Tokens per second by number in flight: lines are the Markov model, dots what the server did."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for setting, colour in zip(dict.fromkeys(row["setting"] for row in rows), ("C0", "C1", "C2", "C3"), strict=False):
        own = sorted((row for row in rows if row["setting"] == setting), key=lambda row: int(row["in_flight"]))
        n = [int(row["in_flight"]) for row in own]
        measured = [float(row["tokens_per_second"]) for row in own]
        limit = [float(row["limit_tokens_per_second"]) for row in own]
        left.plot(n, measured, "o", color=colour, label=f"{setting}, measured")
        right.plot(n, [m / best for m, best in zip(measured, limit, strict=True)], "o", color=colour)
        for column, style, name in (
            ("chain_tokens_per_second", "-", "Markov model"),
            ("simulated_tokens_per_second", ":", "simulator"),
        ):
            points = [
                (int(r["in_flight"]), float(r[column]), float(r["limit_tokens_per_second"])) for r in own if r[column]
            ]
            left.plot(
                [x for x, *_ in points], [y for _, y, _ in points], style, color=colour, label=f"{setting}, {name}"
            )
            right.plot([x for x, *_ in points], [y / best for _, y, best in points], style, color=colour)
    for axes, label in ((left, "tokens/s"), (right, "share of the best possible")):
        axes.set_xscale("log", base=2)
        ticks = sorted({int(row["in_flight"]) for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("requests in flight")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    left.legend(fontsize=7)
    figure.suptitle("Server with emulated engines, beside the Markov model", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(
    results: Annotated[list[Path], typer.Option("--csv", help="What perf.serving --csv wrote; may be repeated.")],
    out: Annotated[Path | None, typer.Option(help="Image to write.")] = None,
    share: Annotated[bool, typer.Option("--efficiency", help="The table of efficiency and CPU time instead.")] = False,
) -> None:
    """Prints the table, and draws the plot."""
    rows = [row for path in results for row in read(path)]
    print(efficiency(rows) if share else markdown(rows))
    if out is not None:
        plot(rows, out)


if __name__ == "__main__":
    typer.run(main)
