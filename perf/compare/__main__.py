"""`python -m perf.compare`: the same requests through TokenRouter and through what people would use instead.

    python -m perf.compare --policies r2r me --workloads low-effort --inflight 4 16
    python -m perf.compare --engine torch                     # the demo pair, real tokens
    python -m perf.compare --report                           # tables and plot of what was measured so far
    python -m perf.compare --ideal                            # exact throughput of every strategy without any overhead

Rows go to a CSV; a later run replaces the rows that it measures again, so a comparison can be measured in pieces. Where
`--csv` names another file, whatever else a comparison writes lies beside that one.
With `--engine emulated` step times, routing rates and lengths are those of perf/reference/workloads.yaml, and prompts
and responses are `--scale` times shorter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.compare import ideal, report
from perf.compare.cells import BY_NAME, Cell, named
from perf.compare.measure import add_rows
from perf.compare.results import Results
from perf.compare.settings import Engine, setting_of
from perf.compare.thresholds import Tuning
from perf.compare.workloads import load_reference
from perf.rows import show, write_rows
from tools.errors import CommandError
from tools.targets import IMAGE_SUFFIXES, target_file

RESULTS = Path(__file__).resolve().parents[1] / "results"
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"

InFlight = Annotated[list[int], typer.Option(min=1, help="Responses that run at once.")]
Scale = Annotated[int, typer.Option(min=1, help="Emulated: prompts and responses are so much shorter.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Least length of a window.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")]
OnlyReport = Annotated[bool, typer.Option("--report", help="Measure nothing; show the CSV.")]

_IN_FLIGHT = [1, 4, 16]
_SYSTEMS = list(BY_NAME)


def main(
    engine: Engine = Engine.EMULATED,
    policies: Annotated[list[str] | None, typer.Option(help="Default: all.")] = None,
    workloads: Annotated[list[str] | None, typer.Option(help="Default: all.")] = None,
    inflight: InFlight = _IN_FLIGHT,
    systems: Annotated[list[str], typer.Option(help=f"Of: {', '.join(BY_NAME)}.")] = _SYSTEMS,
    scale: Scale = 64,
    seconds: Seconds = 3.0,
    warm_up: Annotated[float, typer.Option(min=0.0, help="Seconds before it.")] = 1.0,
    machine: Annotated[str, typer.Option(help="What else it did meanwhile; a column of the file.")] = "quiet",
    csv: Annotated[
        Path | None, typer.Option(help="Default: perf/results/comparison_ENGINE.csv.", callback=target_file())
    ] = None,
    only_report: OnlyReport = False,
    only_ideal: Annotated[
        bool, typer.Option("--ideal", help="Measure nothing; exact throughput without overhead.")
    ] = False,
    as_markdown: AsMarkdown = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Default: docs/images/comparison_ENGINE.png; with --csv beside that.",
            callback=target_file(*IMAGE_SUFFIXES),
        ),
    ] = None,
) -> None:
    if only_ideal:
        reference = load_reference()
        path = csv or RESULTS / "comparison_ideal.csv"
        rows = list(ideal.rows(reference, Tuning.beside(path), policies or list(reference.policies), inflight))
        write_rows(path, rows)
        print(ideal.markdown(rows))
        return
    path = csv or RESULTS / f"comparison_{engine.value}.csv"
    results = Results.load(path)
    if not only_report:
        setting = setting_of(
            engine, kept=path.parent, most=max(inflight), scale=scale, warm_up_s=warm_up, seconds=seconds
        )
        cells = [
            Cell(policy, workload, n)
            for policy in policies or setting.policies
            for workload in workloads or setting.workloads
            for n in inflight
        ]
        add_rows(
            results, path, setting, cells, {name: named(name) for name in systems},
            engine=engine.value, machine=machine, scale=setting.scale, seconds=seconds,
        )  # fmt: skip
    if not results.rows:
        raise CommandError(f"{path} has no rows; measure first, without --report")
    picture = csv.with_suffix(".png") if csv is not None else IMAGES / f"comparison_{engine.value}.png"
    report.plot(results, plot or picture, engine.value)
    if as_markdown:
        print("\n\n".join(report.markdown(results, workload) for workload in results.workloads()))
    else:
        show(*report.tables(results, engine.value))
    for cell, name, ratio in report.losses(results):
        print(f"not faster: {cell.policy}, {cell.workload}, {cell.in_flight} in flight: {ratio:.2f} of {name}")


if __name__ == "__main__":
    run(main, RuntimeError)
