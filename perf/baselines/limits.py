"""Exact throughput of the synchronous baselines without any overhead: what no implementation of them can exceed.

A closed system as in `tools.dtmc`: n endless responses, constant step times by batch size, routing probabilities P and
committed tokens C. Between two turns the state is the number of requests at each model and the model that ran last, so
the chain is small and its stationary distribution is solved directly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

from perf.baselines.turns import Rule, Thresholds
from tools.dtmc.profile import Profile
from tools.dtmc.scatter import scatter_table

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
    return _System(profile, in_flight).throughput(rule)


def no_wait(profile: Profile, in_flight: int) -> float:
    """Tokens per second if no request ever waited for anything: no schedule whatever can exceed this."""
    return in_flight * throughput(profile, 1, lambda counts, last: (counts.index(1),))


def best_thresholds(profile: Profile, in_flight: int) -> tuple[float, Thresholds]:
    """Model-sync at its best: the largest throughput over all thresholds, and the thresholds."""
    system = _System(profile, in_flight)
    larger = product(range(1, in_flight + 1), repeat=len(profile.names) - 1)
    rules = [Thresholds((1, *rest)) for rest in larger]
    return max(((system.throughput(rule), rule) for rule in rules), key=lambda found: found[0])


class _System:
    """The closed system with so many requests in flight."""

    def __init__(self, profile: Profile, in_flight: int) -> None:
        self._models = list(profile.models.values())
        self._start = (tuple(in_flight * (name == profile.entry) for name in profile.names), len(self._models) - 1)
        routing = np.array(profile.routing_matrix)
        self._committed = (routing * np.array(profile.commit_matrix)).sum(axis=1).tolist()
        self._tables = [scatter_table(row, in_flight) for row in routing]
        self._scatter = cache(self._outcomes)

    def throughput(self, rule: Rule) -> float:
        turns: dict[State, _Turn] = {}
        todo = [self._start]
        while todo:
            state = todo.pop()
            if state not in turns:
                turns[state] = self._turn(state, rule)
                todo.extend(turns[state].following)
        weights = _stationary(turns)
        tokens, ms = np.array([(turn.tokens, turn.ms) for turn in turns.values()]).T
        return float(1e3 * (weights @ tokens) / (weights @ ms))

    def _turn(self, state: State, rule: Rule) -> _Turn:
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

    def _outcomes(self, model: int, count: int) -> Spread:
        """Where `count` requests go after a step of `model`."""
        table = self._tables[model]
        chosen = slice(*table.first[count : count + 2])
        reached = np.zeros((chosen.stop - chosen.start, len(self._models)), dtype=int)
        reached[:, table.targets] = table.counts[:, chosen].T
        return dict(zip(map(tuple, reached.tolist()), table.probability[chosen].tolist(), strict=True))


def _sum(left: Spread, right: Spread) -> Spread:
    """Distribution of the sum of two independent vectors."""
    found: dict[Counts, float] = defaultdict(float)
    for (a, p), (b, q) in product(left.items(), right.items()):
        found[tuple(map(int.__add__, a, b))] += p * q
    return found


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
