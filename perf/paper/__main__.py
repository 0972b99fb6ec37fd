"""`python -m perf.paper`: the paper's figures, beside the Markov model and the running server.

For Figure 10, the rows of Table 6 that concern scheduling, the scaling from 1 to 16 requests in flight, and three
models: what the paper says, what the exact Markov model gives, and what our server does with *emulated* engines, whose
whole steps (sampling and routing included) take the profile's times. The routing policy is the real one. Example:

    python -m perf.paper                                 # everything, about six minutes
    python -m perf.paper --only figure_10                # one section; the others stay in the file
    python -m perf.paper --quick                         # a minute, few cells, no file
    python -m perf.paper --report                        # what the file says, without measuring
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perf.paper.cells import SECTIONS, Cell
from perf.paper.measure import Key, Measured, measure_cells
from perf.paper.plot import plot
from perf.paper.reference import Paper, load_paper
from perf.paper.table import Row, gains, markdown, read, rich_table, row_of, write
from perf.serving.run import Plan
from tools.dtmc.errors import DtmcError
from tools.progress import LateProgress
from tools.tritonserver.installation import LaunchError

RESULTS = Path("perf/results/paper.csv")
PLOT = Path("docs/images/paper_figure10.png")
FULL = Plan(warm_up_s=1.5, seconds=6.0, repeats=2)
QUICK = Plan(warm_up_s=1.0, seconds=3.0, repeats=1)


def measure_sections(names: Sequence[str], paper: Paper, *, quick: bool) -> list[Row]:
    """Rows of sections, measured now."""
    cells: list[Cell] = [cell for name in names for cell in SECTIONS[name](paper, quick)]
    plan = QUICK if quick else FULL
    total = len({cell.key for cell in cells})
    found: dict[Key, Measured] = {}
    with LateProgress() as progress:
        results = measure_cells(cells, plan, lambda stage: progress(stage, len(found) / total))
        for key, measured in results:
            found[key] = measured
    return [row_of(cell, found[cell.key], plan.seconds * plan.repeats) for cell in cells]


def show(rows: list[Row], paper: Paper, *, as_markdown: bool) -> None:
    """Prints all sections and what follows from them."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    for section in SECTIONS:
        own = [row for row in rows if row["section"] == section]
        if own and as_markdown:
            print(f"\n{section}\n\n{markdown(own)}")
        elif own:
            console.print(rich_table(section, own))
    derived = [
        (what, *("-" if value is None else f"{value:.2f} {unit}" for value in values))
        for what, unit, *values in gains(rows, paper)
    ]
    if derived and as_markdown:
        print("\n| effect | paper | our theory | emulated |\n|---|---|---|---|")
        print("\n".join(f"| {' | '.join(line)} |" for line in derived))
    elif derived:
        table = Table("effect", "paper", "our theory", "emulated", title="what follows")
        for line in derived:
            table.add_row(*line)
        console.print(table)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser(prog="python -m perf.paper", description=(__doc__ or "").partition("\n\n")[2])
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--only", nargs="+", choices=list(SECTIONS), help="sections (default: all)")
    parse.add_argument("--quick", action="store_true", help="few cells and short windows; writes no file by itself")
    parse.add_argument("--report", action="store_true", help="measure nothing")
    parse.add_argument("--markdown", action="store_true", help="print Markdown")
    parse.add_argument("--csv", type=Path, help=f"the file (default: {RESULTS}; none with --quick)")
    parse.add_argument("--plot", type=Path, help=f"image of Figure 10 (default: {PLOT}; none with --quick)")
    return parse


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints, and writes file and plot."""
    args = parser().parse_args(arguments)
    paper = load_paper()
    names = args.only or list(SECTIONS)
    path = args.csv or (None if args.quick else RESULTS)
    image = args.plot or (None if args.quick else PLOT)
    kept = [] if path is None else [row for row in read(path) if args.report or row["section"] not in names]
    try:
        rows = kept if args.report else [*kept, *measure_sections(names, paper, quick=args.quick)]
    except (DtmcError, LaunchError, RuntimeError, TimeoutError) as exc:
        sys.exit(f"error: {exc}")
    if not rows:
        sys.exit(f"error: {path} has no rows; run python -m perf.paper first")
    if path is not None and not args.report:
        write(path, rows)
    if image is not None and any(row["section"] == "figure_10" for row in rows):
        plot(rows, image)
    show(rows, paper, as_markdown=args.markdown)


if __name__ == "__main__":
    main()
