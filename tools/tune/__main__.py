"""`python -m tools.tune` (`make tune`): profile a model repository under load, tune its thresholds, measure the gain.

Starts the server, sends load with rising numbers of requests in flight, writes the measured profile, searches the best
thresholds for every number in flight, writes them into the repository, starts the server again and measures what they
bring. Where speculative hand-off pays in the simulator, with the measured agreement of the two models, it is tried too,
with the thresholds that are best for it; whatever is faster stays. By default all of that happens in a temporary copy
of the repository; --in-place changes the given one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tokenrouter.metrics_page import scrape
from tools.build_repository.spec import BatchingSpec
from tools.build_repository.tuning import Edit, plan_edits, write_edits
from tools.dtmc.profile import Profile
from tools.errors import reported
from tools.load import PROMPTS, in_turn, read_prompts, run_stages, stages
from tools.profile.__main__ import look, profile_text
from tools.progress import LateProgress
from tools.targets import target_file
from tools.tritonserver.server import TritonServer
from tools.tune.candidates import Settings, candidates
from tools.tune.measure import (
    Options,
    Thresholds,
    measured_agreement,
    measuring_s,
    predicted,
    read_thresholds,
    tokens_per_second,
    working_copy,
)


@dataclass(frozen=True)
class Row:
    """One number in flight, before and after: thresholds, and tokens per second measured and predicted.

    Attributes:
        ahead: whether speculation was switched on, too.
    """

    in_flight: int
    thresholds: tuple[dict[str, int], dict[str, int]]
    measured: tuple[float, float]
    predicted: tuple[float | None, float | None]
    ahead: bool = False


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


@dataclass(frozen=True)
class Tuned:
    """What came of it.

    Attributes:
        rows: the settings that were measured last and chosen, or lost; none if nothing was worth a trial.
        agreement: of the two models, if enough tokens were compared.
        settings: what is written; None if everything stays as it was.
    """

    rows: list[Row]
    agreement: float | None
    settings: Settings | None


def tune(folder: Path, old: Thresholds, options: Options, output: Path | None, report: LateProgress) -> Tuned:
    """Tunes the repository in `folder`, with a server before and after; of several settings the fastest stays."""
    report.note("starting the server")
    with TritonServer(folder) as server:
        text, profile = profiled(server, old.entry, options, report)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text, "utf-8")
        agreement = measured_agreement(scrape(server.metrics_url), old.entry)
        report.note("searching thresholds")
        tries = []
        for settings in candidates(folder, profile, options.inflight, agreement, report):
            edits = list(plan_edits(folder, settings.batching, settings.speculation).values())
            if any(edit.changed for edit in edits):
                tries.append((settings, edits))
        if not tries:
            return Tuned([], agreement, None)
        report.note(f"measuring as it is: {measuring_s(options):.0f} s")
        before = tokens_per_second(server, old.entry, options, report)
    found = []
    for settings, edits in tries:
        with written(edits):
            report.note(f"starting it with {settings}, and measuring again: {measuring_s(options):.0f} s")
            with TritonServer(folder) as server:
                after = tokens_per_second(server, old.entry, options, report)
            rows = _rows(profile, old, read_thresholds(folder, old.entry), before, after, ahead=settings.ahead)
        found.append(Tuned(rows, agreement, settings))
    best = max(found, key=_tokens)
    if best.settings is None or (best.settings.speculation and _tokens(best) <= sum(before.values())):
        return Tuned(best.rows, agreement, None)
    write_edits(plan_edits(folder, best.settings.batching, best.settings.speculation).values())
    return best


def _tokens(tuned: Tuned) -> float:
    """Per second, over all numbers in flight."""
    return sum(row.measured[1] for row in tuned.rows)


@contextmanager
def written(edits: Sequence[Edit]) -> Iterator[None]:
    """The repository with these edits, which are undone at the end."""
    write_edits(edits)
    try:
        yield
    finally:
        write_edits([Edit(edit.path, edit.after, edit.before) for edit in edits])


def _rows(
    profile: Profile,
    old: Thresholds,
    new: Thresholds,
    before: dict[int, float],
    after: dict[int, float],
    *,
    ahead: Mapping[int, float],
) -> list[Row]:
    rows = []
    for n in before:
        chosen = old.at(n, profile.names), new.at(n, profile.names)
        predictions = predicted(profile, n, chosen[0]), ahead.get(n) or predicted(profile, n, chosen[1])
        rows.append(Row(n, chosen, (before[n], after[n]), predictions, bool(ahead)))
    return rows


def table_of(rows: list[Row]) -> Table:
    """What is printed. Where the settings are the same, the ratio shows how far two measurements differ anyway."""
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
            f"{after / before:.3f}x" + (" (noise)" if row.thresholds[0] == row.thresholds[1] and not row.ahead else ""),
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
    # Refuses a bad repository before the long run.
    plan_edits(model_repository, dict.fromkeys(old.batching, BatchingSpec()))
    with working_copy(model_repository, in_place=in_place) as folder, LateProgress() as report:
        tuned = tune(folder, old, options, output, report)
    print("the profile was not kept; --output FILE keeps it" if output is None else f"profile: {output}")
    if tuned.agreement is not None:
        print(f"agreement of the two models: {tuned.agreement:.1%}")
    if tuned.rows:
        Console(width=None if sys.stdout.isatty() else 120).print(table_of(tuned.rows))
    if tuned.settings is None:
        slower = "speculative hand-off was slower here" if tuned.rows else "it has the best thresholds already"
        print(f"unchanged: {model_repository}; {slower}")
        return
    ahead = tuned.settings.speculation
    print(f"speculation: {f'depth {ahead.depth}' if ahead else 'as it was'}")
    print(
        f"written: {model_repository}" if in_place else "tuned a temporary copy; --in-place writes into the repository"
    )


if __name__ == "__main__":
    typer.run(main)
