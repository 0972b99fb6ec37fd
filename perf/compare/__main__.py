"""`python -m perf.compare`: the same requests through TokenRouter and through what people would use instead.

    python -m perf.compare --policies r2r me --workloads low-effort --inflight 4 16
    python -m perf.compare --engine torch                     # the demo pair, real tokens
    python -m perf.compare --report                           # tables and plot of what was measured so far
    python -m perf.compare --ideal                            # exact throughput of every strategy without any overhead

Rows go to a CSV; a later run replaces the rows that it measures again, so a comparison can be measured in pieces.
With `--engine emulated` step times, routing rates and lengths are those of perf/reference/workloads.yaml, and prompts
and responses are `--scale` times shorter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from perf.baselines.standard import CallFailed
from perf.compare import demo, ideal, report
from perf.compare.cells import SYSTEMS, cells
from perf.compare.emulated import EmulatedSetting
from perf.compare.measure import Setting
from perf.compare.measure import measure as measured
from perf.compare.results import Results
from perf.compare.thresholds import Tuning
from perf.compare.workloads import Reference, load_reference
from tokenrouter.errors import RouterError
from tools.dtmc.errors import DtmcError
from tools.progress import LateProgress
from tools.tritonserver.installation import LaunchError

RESULTS = Path(__file__).resolve().parents[1] / "results"
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


def parser(reference: Reference) -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser(prog="python -m perf.compare", description=(__doc__ or "").partition("\n\n")[2])
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [system.name for system in SYSTEMS]
    parse.add_argument("--engine", choices=["emulated", "torch"], default="emulated")
    parse.add_argument("--policies", nargs="+", help="default: all")
    parse.add_argument("--workloads", nargs="+", choices=list(reference.workloads), help="emulated; default: all")
    parse.add_argument("--inflight", nargs="+", type=int, default=[1, 4, 16], help="responses that run at once")
    parse.add_argument("--systems", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parse.add_argument("--scale", type=int, default=64, help="emulated: prompts and responses are so much shorter")
    parse.add_argument("--seconds", type=float, default=3.0, help="least length of a window")
    parse.add_argument("--warm-up", type=float, default=1.0, help="seconds before it")
    parse.add_argument("--machine", default="quiet", help="what else it did meanwhile; a column of the file")
    parse.add_argument("--csv", type=Path, help="default: perf/results/comparison_ENGINE.csv")
    parse.add_argument("--report", action="store_true", help="measure nothing; tables and plot of the CSV")
    parse.add_argument("--ideal", action="store_true", help="measure nothing; exact throughput without overhead")
    parse.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parse.add_argument("--plot", type=Path, help="default: docs/images/comparison_ENGINE.png")
    return parse


def main(arguments: list[str] | None = None) -> None:
    """Measures, writes and prints."""
    try:
        reference = load_reference()
    except DtmcError as exc:
        sys.exit(f"error: {exc}")
    parse = parser(reference)
    args = parse.parse_args(arguments)
    if min(args.inflight) < 1 or args.seconds <= 0 or args.warm_up < 0 or args.scale < 1:
        parse.error("--inflight and --scale are at least 1, --seconds is positive, --warm-up is not negative")
    if args.ideal:
        found = list(ideal.rows(reference, Tuning(), args.policies or list(reference.policies), args.inflight))
        (args.csv or RESULTS / "comparison_ideal.csv").write_text(ideal.csv_text(found))
        print(ideal.markdown(found))
        return
    path = args.csv or RESULTS / f"comparison_{args.engine}.csv"
    results = Results.load(path)
    if not args.report:
        try:
            measure(args, reference, results, path)
        except (CallFailed, DtmcError, LaunchError, RouterError, RuntimeError) as exc:
            sys.exit(f"error: {exc}")
    if not results.rows:
        sys.exit(f"error: {path} has no rows; measure first, without --report")
    report.plot(results, args.plot or IMAGES / f"comparison_{args.engine}.png", args.engine)
    if args.markdown:
        print("\n\n".join(report.markdown(results, workload) for workload in results.workloads()))
    else:
        Console(width=None if sys.stdout.isatty() else 170).print(*report.tables(results, args.engine))
    for cell, name, ratio in report.losses(results):
        print(f"not faster: {cell.policy}, {cell.workload}, {cell.in_flight} in flight: {ratio:.2f} of {name}")


def measure(args: argparse.Namespace, reference: Reference, results: Results, path: Path) -> None:
    """Adds rows; the file is written after each, so nothing is lost when a run is stopped."""
    emulated = args.engine == "emulated"
    systems = [system for system in SYSTEMS if system.name in args.systems]
    policies = args.policies or list(reference.policies if emulated else demo.POLICIES)
    workloads = (args.workloads or list(reference.workloads)) if emulated else [demo.WORKLOAD]
    wanted = cells(policies, workloads, args.inflight)
    setting: Setting
    if emulated:
        setting = EmulatedSetting(reference, scale=args.scale, warm_up_s=args.warm_up, seconds=args.seconds)
    else:
        setting = demo.DemoSetting(most=max(args.inflight), warm_up_s=args.warm_up, seconds=args.seconds)
    scale = args.scale if emulated else 1
    same = {"engine": args.engine, "machine": args.machine, "scale": scale, "seconds": args.seconds}
    with LateProgress() as progress:
        done, total = 0, len(wanted) * len(systems)

        def told(text: str) -> None:
            progress(text, min(1.0, done / total))

        for cell, system, summary, limit in measured(setting, Tuning(), wanted, systems, told):
            results.add(cell, system.name, {**same, "limit": limit, **summary.flat()})
            results.save(path)
            done += 1


if __name__ == "__main__":
    main()
