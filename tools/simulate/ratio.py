"""Which number of replicas of each model pays: throughput of the closed loop for every combination, and per price.

As many replicas of every model as of any other are so many deployments side by side, each with its share of the
requests: there the Markov model is exact. All others are simulated, with requests pinned as the server pins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from tools.dtmc.errors import TooLarge
from tools.dtmc.profile import Profile
from tools.dtmc.solve import solve
from tools.progress import Report, silent
from tools.simulate.run import simulate

TOKENS = 6000
_SEED = 7


@dataclass(frozen=True, slots=True)
class Ratio:
    """One combination.

    Attributes:
        tokens_per_second: with the given number in flight.
        standard_error: of that; 0 where it is exact.
        cost: of all replicas, per hour.
    """

    replicas: dict[str, int]
    tokens_per_second: float
    standard_error: float
    cost: float

    @property
    def tokens_per_cost(self) -> float:
        """Tokens for what an hour costs, per unit of the price."""
        return 3600.0 * self.tokens_per_second / self.cost


def ratios(
    profile: Profile,
    inflight: int,
    most: Mapping[str, int],
    prices: Mapping[str, float],
    *,
    thresholds: Mapping[str, int] | None = None,
    tokens: int = TOKENS,
    report: Report = silent,
) -> list[Ratio]:
    """Every combination of 1 up to `most` replicas of each model, the one that pays most first.

    Args:
        inflight: requests in flight, over all replicas.
        most: of each model; left out 1.
        prices: of a replica by model.
        thresholds: of every replica; left out 1.
        tokens: that are simulated of each.

    Raises:
        ThresholdError: thresholds that can deadlock.
        ValueError: replicas of no model, or fewer than one.
    """
    if unknown := sorted(most.keys() - set(profile.names)):
        raise ValueError(f"--most: no model {unknown[0]!r}; the models are {', '.join(profile.names)}")
    if wrong := [name for name, count in most.items() if count < 1]:
        raise ValueError(f"--most: {wrong[0]}={most[wrong[0]]}; give 1 or more")
    ranges = [range(1, most.get(name, 1) + 1) for name in profile.names]
    counts = [dict(zip(profile.names, each, strict=True)) for each in product(*ranges)]
    found = []
    for done, replicas in enumerate(counts):
        report(f"{len(counts)} combinations", done / len(counts))
        rate, error = _rate(profile, inflight, replicas, thresholds or {}, tokens)
        cost = sum(count * prices[name] for name, count in replicas.items())
        found.append(Ratio(replicas, rate, error, cost))
    return sorted(found, key=lambda each: -each.tokens_per_cost)


def _rate(
    profile: Profile, inflight: int, replicas: Mapping[str, int], thresholds: Mapping[str, int], tokens: int
) -> tuple[float, float]:
    """Tokens per second, and their standard error."""
    count, *others = set(replicas.values())
    if not others and inflight % count == 0:
        every = {name: thresholds.get(name, 1) for name in profile.names}
        try:
            return count * solve(profile, inflight // count, every).tokens_per_second, 0.0
        except TooLarge:
            pass
    result = simulate(profile, inflight=inflight, thresholds=thresholds, replicas=replicas, tokens=tokens, seed=_SEED)
    return result.adjusted_tokens_per_second, result.adjusted_standard_error
