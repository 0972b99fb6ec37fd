"""Command line: ``python -m tools.dtmc solve|search|sweep|ratio|apply``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools.build_repository.build import BUILT
from tools.build_repository.spec import BatchingSpec
from tools.build_repository.thresholds import batching_of
from tools.build_repository.tuning import Edit, plan_edits, write_edits
from tools.dtmc.chain import DEFAULT_MAX_TRANSITIONS
from tools.dtmc.errors import DtmcError
from tools.dtmc.network import parse_counts
from tools.dtmc.profile import Profile, load_profile
from tools.dtmc.search import SEARCH_TRANSITIONS, SearchResult, search, search_table
from tools.dtmc.solve import Solution, solve
from tools.dtmc.sweep import Simulate, Sweep, plot, sweep
from tools.errors import reported
from tools.prices import read_prices
from tools.progress import LateProgress
from tools.targets import IMAGE_SUFFIXES, target_file

app = typer.Typer(
    help="Tune delayed batching with the exact Markov model (arXiv 2610.12242, section 3).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
errors = Console(stderr=True)

ProfileFile = Annotated[Path, typer.Option("--profile", help="Profile of the deployment (YAML).")]
InFlight = Annotated[int, typer.Option("--inflight", min=1, help="Requests in flight, N.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MaxTransitions = Annotated[int, typer.Option(min=1, help="Largest chain that is solved exactly, in transitions.")]


@app.command("solve")
@reported()
def solve_command(
    profile: ProfileFile,
    inflight: InFlight,
    thresholds: Annotated[str, typer.Option(help="One threshold per model, e.g. small=1,large=3.")],
    max_transitions: MaxTransitions = DEFAULT_MAX_TRANSITIONS,
    as_json: AsJson = False,
) -> None:
    """Solve one threshold vector exactly."""
    vector = parse_counts(thresholds, "--thresholds")
    solution = solve(load_profile(profile), inflight, vector, max_transitions)
    _print_json(asdict(solution)) if as_json else _print_solution(solution, vector)


@app.command("search")
@reported()
def search_command(
    profile: ProfileFile,
    inflight: InFlight,
    table: Annotated[bool, typer.Option("--table", help="Search for every number in flight up to N.")] = False,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Solve all vectors exactly; can be slow.")] = False,
    max_mean_tpot_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Fail if the mean time per output token at N is longer.")
    ] = None,
    max_transitions: MaxTransitions = SEARCH_TRANSITIONS,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="For speculative hand-off: thresholds and depth, by simulation.")
    ] = False,
    agreement: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share of guesses that the large model writes too.")
    ] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Most guesses per request; default: the best.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best deadlock-free thresholds."""
    if speculation:
        if agreement is None:
            raise DtmcError(
                "--speculation: give --agreement too, as tokenrouter_agreement of a server's metrics has it"
            )
        _search_speculation(load_profile(profile), inflight, agreement, depth, table=table, as_json=as_json)
        return
    if agreement is not None or depth is not None:
        raise DtmcError("--agreement and --depth: only with --speculation")
    with LateProgress() as report:
        options: dict[str, Any] = {"exhaustive": exhaustive, "max_transitions": max_transitions, "report": report}
        loaded = load_profile(profile)
        rows = search_table(loaded, inflight, **options) if table else [search(loaded, inflight, **options)]
    _check_tpot(rows[-1], max_mean_tpot_ms)
    if as_json:
        last = asdict(rows[-1])
        _print_json(last | {"table": [asdict(row) for row in rows]} if table else last)
    else:
        _print_results(rows)


