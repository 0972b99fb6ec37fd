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

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.paper.cells import SECTIONS, Key
from perf.paper.measure import measure_cells
from perf.paper.plot import plot
from perf.paper.reference import Paper, load_paper
from perf.paper.table import Text, effects, figures, row_of, write
from perf.rows import Row, markdown_of, rows_so_far, show, table
from perf.serving.run import Plan
from tools.errors import CommandError
from tools.progress import LateProgress
from tools.targets import IMAGE_SUFFIXES, target_file

RESULTS = Path("perf/results/paper.csv")
PLOT = Path("docs/images/paper_figure10.png")
FULL = Plan(warm_up_s=1.5, seconds=6.0, repeats=2)
QUICK = Plan(warm_up_s=1.0, seconds=3.0, repeats=1)


def measure_sections(names: Sequence[str], paper: Paper, *, quick: bool) -> list[Text]:
    """Rows of sections, measured now."""
    cells = [cell for name in names for cell in SECTIONS[name](paper, quick)]
    plan = QUICK if quick else FULL
    keys = {cell.key for cell in cells}
    found: dict[Key, Row] = {}
    with LateProgress() as progress:
        for key, row in measure_cells(cells, plan, lambda stage, _: progress(stage, len(found) / len(keys))):
            found[key] = row
    return [row_of(cell, found[cell.key], plan.seconds * plan.repeats) for cell in cells]


def print_all(rows: list[Text], paper: Paper, *, as_markdown: bool) -> None:
    """All sections and what follows from them."""
    sections = {section: figures(row for row in rows if row["section"] == section) for section in SECTIONS}
    derived = effects(rows, paper)
    if as_markdown:
        texts = [f"\n{section}\n\n{markdown_of(own)}" for section, own in sections.items() if own]
        print("\n".join(texts + [f"\n{markdown_of(derived)}"] * bool(derived)))
    else:
        tables = [table(own, f"{section}, tokens/s (emulated)") for section, own in sections.items() if own]
        show(*tables, *[table(derived, "what follows")] * bool(derived))


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Sections: {', '.join(SECTIONS)}; default: all.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few cells and short windows; writes no file by itself.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Measure nothing.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    csv: Annotated[
        Path | None, typer.Option(help=f"The file; default: {RESULTS}, none with --quick.", callback=target_file())
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help=f"Image of Figure 10; default: {PLOT}, none with --quick.",
            callback=target_file(*IMAGE_SUFFIXES),
        ),
    ] = None,
) -> None:
    names = only or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise CommandError(f"--only: no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    paper = load_paper()
    path = csv or (None if quick else RESULTS)
    image = image or (None if quick else PLOT)
    rows = [row for row in rows_so_far(path) if report or row["section"] not in names] if path else []
    if not report:
        rows += measure_sections(names, paper, quick=quick)
        if path is not None:
            write(path, rows)
    if not rows:
        raise CommandError(f"{path} has no rows; run python -m perf.paper first")
    figure_10 = [row for row in rows if row["section"] == "figure_10"]
    if image is not None and figure_10:
        plot(figure_10, image)
    print_all(rows, paper, as_markdown=as_markdown)


if __name__ == "__main__":
    run(main, RuntimeError)
