"""Step time by batch size and per extended token, from the sums that a subserver publishes.

The model is t = base(b) + slope * e with a free base per batch size b: a fit within groups. It needs per batch size the
number of steps, their seconds and their extended tokens, and over all steps the sums of t*t, e*e and t*e (see
`tokenrouter.statistics.StepTimes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tokenrouter.metrics_page import Scrape

MIN_STEPS = 10
"""Fewer steps of a batch size say little; it is left out, unless all have fewer."""

SIGNIFICANT = 3.0
"""A slope below so many standard errors is not told from 0."""


@dataclass(frozen=True, slots=True)
class Group:
    """Steps of one batch size: how many, their seconds, their extended tokens."""

    steps: float
    seconds: float
    extended: float


@dataclass(frozen=True, slots=True)
class Sums:
    """Everything that the fit needs. `squares` and `products` are sums over all steps.

    Attributes:
        seconds_squared: sum of t * t.
        extended_squared: sum of e * e.
        seconds_extended: sum of t * e.
    """

    groups: Mapping[int, Group]
    seconds_squared: float
    extended_squared: float
    seconds_extended: float

    @property
    def steps(self) -> float:
        return sum(group.steps for group in self.groups.values())


@dataclass(frozen=True, slots=True)
class StepFit:
    """Times of one model's steps.

    Attributes:
        step_ms: batch size -> milliseconds of a step without extended tokens.
        steps: batch size -> observations behind it.
        extend_ms_per_token: per extended token; 0 if it cannot be told from 0.
        slope_error_ms: standard error of the slope; NaN if it could not be estimated.
        left_out: batch sizes with too few steps, and how many.
    """

    step_ms: dict[int, float]
    steps: dict[int, int]
    extend_ms_per_token: float
    slope_error_ms: float
    extended_tokens: int
    left_out: dict[int, int]


def read_sums(delta: Scrape, model: str) -> Sums:
    """The sums of one model from the difference of two scrapes."""
    groups = {}
    for label in delta.labels("tokenrouter_batch_steps", "batch", model=model):
        names = ("tokenrouter_batch_steps", "tokenrouter_batch_step_seconds", "tokenrouter_batch_extended_tokens")
        steps, seconds, extended = (delta.value(name, model=model, batch=label) for name in names)
        if steps > 0 and seconds > 0:
            groups[int(label)] = Group(steps, seconds, extended)
    names = ("seconds_squared", "extended_squared", "seconds_extended")
    return Sums(dict(sorted(groups.items())), *(delta.value(f"tokenrouter_step_{name}", model=model) for name in names))


def fit(sums: Sums) -> StepFit:
    """Least squares within groups. `sums` has at least one step."""
    slope, error = _slope(sums)
    if not (slope > 0 and slope >= SIGNIFICANT * error) or any(_base(g, slope) <= 0 for g in sums.groups.values()):
        slope = 0.0
    most = max(group.steps for group in sums.groups.values())
    enough = {b: group for b, group in sums.groups.items() if group.steps >= min(MIN_STEPS, most)}
    return StepFit(
        step_ms={batch: 1e3 * _base(group, slope) for batch, group in enough.items()},
        steps={batch: round(group.steps) for batch, group in enough.items()},
        extend_ms_per_token=1e3 * slope,
        slope_error_ms=1e3 * error,
        extended_tokens=round(sum(group.extended for group in sums.groups.values())),
        left_out={b: round(group.steps) for b, group in sums.groups.items() if b not in enough},
    )


def _base(group: Group, slope: float) -> float:
    return (group.seconds - slope * group.extended) / group.steps


def _slope(sums: Sums) -> tuple[float, float]:
    """Seconds per extended token and the standard error; (0, NaN) where all steps of a batch size extend alike."""
    groups = sums.groups.values()
    tt = sums.seconds_squared - sum(g.seconds**2 / g.steps for g in groups)
    ee = sums.extended_squared - sum(g.extended**2 / g.steps for g in groups)
    te = sums.seconds_extended - sum(g.seconds * g.extended / g.steps for g in groups)
    freedom = sums.steps - len(sums.groups) - 1
    if freedom < 1 or ee <= 1e-9 * max(1.0, sums.extended_squared):
        return 0.0, math.nan
    slope = te / ee
    return slope, math.sqrt(max(0.0, tt - slope * te) / freedom / ee)
