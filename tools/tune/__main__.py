"""`python -m tools.tune` (`make tune`): profile a model repository under load, tune its thresholds, measure the gain.

Starts the server, sends load with rising numbers of requests in flight, writes the measured profile, searches the best
thresholds for every number in flight, writes them into the repository, starts the server again and measures what they
bring. By default all of that happens in a temporary copy of the repository; --in-place changes the given one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tools.build_repository.spec import BatchingSpec
from tools.build_repository.thresholds import batching_of
from tools.build_repository.tuning import plan_edits, write_edits
from tools.dtmc.profile import Profile
from tools.dtmc.search import search_table
from tools.errors import reported
from tools.load import PROMPTS, in_turn, read_prompts, run_stages, stages
from tools.profile.__main__ import look, profile_text
from tools.progress import LateProgress
from tools.targets import target_file
from tools.tritonserver.server import TritonServer
from tools.tune.measure import (
    Options,
    Thresholds,
    measuring_s,
    predicted,
    read_thresholds,
    tokens_per_second,
    working_copy,
)


@dataclass(frozen=True)
class Row:
    """One number in flight, before and after: thresholds, and tokens per second measured and predicted."""

    in_flight: int
    thresholds: tuple[dict[str, int], dict[str, int]]
    measured: tuple[float, float]
    predicted: tuple[float | None, float | None]


def profiled(server: TritonServer, entry: str, options: Options, report: LateProgress) -> tuple[str, Profile]:
    """Text and content of the server's profile under load."""
    before = look(server.metrics_url)
    report.note(f"profiling for {options.profile_s:g} s with up to {options.inflight} in flight")
    run_stages(
        server.grpc_url,
        in_turn(entry, options.prompts, options.max_tokens),
        in_flight=stages(options.inflight),
        seconds=options.profile_s,
        report=report,
    )
    source = f"tools.tune, {options.profile_s:g} s, up to {options.inflight} in flight"
    source += f", on {datetime.now(timezone.utc).date()}"
    return profile_text(before, look(server.metrics_url), source)


def tune(folder: Path, old: Thresholds, options: Options, output: Path | None, report: LateProgress) -> list[Row]:
    """Tunes the repository in `folder`, with a server before and after; no rows if its thresholds stay as they are."""
    report.note("starting the server")
    with TritonServer(folder) as server:
        text, profile = profiled(server, old.entry, options, report)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text, "utf-8")
        report.note("searching thresholds")
        edits = plan_edits(folder, batching_of(profile, search_table(profile, options.inflight, report=report)))
        if not any(edit.changed for edit in edits.values()):
            return []
        report.note(f"measuring as it is: {measuring_s(options):.0f} s")
        before = tokens_per_second(server, old.entry, options, report)
    write_edits(edits.values())
    new = read_thresholds(folder, old.entry)
    report.note(f"starting it with the new thresholds, and measuring again: {measuring_s(options):.0f} s")
    with TritonServer(folder) as server:
        after = tokens_per_second(server, old.entry, options, report)
    rows = []
    for n in before:
        chosen = old.at(n, profile.names), new.at(n, profile.names)
        predictions = predicted(profile, n, chosen[0]), predicted(profile, n, chosen[1])
        rows.append(Row(n, chosen, (before[n], after[n]), predictions))
    return rows


def table_of(rows: list[Row]) -> Table:
    """What is printed. Where the thresholds are the same, the ratio shows how far two measurements differ anyway."""
    names = list(rows[0].thresholds[0])
    columns = [f"B {name}" for name in names]
    table = Table(
        "in flight", *columns, *(f"{c} tuned" for c in columns), "tokens/s", "tuned", "gain", "predicted gain"
    )
    for row in rows:
        (old, new), (before, after) = row.predicted, row.measured
        table.add_row(
            str(row.in_flight),
            *(str(thresholds[name]) for thresholds in row.thresholds for name in names),
            f"{before:.1f}",
            f"{after:.1f}",
            f"{after / before:.3f}x" + (" (noise)" if row.thresholds[0] == row.thresholds[1] else ""),
            "-" if old is None or new is None else f"{new / old:.3f}x",
        )
    return table


@reported(TimeoutError)
def main(
    model_repository: Annotated[Path, typer.Option(help="Triton model repository.")] = Path("model_repository"),
    in_place: Annotated[bool, typer.Option("--in-place", help="Write into the repository itself.")] = False,
    entry: Annotated[str | None, typer.Option(help="Entry model, if there are several.")] = None,
    inflight: Annotated[int, typer.Option(min=1, help="Largest number of requests in flight to tune for.")] = 8,
    profile_seconds: Annotated[float, typer.Option(min=1.0, help="How long to profile.")] = 40.0,
    measure_seconds: Annotated[float, typer.Option(min=1.0, help="Per number in flight, before and after.")] = 10.0,
    prompts: Annotated[Path, typer.Option(help="JSON lines with a field 'prompt'.")] = PROMPTS,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a response.")] = 64,
    output: Annotated[
        Path | None, typer.Option(help="Also write the measured profile there.", callback=target_file())
    ] = None,
) -> None:
    """Profiles, tunes and measures."""
    options = Options(read_prompts(prompts), inflight, max_tokens, profile_seconds, measure_seconds)
    old = read_thresholds(model_repository, entry)
    plan_edits(
        model_repository, dict.fromkeys(old.batching, BatchingSpec())
    )  # refuses a bad repository before the long run
    with working_copy(model_repository, in_place=in_place) as folder, LateProgress() as report:
        rows = tune(folder, old, options, output, report)
    print("the profile was not kept; --output FILE keeps it" if output is None else f"profile: {output}")
    if not rows:
        print(f"unchanged: {model_repository} has the best thresholds already")
        return
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(rows))
    print(
        f"written: {model_repository}" if in_place else "tuned a temporary copy; --in-place writes into the repository"
    )


if __name__ == "__main__":
    typer.run(main)
