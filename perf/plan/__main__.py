"""`python -m perf.plan`: what the planner predicts of a deployment, beside the real server, in an open loop.

A server runs for every `--replicas`, with emulated engines that sleep for the profile's step times, less what the
server's own work adds to a step. It is sent Poisson arrivals, as they are due, whether others are done or not. The
simulator gets the same requests at the same times, with the mean time of a hand-off that the server's histogram has, so
that both have the same luck. Times of tokens are the client's: message by message. What a lone request takes more than
in the simulator, its way from the client to the first step and back, is added to the simulated first tokens. Example:

    python -m perf.plan --profile configs/profiles/r2r_batch_times.yaml --replicas small=1,large=1 small=1,large=2
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.plan.study import Study
from perf.rows import Columns, report, shown, table
from tools.dtmc.network import parse_counts
from tools.dtmc.profile import load_profile
from tools.plan.demand import Demand
from tools.progress import LateProgress
from tools.targets import target_file

_COLUMNS: Columns = {
    "replicas": ("replicas", ""),
    "requests/s": ("rate", "g"),
    "requests": ("requests", ""),
    **{
        f"{heading} {q} {kind}": (f"{column}_{q}_ms.{kind}", ".1f")
        for heading, column in (("first", "ttft"), ("between", "itl"))
        for q in ("p50", "p99")
        for kind in ("served", "simulated")
    },
    "worst": ("worst_difference", "+.1%"),
}


def main(
    profile: Annotated[Path, typer.Option(help="Step times and routing (YAML).")],
    replicas: Annotated[list[str], typer.Option(help="Deployments, e.g. small=1,large=2.")] = [  # noqa: B006
        "small=1,large=1",
        "small=1,large=2",
    ],
    rate: Annotated[float, typer.Option(min=0.01, help="Requests per second.")] = 0.5,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 100,
    output_tokens: Annotated[float, typer.Option(min=1, help="Mean tokens of a response; geometric.")] = 60.0,
    requests: Annotated[int, typer.Option(min=2, help="That are counted.")] = 100,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before those.")] = 10,
    calibrate: Annotated[
        bool, typer.Option("--calibrate/--no-calibrate", help="Make engines faster by what comes on top of them.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and routing.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write this file.", callback=target_file(".csv"))] = None,
) -> None:
    study = Study(load_profile(profile), Demand(rate, prompt_tokens, output_tokens), requests, warm_up, seed)
    with LateProgress() as progress:
        if calibrate:
            study = study.calibrated(progress)
        rows = [study.row(parse_counts(each, "--replicas"), progress) for each in replicas]
    title = "emulated: step times are the profile's; times in ms"
    report(rows, table((shown(row, _COLUMNS) for row in rows), title), as_json=as_json, csv_file=csv)


if __name__ == "__main__":
    run(main, ValueError)
