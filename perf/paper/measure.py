"""Measures cells: a running server with emulated engines, or the barrier's single process with the same engines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from perf.baselines.inprocess import SynchronousBaseline
from perf.baselines.turns import step_sync
from perf.emulated.deployment import EAGER, EmulatedDeployment, Thresholds
from perf.emulated.repository import byte_tokenizer
from perf.load.requests import Load
from perf.paper.cells import Cell, Key, profile_of
from perf.serving.result import drawn_profile
from perf.serving.run import ENDLESS, Plan, measure, work_around_engines
from tools.dtmc.errors import TooLarge
from tools.dtmc.profile import Profile
from tools.tune.measure import predicted

Report = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """One cell.

    Attributes:
        tokens_per_second: mean over the windows.
        around_ms: by how much engines were faster on average, so that whole steps take the profile's time.
        spread: largest minus smallest window, relative to the mean; None with one window.
        as_drawn: the Markov model with the routing that the windows drew, or None where it is not solved.
        handoff_ms: mean time of a hand-off to an idle model, or None if there was none.
    """

    tokens_per_second: float
    around_ms: float
    spread: float | None = None
    as_drawn: float | None = None
    handoff_ms: float | None = None


def measure_cells(cells: Iterable[Cell], plan: Plan, report: Report) -> Iterator[tuple[Key, Measured]]:
    """Every different cell once, as soon as it is measured; a server per policy and thresholds."""
    around: dict[str, dict[str, float]] = {}
    for (policy, thresholds), keys in groupby(sorted({cell.key for cell in cells}), key=lambda key: key[:2]):
        numbers = [n for _, _, n in keys]
        profile = profile_of(policy)
        if policy not in around:
            report(f"{policy}: time around the engines")
            # At one number in flight: it depends little on it, see docs/scheduling.md.
            middle = [numbers[len(numbers) // 2]]
            around[policy] = work_around_engines(profile, middle, plan, policy=policy, report=lambda stage: None)
        named = dict(zip(profile.names, thresholds, strict=False))
        setting = Thresholds("fixed", {0: named}) if max(thresholds, default=1) > 1 else EAGER
        deployment = EmulatedDeployment(profile, policy, max(numbers), setting, around[policy])
        name = f"thresholds {' '.join(map(str, thresholds))}" if thresholds else "barrier"
        with (_server if thresholds else _barrier)(deployment, plan) as measured:
            for n in numbers:
                report(f"{policy}, {name}: {n} in flight")
                yield (policy, thresholds, n), measured(n)


@contextmanager
def _server(deployment: EmulatedDeployment, plan: Plan) -> Iterator[Callable[[int], Measured]]:
    profile = deployment.profile

    def measured(n: int) -> Measured:
        windows = measure(server, profile.names, n, plan)
        rates = [window.tokens_per_second for window in windows]
        handoffs = [window.figures[f"mean_handoff_ms.{name}"] for window in windows for name in profile.names]
        handoffs = [ms for ms in handoffs if ms == ms]
        return Measured(
            tokens_per_second=fmean(rates),
            around_ms=fmean(deployment.around_ms.values()),
            spread=(max(rates) - min(rates)) / fmean(rates) if len(rates) > 1 else None,
            as_drawn=_as_drawn(drawn_profile(profile, windows), n, deployment.thresholds.at(n, profile.names)),
            handoff_ms=median(handoffs) if handoffs else None,
        )

    with deployment.serve() as server:
        yield measured


def _as_drawn(profile: Profile, in_flight: int, thresholds: dict[str, int]) -> float | None:
    try:
        return predicted(profile, in_flight, thresholds)
    except TooLarge:
        return None


@contextmanager
def _barrier(deployment: EmulatedDeployment, plan: Plan) -> Iterator[Callable[[int], Measured]]:
    """Engines, sampler, policy and prompts are the server's, but there is no server.

    See `baselines.inprocess`. Engines are as much faster as those of the server, although one process needs less time
    around them; that favours the barrier.
    """
    tokenizer, seconds = byte_tokenizer(), plan.seconds * plan.repeats

    def prompt(index: int) -> list[int]:
        return list(tokenizer.encode(plan.prompt(index)).ids)

    def measured(n: int) -> Measured:
        load = Load(n, prompt, ENDLESS, warm_up_s=plan.warm_up_s, seconds=seconds, longest_s=seconds)
        with SynchronousBaseline(repository) as driver:
            rate = driver.run(load, step_sync).tokens_per_second
        return Measured(rate, fmean(deployment.around_ms.values()))

    with tempfile.TemporaryDirectory(prefix="tokenrouter-perf-") as folder:
        repository = deployment.write(Path(folder))
        yield measured
