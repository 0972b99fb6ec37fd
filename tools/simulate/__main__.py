"""`python -m tools.simulate`: throughput and latency of a deployment profile, by discrete-event simulation.

Drives the server's own orchestrator and subservers with a virtual clock. Example:

    python -m tools.simulate --profile configs/profiles/r2r_qwen3_0.6b_32b.yaml --inflight 4 --thresholds large=3
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tokenrouter.speculation import Speculation
from tokenrouter.timeline import chrome
from tools.dtmc.network import parse_counts
from tools.dtmc.profile import load_profile
from tools.errors import reported
from tools.progress import LateProgress
from tools.simulate.deployment import named_replicas
from tools.simulate.load import Shape
from tools.simulate.meter import Step
from tools.simulate.result import Latency, SimulationResult
from tools.simulate.run import DEFAULT_WARMUP, simulate
from tools.targets import IMAGE_SUFFIXES, target_file


@reported(ValueError)
def main(
    profile: Annotated[Path, typer.Option(help="Profile of the deployment (YAML).")],
    inflight: Annotated[int, typer.Option(help="Requests in flight; with --rate the most that run at once.")],
    thresholds: Annotated[str, typer.Option(help="B per model, e.g. small=1,large=3; left out is 1.")] = "",
    tokens: Annotated[int | None, typer.Option(help="Tokens to count (default 20000).")] = None,
    seconds: Annotated[float | None, typer.Option(help="Simulated seconds to count instead of --tokens.")] = None,
    warm_up_share: Annotated[
        float, typer.Option(help="Share of that length that runs before counting.")
    ] = DEFAULT_WARMUP,
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.")] = 0,
    rate: Annotated[float | None, typer.Option(help="Open loop: arrivals per second, Poisson.")] = None,
    response_tokens: Annotated[float | None, typer.Option(help="Mean response length; default: endless.")] = None,
    shape: Annotated[Shape, typer.Option(help="Lengths of responses.")] = "fixed",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1,
    max_queue_delay_ms: Annotated[float | None, typer.Option(help="Longest wait for a threshold.")] = None,
    think_ms: Annotated[float, typer.Option(min=0.0, help="From a response's end to its client's next request.")] = 0.0,
    speculation: Annotated[
        int, typer.Option(min=0, help="Guesses that the first of two models may hold; 0 = none.")
    ] = 0,
    agreement: Annotated[float, typer.Option(help="Share of guesses that the second model writes too.")] = 1.0,
    replicas: Annotated[str, typer.Option(help="Replicas per model, e.g. small=2,large=1; left out is 1.")] = "",
    timeline: Annotated[
        Path | None, typer.Option(help="Draw the last steps.", callback=target_file(*IMAGE_SUFFIXES))
    ] = None,
    timeline_steps: Annotated[int, typer.Option(help="How many steps to draw.", min=1)] = 60,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write steps and requests as `tokenrouter timeline` does.", callback=target_file()),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulates a deployment with the production scheduler."""
    drawn: deque[Step] = deque(maxlen=timeline_steps)
    began_s = time.perf_counter()
    loaded = load_profile(profile)
    counts = parse_counts(replicas, "--replicas") if replicas else {}
    with LateProgress() as progress:
        result = simulate(
            loaded,
            inflight=inflight,
            thresholds=parse_counts(thresholds, "--thresholds") if thresholds else {},
            tokens=tokens,
            seconds=seconds,
            warmup=warm_up_share,
            seed=seed,
            rate=rate,
            response_tokens=response_tokens,
            shape=shape,
            prompt_tokens=prompt_tokens,
            max_queue_delay_ms=max_queue_delay_ms,
            think_ms=think_ms,
            speculation=Speculation(speculation) if speculation else None,
            agreement=agreement,
            replicas=counts,
            on_step=drawn.append if timeline else None,
            on_recording=(lambda found: chrome.write(found, trace)) if trace else None,
            progress=lambda share: progress("simulating", share),
        )
    if timeline is not None:
        from tools.simulate.timeline import draw_timeline

        timeline.parent.mkdir(parents=True, exist_ok=True)
        lanes = [name for names in named_replicas(loaded, counts).values() for name in names]
        draw_timeline(list(drawn), lanes, timeline, title=f"{inflight} in flight, {thresholds or 'eager'}")
    if json_output:
        typer.echo(json.dumps(asdict(result), indent=2))
    else:
        _print(result, time.perf_counter() - began_s)


def _print(result: SimulationResult, took_s: float) -> None:
    console = Console()
    console.print(
        f"[bold]{result.tokens_per_second:.1f} tokens/s[/] ± {result.standard_error:.1f}; without the luck of the "
        f"draws {result.adjusted_tokens_per_second:.1f} ± {result.adjusted_standard_error:.1f} (standard errors)"
    )
    models = Table("model", "mean batch", "utilisation", "mean wait (ms)", "steps")
    for name in result.mean_batch:
        models.add_row(
            name,
            f"{result.mean_batch[name]:.2f}",
            f"{result.utilisation[name]:.1%}",
            f"{result.mean_wait_ms[name]:.2f}",
            f"{result.steps[name]}",
        )
    console.print(models)
    latencies = Table("latency (ms)", "mean", "p50", "p95", "p99", "count")
    latencies.add_row("time to first token", *_cells(result.time_to_first_token_ms))
    latencies.add_row("between tokens", *_cells(result.inter_token_ms))
    latencies.add_row("end to end", *_cells(result.end_to_end_ms))
    console.print(latencies)
    console.print(
        f"{result.tokens} tokens, {result.requests_finished} responses, {result.handoffs} hand-offs, "
        f"{result.events} events in {result.simulated_s:.1f} simulated s; took {took_s:.1f} s"
    )


def _cells(latency: Latency) -> list[str]:
    values = (latency.mean, latency.p50, latency.p95, latency.p99)
    return [*("-" if value is None else f"{value:.2f}" for value in values), str(latency.count)]


if __name__ == "__main__":
    typer.run(main)
