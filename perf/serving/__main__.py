"""`python -m perf.serving`: the real server with emulated engines, beside the Markov model's prediction.

Starts a server whose engines sleep for the profile's step times, keeps N endless responses running, and compares
committed tokens per second, from the server's own counter, with the exact chain for the same thresholds. Example:

    python -m perf.serving --profile configs/profiles/r2r_qwen3_0.6b_32b.yaml --inflight 2 4 8 16

Who writes next is drawn by the policies markov, random and me; judged by r2r, citer, collm and rstitch, the real ones,
on logits and hidden states that are uncertain at the profile's rates (or --leave-rate and --return-rate); or replayed
from a --trace. The chain's P and C are those of the policy at these rates, or the trace's means. Models agree as often
as those that the trace was recorded from; --speculation lets the small one go ahead, which the chain does not know.

Everything is *emulated*: the step times are the profile's. What is measured is what the server adds to them. Without
--whole-step the engine's part alone takes the profile's time, and sampling and routing come on top. With it, engines
are faster by what those add (measured first), so that whole steps take the profile's time, as in a profile that
`tools.profile` measured; what is left are hand-offs and the time between steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.emulated.routing import FOLLOWING, routed
from perf.rows import report, table
from perf.serving import tables
from perf.serving.run import Plan
from perf.serving.study import Study
from perf.traces.trace import agreement, read_traces, scripts, traced
from tokenrouter.speculation import Speculation
from tools.dtmc.profile import load_profile
from tools.progress import LateProgress
from tools.targets import target_file

IN_FLIGHT = [1, 2, 4, 8, 16]
SETTINGS = ["eager", "best"]


def main(
    profile: Annotated[Path, typer.Option(help="Profile of the deployment (YAML).")],
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(FOLLOWING)}.")] = "markov",
    leave_rate: Annotated[float | None, typer.Option(help="How often small is left; default: the profile's.")] = None,
    return_rate: Annotated[float | None, typer.Option(help="How often rstitch leaves the large model.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay this file of perf.traces instead of a policy.")] = None,
    inflight: Annotated[list[int], typer.Option(min=1, help="Responses that run at once.")] = IN_FLIGHT,
    thresholds: Annotated[
        list[str], typer.Option(help="eager, best, or like small=1,large=3; a server each.")
    ] = SETTINGS,
    speculation: Annotated[int, typer.Option(min=0, help="Guesses that the small model may hold; 0 = none.")] = 0,
    tuned_for: Annotated[int, typer.Option(help="Also a table for 1..N, and the thresholds for N anywhere.")] = 0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a window.")] = 10.0,
    repeats: Annotated[int, typer.Option(min=1, help="Windows; the median is reported.")] = 3,
    warm_up: Annotated[float, typer.Option(min=0.0, help="Seconds before the first window.")] = 2.0,
    whole_step: Annotated[bool, typer.Option("--whole-step", help="The profile's times are of whole steps.")] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="Add the simulator's throughput.")] = False,
    seed: Annotated[int, typer.Option(help="Of the responses.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write this file.", callback=target_file())] = None,
) -> None:
    loaded, plan, agreed = load_profile(profile), Plan(warm_up, seconds, repeats, seed), None
    if trace is None:
        loaded = routed(loaded, policy, leave_rate=leave_rate, return_rate=return_rate)
    else:
        traces, policy = read_traces(trace), "scripted"
        agreed = agreement(traces)
        loaded, plan = traced(loaded, traces), replace(plan, scripts=scripts(traces))
    ahead = Speculation(speculation) if speculation else None
    study = Study(loaded, policy, plan, inflight, simulate, agreement=agreed, speculation=ahead)
    with LateProgress() as progress:
        study = study.calibrated(progress) if whole_step else study
        rows = list(study.rows(thresholds, tuned_for, progress))
    measured = table(map(tables.figures, rows), "emulated: step times are the profile's")
    report(rows, measured, table(map(tables.details, rows)), as_json=as_json, csv_file=csv)


if __name__ == "__main__":
    run(main)
