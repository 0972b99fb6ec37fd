"""`python -m perf.load.soak --minutes 10 --inflight 16`: serves a repository, loads it, and checks what must hold.

Closed loop of streamed requests with real prompts. Checks: no request fails; none takes longer than the watchdog;
resident and private memory, descriptors and threads of tritonserver and of every model's process stay flat after the
warm-up; all KV blocks are returned; the server's log has no error. Ends with exit code 1 if one of them does not hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.load.soak.clients import Workload
from perf.load.soak.plot import plot
from perf.load.soak.run import Plan, soak
from perf.load.soak.table import markdown
from perf.rows import write_rows
from tools.load import PROMPTS, read_prompts
from tools.progress import LateProgress
from tools.targets import IMAGE_SUFFIXES, target_file
from tools.tritonserver.server import TritonServer

MIXED = ("", "rstitch", "r2r", "citer", "collm", "query_level", "random")


def main(
    minutes: Annotated[float, typer.Option(help="Of load.")] = 10.0,
    inflight: Annotated[int, typer.Option(help="Requests that run at once.")] = 16,
    warm_up: Annotated[float, typer.Option(help="Minutes that are not judged; -1: a fifth of the time.")] = -1.0,
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    prompts: Annotated[Path, typer.Option(help='JSON lines, each {"prompt": "..."}.')] = PROMPTS,
    max_tokens: Annotated[int, typer.Option(help="Of a response.")] = 160,
    mixed: Annotated[bool, typer.Option("--mixed", help="Requests name different policies, in turn.")] = False,
    cancel_every: Annotated[int, typer.Option(help="Every so many-th request is cancelled; 0 for none.")] = 0,
    watchdog: Annotated[float, typer.Option(help="Seconds after which a response has hung.")] = 60.0,
    limit: Annotated[float, typer.Option(help="Relative growth of memory that counts as flat.")] = 0.02,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write all samples.", callback=target_file())] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the outcome.", callback=target_file())] = None,
    image: Annotated[
        Path | None, typer.Option("--plot", help="Draw memory over time.", callback=target_file(*IMAGE_SUFFIXES))
    ] = None,
) -> None:
    seconds = 60.0 * minutes
    plan = Plan(seconds, inflight, seconds / 5 if warm_up < 0 else 60.0 * warm_up, min(2.0, seconds / 30), limit)
    workload = Workload(read_prompts(prompts), max_tokens, MIXED if mixed else ("",), cancel_every, watchdog)
    with TritonServer(model_repository) as server, LateProgress() as progress:
        outcome = soak(server, workload, plan, progress)
    facts = outcome.facts(plan, workload)
    print(markdown(facts))
    if csv_path:
        write_rows(csv_path, [sample.row() for sample in outcome.samples])
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(facts, indent=2) + "\n")
    if image:
        title = f"{inflight} requests in flight, {outcome.requests['stop']} finished"
        plot(outcome.samples, image, title=title, warm_up_s=plan.warm_up_s)
    if outcome.failures:
        print("\n".join(f"FAILED: {failure}" for failure in outcome.failures))
        raise typer.Exit(1)
    print("all requests answered, no hang, memory flat, all KV returned, no error in the server's log")


if __name__ == "__main__":
    run(main, ValueError)
