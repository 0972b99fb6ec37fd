"""Random deployments in which the Markov model and the simulator compute the same closed system.

2 or 3 models, 2 to 8 requests; routing, commits, step times by batch size, hand-off delays, maximum batches, feasible
thresholds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tools.dtmc.profile import ModelProfile, Profile

DELTA_MS = 0.5
MOST_REQUESTS = {2: 8, 3: 5}
"""By number of models; keeps the chain small."""


@dataclass(frozen=True, slots=True)
class Case:
    profile: Profile
    inflight: int
    thresholds: dict[str, int]


def random_cases(count: int, *, seed: int = 0) -> Iterator[Case]:
    """The first `count` cases of a seed; every second one has three models."""
    draw = random.Random(seed)
    for index in range(count):
        yield _case(draw, models=2 + index % 2)


def _case(draw: random.Random, *, models: int) -> Case:
    names = ("small", "medium", "large")[:models] if models == 3 else ("small", "large")
    inflight = draw.randint(2, MOST_REQUESTS[models])
    profile = Profile(
        delta_ms=DELTA_MS,
        models={name: _model(draw, inflight) for name in names},
        entry=names[0],
        routing={name: _row(draw, names) for name in names},
        commit={name: _commits(draw, i, names) for i, name in enumerate(names)},
        handoff_ms=draw.choice((0.0, 0.0, DELTA_MS, 2 * DELTA_MS)),
    )
    return Case(profile, inflight, _thresholds(draw, profile, inflight))


def _model(draw: random.Random, inflight: int) -> ModelProfile:
    """Times on the grid at every batch size, so that chain and simulator need no rounding."""
    ticks = draw.randint(4, 40)
    table = {1: ticks * DELTA_MS}
    for batch in range(2, inflight + 1):
        ticks += draw.choice((0, 0, 0, 1, 1, 2, 4))
        table[batch] = ticks * DELTA_MS
    limit = draw.randint(1, inflight) if draw.random() < 0.25 else None
    step_ms: float | dict[int, float] = table[1] if draw.random() < 0.3 else table
    return ModelProfile(step_ms=step_ms, max_batch=limit)


def _row(draw: random.Random, names: tuple[str, ...]) -> dict[str, float]:
    weights = [draw.expovariate(1.0) + 0.02 for _ in names]
    return {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)}


def _commits(draw: random.Random, index: int, names: tuple[str, ...]) -> dict[str, float]:
    """Only a move up may discard its token, so that no cycle is without a token."""
    return {name: float(draw.random() < 0.5) if target > index else 1.0 for target, name in enumerate(names)}


def _thresholds(draw: random.Random, profile: Profile, inflight: int) -> dict[str, int]:
    """Feasible: the sum of (B - 1) is below `inflight`."""
    slack, thresholds = draw.randint(0, inflight - 1), {}
    for name in draw.sample(profile.names, len(profile.names)):
        most = min(slack, (profile.models[name].max_batch or inflight) - 1)
        extra = draw.randint(0, most)
        thresholds[name], slack = 1 + extra, slack - extra
    return thresholds
