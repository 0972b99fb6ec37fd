"""Measures cells: through the running server, or for the barrier in one process. Everything is emulated."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from perf.baselines.inprocess import SynchronousBaseline
from perf.baselines.turns import step_sync
from perf.emulated.deployment import EAGER, EmulatedDeployment, Thresholds
from perf.emulated.repository import byte_tokenizer
from perf.load.requests import Load
from perf.paper.cells import Cell, profile_of
from perf.serving.result import drawn_profile, predict
from perf.serving.run import ENDLESS, Plan, measure, work_around_engines
from tools.dtmc.errors import TooLarge
from tools.dtmc.profile import Profile

Key = tuple[str, tuple[int, ...], int]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """One cell.

    Attributes:
        tokens_per_second: mean over the windows.
        spread: largest minus smallest window, relative to the mean; None with one window.
        as_drawn: the Markov model with the routing that the windows drew, or None where it is not solved.
        handoff_ms: mean time of a hand-off to an idle model, or None if there was none.
        around_ms: by how much engines were faster on average, so that whole steps take the profile's time.
    """

    tokens_per_second: float
    spread: float | None
    as_drawn: float | None
    handoff_ms: float | None
    around_ms: float


def measure_cells(cells: Iterable[Cell], plan: Plan, report: Report) -> Iterator[tuple[Key, Measured]]:
    """Every different cell once, as soon as it is measured; a server per policy and thresholds."""
    wanted = sorted({cell.key for cell in cells}, key=lambda key: (key[0], key[1], key[2]))
    around: dict[str, dict[str, float]] = {}
    for (policy, thresholds), keys in groupby(wanted, key=lambda key: key[:2]):
        numbers = [n for _, _, n in keys]
        if policy not in around:
            report(f"{policy}: time around the engines")
            around[policy] = _calibrated(policy, numbers, plan)
        name = f"{policy}, thresholds {' '.join(map(str, thresholds))}" if thresholds else f"{policy}, barrier"
        found = (_served if thresholds else _in_process)(policy, thresholds, numbers, plan, around[policy])
        for n, measured in zip(numbers, _reported(found, name, numbers, report), strict=True):
            yield (policy, thresholds, n), measured


def _reported(found: Iterator[Measured], name: str, numbers: Sequence[int], report: Report) -> Iterator[Measured]:
    for n in numbers:
        report(f"{name}: {n} in flight")
        yield next(found)


def _calibrated(policy: str, numbers: Sequence[int], plan: Plan) -> dict[str, float]:
    """At one number in flight: it depends little on it, see docs/scheduling.md."""
    middle = [sorted(numbers)[len(numbers) // 2]]
    return work_around_engines(profile_of(policy), middle, plan, policy=policy, report=lambda stage: None)


def _served(
    policy: str, thresholds: tuple[int, ...], numbers: Sequence[int], plan: Plan, around_ms: Mapping[str, float]
) -> Iterator[Measured]:
    profile = profile_of(policy)
    named = dict(zip(profile.names, thresholds, strict=True))
    setting = Thresholds("fixed", {0: named}) if max(thresholds) > 1 else EAGER
    most = max(numbers)
    with EmulatedDeployment(profile, policy, most, setting, around_ms).serve() as server:
        for n in numbers:
            windows = measure(server, profile.names, n, plan)
            drawn = _as_drawn(drawn_profile(profile, windows), n, named)
            rates = [window.tokens_per_second for window in windows]
            handoffs = [window.figures[f"mean_handoff_ms.{name}"] for window in windows for name in profile.names]
            handoffs = [ms for ms in handoffs if ms == ms]
            yield Measured(
                tokens_per_second=fmean(rates),
                spread=(max(rates) - min(rates)) / fmean(rates) if len(rates) > 1 else None,
                as_drawn=drawn,
                handoff_ms=median(handoffs) if handoffs else None,
                around_ms=fmean(around_ms.values()),
            )


def _as_drawn(profile: Profile, in_flight: int, thresholds: dict[str, int]) -> float | None:
    try:
        found = predict(profile, in_flight, thresholds)
    except TooLarge:
        return None
    return None if found is None else found.tokens_per_second


def _in_process(
    policy: str, thresholds: tuple[int, ...], numbers: Sequence[int], plan: Plan, around_ms: Mapping[str, float]
) -> Iterator[Measured]:
    """The barrier: engines, sampler, policy and prompts are the server's, but there is no server.

    See `baselines.inprocess`. Engines are as much faster as those of the server, although one process needs less time
    around them; that favours the barrier.
    """
    seconds = plan.seconds * plan.repeats
    tokenizer = byte_tokenizer()
    with tempfile.TemporaryDirectory(prefix="tokenrouter-perf-") as folder:
        deployment = EmulatedDeployment(profile_of(policy), policy, max(numbers), EAGER, around_ms)
        repository = deployment.write(Path(folder))
        for n in numbers:
            with SynchronousBaseline(repository) as driver:
                load = Load(
                    n,
                    lambda index: list(tokenizer.encode(plan.prompt(index)).ids),
                    ENDLESS,
                    warm_up_s=plan.warm_up_s,
                    seconds=seconds,
                    longest_s=seconds,
                )
                rate = driver.run(load, step_sync).tokens_per_second
            yield Measured(rate, None, None, None, fmean(around_ms.values()))
