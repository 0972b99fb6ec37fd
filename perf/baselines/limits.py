"""Exact throughput of the synchronous baselines without any overhead: what no implementation of them can exceed.

A closed system as in `tools.dtmc`: n endless responses, constant step times by batch size, routing probabilities P and
committed tokens C. Between two turns the state is the number of requests at each model and the model that ran last, so
the chain is small and its stationary distribution is solved directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from perf.baselines.turns import Rule, Thresholds
from tools.dtmc.profile import Profile

Counts = tuple[int, ...]
State = tuple[Counts, int]
Spread = Mapping[Counts, float]


@dataclass(frozen=True)
class _Turn:
    """One state: where it leads, tokens that are committed on average, and how long it takes."""

    following: dict[State, float]
    tokens: float
    ms: float


def throughput(profile: Profile, in_flight: int, rule: Rule) -> float:
    """Tokens per second of a rule with no time between steps.

    Args:
        profile: step times, routing, committed tokens.
        in_flight: n, at least 1.
        rule: see `turns`.
    """
    network = _network(profile)
    turns: dict[State, _Turn] = {}
    start = (tuple(in_flight if name == profile.entry else 0 for name in profile.names), len(profile.names) - 1)
    todo: list[State] = [start]
    while todo:
        state = todo.pop()
        if state not in turns:
            turns[state] = network.turn(state, rule)
            todo.extend(turns[state].following)
    weights = _stationary(turns)
    tokens = sum(weight * turn.tokens for weight, turn in zip(weights, turns.values(), strict=True))
    return float(1e3 * tokens / sum(weight * turn.ms for weight, turn in zip(weights, turns.values(), strict=True)))


def no_wait(profile: Profile, in_flight: int) -> float:
    """Tokens per second if no request ever waited for anything: no schedule whatever can exceed this."""
    return in_flight * throughput(profile, 1, lambda counts, last: (next(i for i, c in enumerate(counts) if c),))


def best_thresholds(profile: Profile, in_flight: int) -> tuple[float, Thresholds]:
    """Model-sync at its best: the largest throughput over all thresholds, and the thresholds."""
    larger = range(1, in_flight + 1)
    rules = [Thresholds((1, *rest)) for rest in product(larger, repeat=len(profile.names) - 1)]
    return max(((throughput(profile, in_flight, rule), rule) for rule in rules), key=lambda found: found[0])


class _Network:
    def __init__(self, profile: Profile) -> None:
        self._models = [profile.models[name] for name in profile.names]
        self._routing = profile.routing_matrix
        self._committed = [
            sum(p * c for p, c in zip(row, commit, strict=True))
            for row, commit in zip(profile.routing_matrix, profile.commit_matrix, strict=True)
        ]
        self._spreads: dict[tuple[int, int], Spread] = {}

    def turn(self, state: State, rule: Rule) -> _Turn:
        counts, last = state
        running = rule(counts, last)
        spread: Spread = {tuple(0 if i in running else count for i, count in enumerate(counts)): 1.0}
        for model in running:
            spread = _sum(spread, self._scatter(model, counts[model]))
        return _Turn(
            {(reached, max(running)): p for reached, p in spread.items()},
            sum(counts[model] * self._committed[model] for model in running),
            max(self._models[model].step_time_ms(counts[model]) for model in running),
        )

    def _scatter(self, model: int, count: int) -> Spread:
        """Where `count` requests go after a step of `model`: multinomial by its row of P."""
        if (model, count) not in self._spreads:
            row = self._routing[model]
            one = {tuple(int(i == j) for i in range(len(row))): p for j, p in enumerate(row) if p}
            less = self._scatter(model, count - 1) if count > 1 else {(0,) * len(row): 1.0}
            self._spreads[model, count] = _sum(less, one)
        return self._spreads[model, count]


_kept: list[tuple[Profile, _Network]] = []


def _network(profile: Profile) -> _Network:
    """The same for the same profile, since a search asks for it again and again."""
    if not _kept or _kept[0][0] is not profile:
        _kept[:] = [(profile, _Network(profile))]
    return _kept[0][1]


def _sum(left: Spread, right: Spread) -> Spread:
    """Distribution of the sum of two independent vectors."""
    found: dict[Counts, float] = {}
    for counts, p, q in _pairs(left, right):
        found[counts] = found.get(counts, 0.0) + p * q
    return found


def _pairs(left: Spread, right: Spread) -> Iterator[tuple[Counts, float, float]]:
    for a, p in left.items():
        for b, q in right.items():
            yield tuple(map(int.__add__, a, b)), p, q


def _stationary(turns: Mapping[State, _Turn]) -> npt.NDArray[np.float64]:
    """[S] share of turns in each state; states that are left for good get 0."""
    index = {state: i for i, state in enumerate(turns)}
    matrix = -np.eye(len(index))
    for state, turn in turns.items():
        for reached, p in turn.following.items():
            matrix[index[reached], index[state]] += p
    # One balance equation follows from the others, so there is one equation more than unknowns, and no contradiction.
    system = np.vstack([matrix, np.ones(len(index))])
    target = np.zeros(len(index) + 1)
    target[-1] = 1.0
    found: npt.NDArray[np.float64] = np.linalg.lstsq(system, target, rcond=None)[0]
    return found
