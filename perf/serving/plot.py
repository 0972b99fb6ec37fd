"""`python -m perf.serving.plot`: the CSV of `perf.serving` as a plot and as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.figure import drawn
from perf.rows import Row, read_rows
from perf.serving.tables import against_the_model, efficiency
from tools.targets import IMAGE_SUFFIXES, target_file

_SERIES = (
    ("tokens_per_second", "o", "measured"),
    ("chain_tokens_per_second", "-", "Markov model"),
    ("simulated_tokens_per_second", ":", "simulator"),
)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Tokens per second by number in flight: lines are the Markov model, dots what the server did."""
    ticks = sorted({int(row["in_flight"]) for row in rows})
    title = "Server with emulated engines, beside the Markov model"
    with drawn(path, 1, 2, size=(9.5, 3.8), title=title) as ((left, right),):
        for number, setting in enumerate(dict.fromkeys(row["setting"] for row in rows)):
            own = sorted((row for row in rows if row["setting"] == setting), key=lambda row: int(row["in_flight"]))
            for column, style, name in _SERIES:
                known = [row for row in own if row[column]]
                n = [int(row["in_flight"]) for row in known]
                rates = [float(row[column]) for row in known]
                shares = [rate / float(row["limit_tokens_per_second"]) for rate, row in zip(rates, known, strict=True)]
                left.plot(n, rates, style, color=f"C{number}", label=f"{setting}, {name}")
                right.plot(n, shares, style, color=f"C{number}")
        for axes, label in ((left, "tokens/s"), (right, "share of the best possible")):
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set_xlabel("requests in flight")
            axes.set_ylabel(label)
        left.legend(fontsize=7)


def main(
    results: Annotated[list[Path], typer.Option("--csv", help="What perf.serving --csv wrote; may be repeated.")],
    output: Annotated[Path | None, typer.Option(help="Image to write.", callback=target_file(*IMAGE_SUFFIXES))] = None,
    share: Annotated[bool, typer.Option("--efficiency", help="The table of efficiency and CPU time instead.")] = False,
) -> None:
    rows = read_rows(*results)
    print(efficiency(rows) if share else against_the_model(rows))
    if output is not None:
        plot(rows, output)


if __name__ == "__main__":
    run(main)