def _search_speculation(
    profile: Profile, inflight: int, agreement: float, depth: int | None, *, table: bool, as_json: bool
) -> None:
    from tools.simulate.search import DEPTHS, search_speculation, search_speculation_table  # with torch

    depths = DEPTHS if depth is None else (depth,)
    with LateProgress() as report:
        if table:
            rows = search_speculation_table(profile, inflight, agreement, depths=depths, report=report)
        else:
            rows = [search_speculation(profile, inflight, agreement, depths=depths, report=report)]
    if as_json:
        listed = [asdict(row) | {"ratio": row.ratio, "pays": row.pays} for row in rows]
        _print_json(listed[-1] | {"table": listed} if table else listed[-1])
        return
    names = list(rows[0].thresholds)
    shown = Table("N", *(f"B {name}" for name in names), "depth", "tokens/s", "plain", "ratio")
    for row in rows:
        bs, rate = map(str, row.thresholds.values()), _with_error(row.tokens_per_second, row.standard_error)
        plain = f"{row.plain_tokens_per_second:.1f}"
        shown.add_row(str(row.inflight), *bs, str(row.depth), rate, plain, f"{row.ratio:.2f}x")
    console.print(shown)


@app.command("sweep")
@reported()
def sweep_command(
    profile: ProfileFile,
    inflight: InFlight,
    plot_file: Annotated[Path, typer.Option("--plot", help="Image to write.", callback=target_file(*IMAGE_SUFFIXES))],
    thresholds: Annotated[
        str | None, typer.Option(help="Centre of the sweep, e.g. small=1,large=3; default: the best.")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Add the simulator's throughput.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plot throughput against the threshold of each model, the others held."""
    simulator: Simulate | None = None
    if simulate:
        from tools.simulate.run import throughput as simulator  # with torch, which the chain does not need
    with LateProgress() as report:
        loaded = load_profile(profile)
        centre = (
            parse_counts(thresholds, "--thresholds")
            if thresholds
            else search(loaded, inflight, report=report).thresholds
        )
        result = sweep(loaded, inflight, centre, simulate=simulator, report=report)
        plot_file.parent.mkdir(parents=True, exist_ok=True)
        plot(result, plot_file)
    if as_json:
        _print_json(asdict(result) | {"plot": str(plot_file)})
    else:
        _print_sweep(result)
        console.print(f"plot: {escape(str(plot_file))}")


@app.command("ratio")
@reported(ValueError)
def ratio_command(
    profile: ProfileFile,
    inflight: InFlight,
    most: Annotated[str, typer.Option(help="Most replicas of each model, e.g. small=2,large=4; left out is 1.")],
    prices: Annotated[
        Path | None, typer.Option(help="Price of a replica per hour by model (YAML); default: 1 each.")
    ] = None,
    thresholds: Annotated[str, typer.Option(help="B of every replica, e.g. small=1,large=3; left out is 1.")] = "",
    as_json: AsJson = False,
) -> None:
    """Which ratio of replicas pays, by the Markov model where it is exact, else by simulation."""
    from tools.simulate.ratio import ratios  # with torch

    loaded = load_profile(profile)
    with LateProgress() as report:
        found = ratios(
            loaded,
            inflight,
            parse_counts(most, "--most"),
            read_prices(prices, loaded),
            thresholds=parse_counts(thresholds, "--thresholds") if thresholds else None,
            report=report,
        )
    if as_json:
        _print_json([asdict(each) | {"tokens_per_cost": each.tokens_per_cost} for each in found])
        return
    table = Table(*loaded.names, "tokens/s", "per hour", "tokens per price")
    for each in found:
        rate = _with_error(each.tokens_per_second, each.standard_error)
        table.add_row(*map(str, each.replicas.values()), rate, f"{each.cost:g}", f"{each.tokens_per_cost:.0f}")
    console.print(table)


@app.command("apply")
@reported()
def apply_command(
    profile: ProfileFile,
    model_repository: Annotated[Path, typer.Option(help="Triton model repository.")],
    inflight: InFlight,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 with a diff if out of date.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write tuned thresholds into a repository that python -m tools.build_repository wrote."""
    with LateProgress() as report:
        loaded = load_profile(profile)
        # Refuses a bad repository before the long search.
        plan_edits(model_repository, dict.fromkeys(loaded.names, BatchingSpec()))
        found = batching_of(loaded, search_table(loaded, inflight, report=report))
        edits = plan_edits(model_repository, found)
        if not check:
            write_edits(edits.values())
    _print_edits(edits, found, written=not check, as_json=as_json)
    if check and any(edit.changed for edit in edits.values()):
        raise typer.Exit(1)


def _check_tpot(row: SearchResult, limit_ms: float | None) -> None:
    if limit_ms is not None and row.mean_tpot_ms > limit_ms:
        raise DtmcError(
            f"--max-mean-tpot-ms: the best is {row.mean_tpot_ms:.2f} ms per token with {row.inflight} in flight, "
            f"over {limit_ms:g} ms; lower --inflight (--table shows how far)"
        )


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _print_solution(solution: Solution, thresholds: Mapping[str, int]) -> None:
    table = Table("model", "B", "mean batch", "utilisation", "mean wait (ms)")
    for name, threshold in thresholds.items():
        measures = (solution.mean_batch, solution.utilisation, solution.mean_wait_ms)
        table.add_row(name, str(threshold), *(f"{measure[name]:.3f}" for measure in measures))
    console.print(table)
    console.print(
        f"{solution.tokens_per_second:.1f} tokens/s, {solution.mean_tpot_ms:.2f} ms per token and request, "
        f"{solution.states} states",
        highlight=False,
    )


def _print_results(rows: list[SearchResult]) -> None:
    names = [f"B {name}" for name in rows[0].thresholds]
    table = Table("N", *names, "tokens/s", "eager", "gain", "solved", "pruned", "method")
    for row in rows:
        table.add_row(
            str(row.inflight),
            *map(str, row.thresholds.values()),
            _with_error(row.tokens_per_second, row.standard_error),
            _with_error(row.eager_tokens_per_second, row.eager_standard_error),
            f"{row.tokens_per_second / row.eager_tokens_per_second:.3f}x",
            str(row.evaluated),
            str(row.pruned),
            row.method + (f", {row.undecided} undecided" if row.undecided else ""),
        )
    console.print(table)


def _print_sweep(result: Sweep) -> None:
    table = Table("model", "B", "tokens/s", "simulated tokens/s")
    for name, points in result.curves.items():
        for point in points:
            simulated = point.simulated_tokens_per_second
            rate = _with_error(point.tokens_per_second, point.standard_error)
            table.add_row(name, str(point.threshold), rate, "" if simulated is None else f"{simulated:.1f}")
    console.print(table)


def _print_edits(edits: Mapping[str, Edit], found: Mapping[str, BatchingSpec], *, written: bool, as_json: bool) -> None:
    models = {name: edits[file] for name in found if (file := f"{name}/config.pbtxt") in edits}
    skipped = [name for name in found if name not in models]
    if as_json:
        fields = {name: _fields(batching) for name, batching in found.items()}
        shown = {name: _edit(edit) for name, edit in models.items()}
        built = _edit(edits[BUILT])
        _print_json({"written": written, "deployment": built, "models": shown, "fields": fields, "skipped": skipped})
        return
    for edit in edits.values():
        if edit.changed and not written:
            console.print(edit.diff(), end="", markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(f"{escape(str(edit.path))}: {'written' if edit.changed else 'up to date'}", soft_wrap=True)
    for name in skipped:
        errors.print(f"{escape(name)}: not in the repository, skipped")


def _edit(edit: Edit) -> dict[str, Any]:
    return {"path": str(edit.path), "changed": edit.changed, "diff": edit.diff()}


def _fields(batching: BatchingSpec) -> dict[str, Any]:
    return {
        "threshold": batching.threshold,
        "by_in_flight": batching.batch_thresholds,
        "delay_microseconds": batching.max_queue_delay_microseconds,
    }


def _with_error(value: float, error: float) -> str:
    return f"{value:.1f}" if error == 0 else f"{value:.1f} ± {error:.1f}"
