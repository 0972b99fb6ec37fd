"""`python -m perf.serving`: the real server with emulated engines, beside the Markov model's prediction.

Starts a server whose engines sleep for the profile's step times, keeps N endless responses running, and compares
committed tokens per second, from the server's own counter, with the exact chain for the same thresholds. Example:

    python -m perf.serving --profile configs/profiles/r2r_qwen3_0.6b_32b.yaml --inflight 2 4 8 16

Who writes next is drawn by the policies markov, random and me; judged by r2r, citer, collm and rstitch, the real ones,
on logits and hidden states that are uncertain at the profile's rates (or --leave-rate and --return-rate); or replayed
from a --trace. The chain's P and C are those of the policy at these rates, or the trace's means.

Everything is *emulated*: the step times are the profile's. What is measured is what the server adds to them. Without
--whole-step the engine's part alone takes the profile's time, and sampling and routing come on top. With it, engines
are faster by what those add (measured first), so that whole steps take the profile's time, as in a profile that
`tools.profile` measured; what is left are hand-offs and the time between steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perf.emulated.deployment import EmulatedDeployment, Thresholds
from perf.emulated.routing import FOLLOWING, routed
from perf.serving.result import Result, drawn_profile, predict, rows, to_csv
from perf.serving.run import Plan, measure, work_around_engines
from perf.serving.settings import Best, setting, tuned_for
from perf.traces.trace import read_traces, scripts, traced
from tools.dtmc.errors import DtmcError
from tools.dtmc.profile import Profile, load_profile
from tools.progress import LateProgress
from tools.simulate.run import throughput
from tools.tritonserver.installation import LaunchError


def compare(
    profile: Profile,
    thresholds: Thresholds,
    in_flight: list[int],
    *,
    policy: str,
    plan: Plan,
    best: Best,
    simulated: bool,
    around_ms: dict[str, float],
    report: LateProgress,
) -> Iterator[Result]:
    """Starts one server with these thresholds and measures every number in flight."""
    with EmulatedDeployment(profile, policy, max(in_flight), thresholds, around_ms).serve() as server:
        for done, n in enumerate(in_flight):
            share = done / len(in_flight)
            name = f"{thresholds.label}, {n} in flight"

            def progress(stage: str, name: str = name, share: float = share) -> None:
                report(f"{name}: {stage}", share)

            chosen = thresholds.at(n, profile.names)
            chain = predict(profile, n, chosen)
            windows = measure(server, profile.names, n, plan, progress)
            simulation = throughput(profile, n, chosen) if simulated and chain is not None else None
            drawn = predict(drawn_profile(profile, windows), n, chosen)
            yield Result(
                label=thresholds.label,
                in_flight=n,
                thresholds=chosen,
                windows=tuple(windows),
                chain=chain,
                limit=best.at(n).tokens_per_second,
                as_drawn=None if drawn is None else drawn.tokens_per_second,
                simulated=simulation,
                around_ms=around_ms,
            )


def table_of(results: list[Result]) -> Table:
    """What is printed."""
    names = list(results[0].thresholds)
    table = Table("n", "setting", *(f"B {name}" for name in names), "tokens/s", "spread", "chain", "difference",
                  "as drawn", "efficiency", *(f"batch {name}" for name in names), *(f"step {name}" for name in names),
                  title="emulated: step times are the profile's")  # fmt: skip
    for result in results:
        batch, step = result.middle("mean_batch"), result.middle("mean_step_ms")
        table.add_row(
            str(result.in_flight),
            result.label,
            *(str(result.thresholds[name]) for name in names),
            f"{result.tokens_per_second:.1f}",
            f"{result.spread:.1%}",
            "-" if result.chain is None else f"{result.chain.tokens_per_second:.1f}",
            "-" if result.difference is None else f"{result.difference:+.1%}",
            "-" if result.difference_as_drawn is None else f"{result.difference_as_drawn:+.1%}",
            f"{result.efficiency:.1%}",
            *(f"{batch[name]:.2f}" for name in names),
            *(f"{step[name]:.2f}" for name in names),
        )
    return table


def details_of(results: list[Result]) -> Table:
    """What stands behind it: waits and hand-offs in ms, why steps started, CPU seconds per 1,000 tokens by process."""
    names, processes = list(results[0].thresholds), list(results[0].middle("cpu_s_per_1000_tokens"))
    columns = [*(f"wait {n}" for n in names), *(f"hand-off {n}" for n in names), *(f"started {n}" for n in names)]
    table = Table("n", "setting", *columns, *(f"CPU {process}" for process in processes))
    for result in results:
        wait, handoff = result.middle("mean_wait_ms"), result.middle("mean_handoff_ms")
        cpu = result.middle("cpu_s_per_1000_tokens")
        table.add_row(
            str(result.in_flight),
            result.label,
            *(f"{wait[name]:.2f}" for name in names),
            *(f"{handoff[name]:.2f}" for name in names),
            *(", ".join(f"{why} {share:.0%}" for why, share in result.reasons(name).items()) for name in names),
            *(f"{cpu[process]:.2f}" for process in processes),
        )
    return table


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser(prog="python -m perf.serving", description=(__doc__ or "").partition("\n\n")[2])
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--profile", type=Path, required=True, help="profile of the deployment (YAML)")
    parse.add_argument("--engine", choices=["emulated"], default="emulated", help="the profile's step times, slept")
    parse.add_argument("--policy", default="markov", help=f"one of {', '.join(FOLLOWING)} (default: markov)")
    parse.add_argument("--leave-rate", type=float, help="how often the small model is left (default: the profile's)")
    parse.add_argument("--return-rate", type=float, help="how often rstitch leaves the large model")
    parse.add_argument("--trace", type=Path, help="replay this file of perf.traces instead of a policy")
    parse.add_argument("--inflight", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="responses that run at once")
    parse.add_argument(
        "--thresholds", nargs="+", default=["eager", "best"], help="eager, best, or like small=1,large=3; a server each"
    )
    parse.add_argument("--tuned-for", type=int, help="also a table for 1..N, and the thresholds for N everywhere")
    parse.add_argument("--seconds", type=float, default=10.0, help="length of a window")
    parse.add_argument("--repeats", type=int, default=3, help="windows; the median is reported")
    parse.add_argument("--warm-up", type=float, default=2.0, help="seconds before the first window")
    parse.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="clients get every token")
    parse.add_argument("--whole-step", action="store_true", help="the profile's times are those of whole steps")
    parse.add_argument("--simulate", action="store_true", help="add the simulator's throughput")
    parse.add_argument("--seed", type=int, default=1, help="of the responses")
    parse.add_argument("--json", action="store_true", help="print JSON")
    parse.add_argument("--csv", type=Path, help="also write this file")
    return parse


def routing_of(args: argparse.Namespace, plan: Plan) -> tuple[Profile, str, Plan]:
    """The profile with the routing that will be measured, the policy that makes it, and the plan.

    Raises:
        ProfileError: the file is no profile or no trace, or the policy cannot route like it.
    """
    profile = load_profile(args.profile)
    if args.trace is None:
        routing = {"leave_rate": args.leave_rate, "return_rate": args.return_rate}
        return routed(profile, args.policy, **routing), args.policy, plan
    traces = read_traces(args.trace)
    return traced(profile, traces), "scripted", replace(plan, scripts=scripts(traces))


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parse = parser()
    args = parse.parse_args(arguments)
    if min(args.inflight) < 1 or args.repeats < 1 or args.seconds <= 0 or args.warm_up < 0:
        parse.error("--inflight and --repeats are at least 1, --seconds is positive")
    plan = Plan(args.warm_up, args.seconds, args.repeats, args.stream, args.seed)
    results: list[Result] = []
    try:
        profile, policy, plan = routing_of(args, plan)
        with LateProgress() as report:
            best = Best(profile, report)
            settings = [setting(name, args.inflight, best) for name in args.thresholds]
            settings += tuned_for(args.tuned_for, best) if args.tuned_for else []
            around_ms: dict[str, float] = {}
            if args.whole_step:
                around_ms = work_around_engines(
                    profile, args.inflight, plan, policy=policy, report=lambda stage: report("calibrating", 0.0)
                )
            for thresholds in settings:
                results += compare(
                    profile, thresholds, args.inflight, policy=policy, plan=plan, best=best,
                    simulated=args.simulate, around_ms=around_ms, report=report,
                )  # fmt: skip
    except (DtmcError, LaunchError, RuntimeError, TimeoutError) as exc:
        sys.exit(f"error: {exc}")
    table = [{"policy": policy, **row} for row in rows(results)]
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        args.csv.write_text(to_csv(table))
    if args.json:
        print(json.dumps(table, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 170)
        console.print(table_of(results))
        console.print(details_of(results))


if __name__ == "__main__":
    main()
