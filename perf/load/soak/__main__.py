"""`python -m perf.load.soak --minutes 10 --inflight 16`: serves a repository, loads it, and checks what must hold.

Closed loop of streamed requests with real prompts. Checks: no request fails; none takes longer than the watchdog;
resident and private memory, descriptors and threads of tritonserver and of every model's process stay flat after the
warm-up; all KV blocks are returned; the server's log has no error. Ends with exit code 1 if one of them does not hold.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from perf.load.prompts import DEMO, load_prompts
from perf.load.soak.load import ClosedLoop, Workload
from perf.load.soak.memory import MEASURES, Sampler
from perf.load.soak.plot import plot
from perf.load.soak.run import Outcome, Plan, soak
from tools.tritonserver.installation import LaunchError
from tools.tritonserver.server import TritonServer

MIXED = ("", "rstitch", "r2r", "citer", "collm", "query_level", "random")
_REPORT_S = 30.0

console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


def main(
    minutes: Annotated[float, typer.Option(help="Of load.")] = 10.0,
    inflight: Annotated[int, typer.Option(help="Requests that run at once.")] = 16,
    warm_up: Annotated[float, typer.Option(help="Minutes that are not judged; -1: a fifth of the time.")] = -1.0,
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    prompts: Annotated[Path, typer.Option(help='JSON lines, each {"prompt": "..."}.')] = DEMO,
    max_tokens: Annotated[int, typer.Option(help="Of a response.")] = 160,
    mixed: Annotated[bool, typer.Option("--mixed", help="Requests name different policies, in turn.")] = False,
    cancel_every: Annotated[int, typer.Option(help="Every so many-th request is cancelled; 0 for none.")] = 0,
    watchdog: Annotated[float, typer.Option(help="Seconds after which a response has hung.")] = 60.0,
    limit: Annotated[float, typer.Option(help="Relative growth of memory that counts as flat.")] = 0.02,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write all samples.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the outcome.")] = None,
    image: Annotated[Path | None, typer.Option("--plot", help="Draw memory over time.")] = None,
) -> None:
    """Runs the soak and prints the outcome."""
    seconds = 60.0 * minutes
    plan = Plan(seconds, inflight, seconds / 5 if warm_up < 0 else 60.0 * warm_up, min(2.0, seconds / 30), limit)
    try:
        texts = load_prompts(prompts)
        policies = MIXED if mixed else ("",)
        workload = Workload(texts, max_tokens, policies, cancel_every, watchdog)
        with TritonServer(model_repository) as server:
            outcome = soak(server, workload, plan, _reporter())
    except (LaunchError, OSError, ValueError) as exc:
        console.print(f"error: {exc}", markup=False)
        raise typer.Exit(2) from exc
    _print(outcome)
    title = f"{inflight} requests in flight, {outcome.requests.get('stop', 0)} finished"
    if csv_path:
        _write_samples(outcome, csv_path)
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(_facts(outcome, plan, workload), indent=2) + "\n")
    if image:
        plot(outcome.samples, image, title=title, warm_up_s=plan.warm_up_s)
    raise typer.Exit(1 if outcome.failures else 0)


def _reporter() -> Callable[[float, ClosedLoop, Sampler], None]:
    """A line every half minute."""
    due = 0.0

    def report(elapsed: float, loop: ClosedLoop, sampler: Sampler) -> None:
        nonlocal due
        if elapsed < due:
            return
        due += _REPORT_S
        memory = ", ".join(f"{name} {look.values['rss_mib']:.1f}" for name, look in sampler.newest().items())
        console.print(f"{elapsed / 60:5.1f} min  {loop.requests:6d} requests  {loop.tokens:8d} tokens  MiB: {memory}")

    return report


def _print(outcome: Outcome) -> None:
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(outcome.requests.items()))
    console.print(
        f"{outcome.seconds:.0f} s, {sum(outcome.requests.values())} requests ({reasons}), {outcome.tokens} tokens, "
        f"{outcome.tokens / outcome.seconds:.0f} tokens/s; the longest response took {outcome.longest_s:.2f} s"
    )
    table = Table("process", "measure", "first third", "last third", "growth", "slope per hour", "flat")
    for row in outcome.growth:
        table.add_row(
            row.process, row.measure, f"{row.first:.1f}", f"{row.last:.1f}", f"{row.relative:+.2%}",
            f"{row.slope_per_hour:+.1f}", "yes" if row.flat else "NO",
        )  # fmt: skip
    console.print(table)
    for failure in outcome.failures:
        console.print(f"FAILED: {failure}", markup=False)
    if not outcome.failures:
        console.print("all requests answered, no hang, memory flat, all KV returned, no error in the server's log")


def _facts(outcome: Outcome, plan: Plan, workload: Workload) -> dict[str, object]:
    return {
        "in_flight": plan.in_flight,
        "seconds": round(outcome.seconds, 1),
        "warm_up_s": plan.warm_up_s,
        "policies": list(workload.policies),
        "cancel_every": workload.cancel_every,
        "requests": outcome.requests,
        "tokens": outcome.tokens,
        "tokens_per_second": round(outcome.tokens / outcome.seconds, 1),
        "longest_response_s": round(outcome.longest_s, 3),
        "held_after": outcome.held,
        "log_errors": outcome.log_errors,
        "failures": outcome.failures,
        "growth": [
            {
                "process": row.process,
                "measure": row.measure,
                "first": round(row.first, 2),
                "last": round(row.last, 2),
                "relative": round(row.relative, 5),
                "slope_per_hour": round(row.slope_per_hour, 2),
                "flat": row.flat,
            }
            for row in outcome.growth
        ],
    }


def _write_samples(outcome: Outcome, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("at_s", "process", *MEASURES))
        for sample in outcome.samples:
            values = (f"{sample.values[measure]:.2f}".removesuffix(".00") for measure in MEASURES)
            writer.writerow((f"{sample.at_s:.1f}", sample.process, *values))


if __name__ == "__main__":
    typer.run(main)
