"""`python -m perf.hosts`: what a hand-off to another host costs, and what becomes of throughput.

Emulated models with the step times and the routing of a profile; one server, in which every way to the large model has
an entry model of its own: this host's socket, TLS on loopback, and TLS over links of ours with a delay. Ways alternate.
Beside what is measured stands what the simulator predicts from the hand-off time that was measured, and the thresholds
that the Markov model takes for the best then. Example:

    python -m perf.hosts --inflight 4 16 64 --delays-ms 0 0.1 0.5 2
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from perf.command import run
from perf.emulated.deployment import EmulatedDeployment
from perf.hosts.ways import TLS, UNIX, Way, delayed, serve
from perf.hosts.windows import Plan, measure
from perf.rows import Columns, report, shown, table
from tokenrouter.speculation import Speculation
from tools.dtmc.errors import DtmcError
from tools.dtmc.profile import Profile, load_profile
from tools.dtmc.search import search
from tools.progress import LateProgress
from tools.simulate.run import simulate
from tools.targets import target_file

_PROFILE = Path("configs/profiles/r2r_qwen3_0.6b_32b.yaml")
_DELAYS_MS = [0.0, 0.1, 0.5, 2.0]
_MOST_SEARCHED = 8
_COLUMNS: Columns = {
    "in flight": ("inflight", ""),
    "way": ("way", ""),
    "hand-off p50, ms": ("handoff_p50_ms", ".2f"),
    "p99": ("handoff_p99_ms", ".2f"),
    "mean": ("handoff_mean_ms", ".2f"),
    "tokens/s": ("tokens_per_second", ".0f"),
    "predicted": ("predicted", ".0f"),
    "CPU s per 1,000 tokens": ("cpu_s_per_1000_tokens", ".2f"),
    "best thresholds": ("thresholds", ""),
}


def predicted(profile: Profile, in_flight: int, handoff_ms: float) -> dict[str, Any]:
    """Tokens per second of the eager deployment with this hand-off time, and the thresholds that are the best then."""
    slow = replace(profile, handoff_ms=handoff_ms)
    rate = simulate(slow, inflight=in_flight, thresholds={}, tokens=20_000).tokens_per_second
    thresholds = ""
    if in_flight <= _MOST_SEARCHED:
        # The Markov model counts in quanta, of which a hand-off takes a whole number.
        quanta = round(handoff_ms / profile.delta_ms) * profile.delta_ms
        try:
            found = search(replace(profile, handoff_ms=quanta), in_flight)
            thresholds = ", ".join(f"{name} {number}" for name, number in found.thresholds.items())
        except DtmcError as exc:
            thresholds = f"none: {exc}"
    return {"predicted": rate, "thresholds": thresholds}


def rows_of(
    profile: Profile, ways: Sequence[Way], inflight: Sequence[int], plan: Plan, ahead: int
) -> list[dict[str, Any]]:
    """One row per number in flight and way."""
    speculation = Speculation(ahead) if ahead else None
    deployment = EmulatedDeployment(profile, "markov", max(inflight), speculation=speculation)
    rows = []
    with serve(deployment.write, ways, profile.names[-1]) as server, LateProgress() as progress:
        for number in inflight:
            measured = measure(server, ways, number, plan, lambda text: progress(text, 0.0))
            for way in ways:
                own = measured[way.name]
                handoff_ms = own["handoff_mean_ms"]
                more = {} if ahead or isnan(handoff_ms) else predicted(profile, number, handoff_ms)
                rows.append({"inflight": number, "way": way.label, "speculation": ahead, **own, **more})
    return rows


def main(
    profile: Annotated[Path, typer.Option(help="Step times and routing (YAML).")] = _PROFILE,
    inflight: Annotated[list[int], typer.Option(min=1, help="Requests at once.")] = [4, 16, 64],  # noqa: B006
    delays_ms: Annotated[list[float], typer.Option(min=0, help="Of links, one way.")] = _DELAYS_MS,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a window.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Windows of every way.")] = 3,
    speculation: Annotated[int, typer.Option(min=0, help="Guesses that the small model may hold; 0 = none.")] = 0,
    output: Annotated[Path | None, typer.Option(help="CSV file to write.", callback=target_file(".csv"))] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    ways = [UNIX, TLS, *(delayed(delay_ms) for delay_ms in delays_ms)]
    load = os.getloadavg()[0]
    rows = rows_of(load_profile(profile), ways, inflight, Plan(seconds, rounds=rounds), speculation)
    title = f"load average {load:.1f} before"
    report(rows, table([shown(row, _COLUMNS) for row in rows], title), as_json=as_json, csv_file=output)


if __name__ == "__main__":
    run(main, ValueError)
