"""`python -m perf.speculation`: speculative hand-off beside plain routing, in the real server, with emulated engines.

For every agreement two servers run, whose engines sleep for the profile's step times: one with the best thresholds for
plain routing, one with the best for speculative hand-off. Windows alternate between them, so that both see the same
machine; the throughput is the server's own counter, the median over windows. The ideal is the simulator's, which knows
no overhead. Then both serve the same finite requests: token ids, `routing` and finish reasons must be equal, and the
arrival of tokens is timed. Example:

    python -m perf.speculation --profile configs/profiles/r2r_qwen3_0.6b_32b.yaml --inflight 4 16 --agreement 0.5 0.9
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.emulated.routing import FOLLOWING, routed
from perf.rows import Columns, report, shown, table
from perf.serving.run import Plan
from perf.speculation.study import Study
from tokenrouter.speculation import DEFAULT_DEPTH
from tools.dtmc.profile import load_profile
from tools.progress import LateProgress
from tools.targets import target_file

_RATES: Columns = {
    "in flight": ("inflight", ""),
    "agreement": ("agreement", ""),
    "measured": ("agreement_measured", ".3f"),
    "plain": ("plain_thresholds", ""),
    "tokens/s": ("plain_tokens_per_second", ".1f"),
    "speculative": ("speculative_thresholds", ""),
    "tokens/s ": ("speculative_tokens_per_second", ".1f"),
    "ratio": ("ratio", ".2f"),
    "ideal": ("ideal_ratio", ".2f"),
    "identical": ("identical", ""),
}
_TIMES: Columns = {
    "in flight": ("inflight", ""),
    "agreement": ("agreement", ""),
    **{
        f"{kind} {what} {q}": (f"{kind}_{column}_ms_{q}", ".1f")
        for what, column in (("between tokens", "inter_token"), ("first token", "first_token"))
        for q in ("p50", "p99")
        for kind in ("plain", "speculative")
    },
}


def main(
    profile: Annotated[Path, typer.Option(help="Step times and routing (YAML).")],
    inflight: Annotated[list[int], typer.Option(min=1, help="Responses that run at once.")] = [4, 16],  # noqa: B006
    agreement: Annotated[
        list[float], typer.Option(min=0.0, max=1.0, help="Share of guesses that the large model writes too.")
    ] = [0.5, 0.7, 0.9],  # noqa: B006
    depth: Annotated[int, typer.Option(min=1, help="Most guesses per request.")] = DEFAULT_DEPTH,
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(FOLLOWING)}.")] = "random",
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a window.")] = 6.0,
    repeats: Annotated[int, typer.Option(min=1, help="Windows of each kind.")] = 3,
    warm_up: Annotated[float, typer.Option(min=0.0, help="Seconds before a window.")] = 1.5,
    seed: Annotated[int, typer.Option(help="Of the responses.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write this file.", callback=target_file(".csv"))] = None,
) -> None:
    loaded = routed(load_profile(profile), policy)
    study = Study(loaded, policy, Plan(warm_up, seconds, 1, seed), repeats, depth)
    with LateProgress() as progress:
        rows = list(study.rows(inflight, agreement, progress))
    measured = table((shown(row, _RATES) for row in rows), "emulated: step times are the profile's")
    report(rows, measured, table(shown(row, _TIMES) for row in rows), as_json=as_json, csv_file=csv)
    if not all(row["identical"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main)
