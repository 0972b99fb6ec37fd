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

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.emulated.deployment import EmulatedDeployment, Thresholds
from perf.emulated.routing import FOLLOWING, routed
from perf.rows import show, table, write_rows
from perf.serving.result import Result, drawn_profile, predict
from perf.serving.run import Plan, measure, work_around_engines
from perf.serving.settings import Best, setting, tuned_for
from perf.serving.tables import details, figures
from perf.serving.window import Window
from perf.traces.trace import read_traces, scripts, traced
from tools.dtmc.profile import Profile, load_profile
from tools.progress import LateProgress
from tools.simulate.run import throughput

IN_FLIGHT = [1, 2, 4, 8, 16]
SETTINGS = ["eager", "best"]


@dataclass(frozen=True)
class Study:
    """Everything that all settings of thresholds share.

    Attributes:
        profile: step times and routing.
        policy: what makes the routing.
        plan: how to measure.
        in_flight: what to measure.
        simulated: add the simulator's throughput.
        around_ms: see `EmulatedDeployment`.
    """

    profile: Profile
    policy: str
    plan: Plan
    in_flight: Sequence[int]
    simulated: bool = False
    around_ms: Mapping[str, float] = field(default_factory=dict)

    def calibrated(self, report: LateProgress) -> Study:
        """The same with engines that are faster by what comes on top of them."""
        around_ms = work_around_engines(
            self.profile, self.in_flight, self.plan, policy=self.policy, report=lambda _: report("calibrating", 0.0)
        )
        return replace(self, around_ms=around_ms)

    def results(self, thresholds: Thresholds, best: Best, report: LateProgress) -> Iterator[Result]:
        """Starts one server with these thresholds and measures every number in flight."""
        names, most = self.profile.names, max(self.in_flight)
        deployment = EmulatedDeployment(self.profile, self.policy, most, thresholds, self.around_ms)
        with deployment.serve() as server:
            for done, n in enumerate(self.in_flight):

                def told(stage: str, n: int = n, share: float = done / len(self.in_flight)) -> None:
                    report(f"{thresholds.label}, {n} in flight: {stage}", share)

                windows = tuple(measure(server, names, n, self.plan, told))
                yield self._result(thresholds, n, windows, best.at(n).tokens_per_second)

    def _result(self, thresholds: Thresholds, n: int, windows: tuple[Window, ...], limit: float) -> Result:
        chosen = thresholds.at(n, self.profile.names)
        chain = predict(self.profile, n, chosen)
        drawn = predict(drawn_profile(self.profile, windows), n, chosen)
        return Result(
            label=thresholds.label,
            in_flight=n,
            thresholds=chosen,
            windows=windows,
            chain=chain,
            limit=limit,
            as_drawn=None if drawn is None else drawn.tokens_per_second,
            simulated=throughput(self.profile, n, chosen) if self.simulated and chain is not None else None,
            around_ms=self.around_ms,
        )


def replayed(profile: Profile, trace: Path, plan: Plan) -> tuple[Profile, Plan]:
    """The profile with the mean routing of a file of traces, and a plan that replays them."""
    traces = read_traces(trace)
    return traced(profile, traces), replace(plan, scripts=scripts(traces))


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
    tuned: Annotated[
        int, typer.Option("--tuned-for", help="Also a table for 1..N, and the thresholds for N everywhere.")
    ] = 0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a window.")] = 10.0,
    repeats: Annotated[int, typer.Option(min=1, help="Windows; the median is reported.")] = 3,
    warm_up: Annotated[float, typer.Option(min=0.0, help="Seconds before the first window.")] = 2.0,
    stream: Annotated[bool, typer.Option(help="Clients get every token.")] = True,
    whole_step: Annotated[bool, typer.Option("--whole-step", help="The profile's times are of whole steps.")] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="Add the simulator's throughput.")] = False,
    seed: Annotated[int, typer.Option(help="Of the responses.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write this file.")] = None,
) -> None:
    loaded, plan = load_profile(profile), Plan(warm_up, seconds, repeats, stream, seed)
    if trace is None:
        loaded = routed(loaded, policy, leave_rate=leave_rate, return_rate=return_rate)
    else:
        policy = "scripted"
        loaded, plan = replayed(loaded, trace, plan)
    study = Study(loaded, policy, plan, inflight, simulate)
    with LateProgress() as report:
        best = Best(loaded, report)
        settings = [setting(name, inflight, best) for name in thresholds]
        settings += tuned_for(tuned, best) if tuned else []
        study = study.calibrated(report) if whole_step else study
        results = [result for chosen in settings for result in study.results(chosen, best, report)]
    rows = [{"policy": policy, **result.row()} for result in results]
    if csv:
        write_rows(csv, rows)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        show(
            table([figures(row) for row in rows], "emulated: step times are the profile's"),
            table([details(row) for row in rows]),
        )


if __name__ == "__main__":
    run(main)
