"""`python -m tools.plan`: the smallest deployment that holds objectives of latency under a load, by simulation.

Drives the server's own orchestrator and subservers with a virtual clock. Example:

    python -m tools.plan --profile configs/profiles/r2r_batch_times.yaml --rate 50 --prompt-tokens 200 \
        --output-tokens 300 --ttft-p99-ms 500 --itl-p99-ms 120
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from tools.dtmc.profile import load_profile
from tools.errors import CommandError, reported
from tools.plan.demand import Demand, Objectives, trace_demand
from tools.plan.output import as_json, draw, print_plan
from tools.plan.pool import Pool, cores
from tools.plan.search import Planner
from tools.prices import read_prices
from tools.progress import LateProgress
from tools.targets import IMAGE_SUFFIXES, target_file


@reported(ValueError)
def main(
    profile: Annotated[Path, typer.Option(help="Profile of one replica of each model (YAML).")],
    ttft_p99_ms: Annotated[float, typer.Option(help="Objective: 99 % of first tokens come within so many ms.")],
    itl_p99_ms: Annotated[float, typer.Option(help="Objective: 99 % of times between tokens are at most so many ms.")],
    rate: Annotated[float | None, typer.Option(help="Requests per second; with --trace it runs that fast.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt.")] = None,
    output_tokens: Annotated[
        float | None, typer.Option(help="Mean tokens of a response; lengths are geometric.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded arrivals instead: JSON lines of at_s, prompt_tokens, output_tokens.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="Price of a replica per hour by model (YAML); default: 1 each.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw what was tried.", callback=target_file(*IMAGE_SUFFIXES))
    ] = None,
) -> None:
    """Finds replicas, thresholds and max_inflight that hold the objectives."""
    began_s = time.monotonic()
    loaded = load_profile(profile)
    demand = _demand(rate, prompt_tokens, output_tokens, trace)
    objectives = Objectives(ttft_p99_ms, itl_p99_ms)
    costs = read_prices(prices, loaded)
    with LateProgress() as report, Pool(loaded, demand, objectives, workers=cores()) as pool:
        found = Planner(loaded, demand, objectives, costs, pool, report=report).plan()
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(found, pool.seen, loaded, costs, objectives, plot)
    if json_output:
        typer.echo(json.dumps(as_json(found, loaded, costs, demand, objectives), indent=2))
    else:
        print_plan(found, loaded, costs, time.monotonic() - began_s)


def _demand(rate: float | None, prompt: int | None, output: float | None, trace: Path | None) -> Demand:
    if trace is not None:
        if prompt is not None or output is not None:
            raise CommandError("--trace has the lengths of its requests: leave --prompt-tokens and --output-tokens out")
        return trace_demand(trace, rate)
    if rate is None or prompt is None or output is None:
        raise CommandError("give --rate, --prompt-tokens and --output-tokens, or --trace")
    return Demand(rate, prompt, output)


if __name__ == "__main__":
    typer.run(main)
