"""The best deadlock-free thresholds: B* = argmax T(B) over sum_i (B_i - 1) < N (arXiv 2610.12242, section 3.5).

Two ways, chosen by the size of the largest chain (that of eager batching):

* exhaustive: every feasible vector is solved exactly; nothing is pruned.
* race: vectors are first compared by sampling (`race.py`), and what is left is solved exactly. Vectors whose exact
  chain is over the limit are sampled down to `TARGET_ERROR` and the best of them is taken by its estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tools.dtmc.chain import build_chain
from tools.dtmc.errors import NotStationary, TooLarge
from tools.dtmc.network import Network, build_network
from tools.dtmc.profile import Profile
from tools.dtmc.race import FEW, Race, Vector, sampled_throughput
from tools.dtmc.solve import Solver
from tools.progress import Report, silent

EXHAUSTIVE_TRANSITIONS = 100_000  # of the eager chain: two models up to N = 16
SEARCH_TRANSITIONS = 5_000_000  # two models at N = 64, eager, have 4.2 million
ROUGH_ERROR = 5e-4  # relative standard error at which close vectors are solved exactly instead
TARGET_ERROR = 3e-4  # relative standard error of what cannot be solved exactly
TIE = 1e-7  # relative; exact solutions are no more precise than this


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Best thresholds for one number of requests in flight.

    Attributes:
        tokens_per_second: throughput at B*.
        eager_tokens_per_second: throughput with every threshold 1.
        mean_tpot_ms: mean time per output token of one request at B*, N / throughput. At a given N the largest
            throughput is also the smallest mean time per output token.
        evaluated: vectors solved exactly.
        pruned: vectors dropped on sampled evidence, without an exact solution.
        undecided: vectors neither solved nor dropped: over the limit or not stationary, and within sampling error of
            the best, if they were sampled.
        method: "exact" when B* was solved exactly, "sampled" when its chain is over the limit.
        standard_error: of `tokens_per_second`; 0 when exact.
        eager_standard_error: of `eager_tokens_per_second`; 0 when exact.
    """

    inflight: int
    thresholds: dict[str, int]
    tokens_per_second: float
    eager_tokens_per_second: float
    mean_tpot_ms: float
    feasible: int
    evaluated: int
    pruned: int
    undecided: int
    method: str
    standard_error: float
    eager_standard_error: float


@dataclass(frozen=True, slots=True)
class _Found:
    vector: Vector
    throughput: float
    error: float
    evaluated: int
    undecided: int


def feasible_vectors(network: Network) -> list[Vector]:
    """All deadlock-free threshold vectors, in lexicographic order."""
    return list(_vectors([int(limit) for limit in network.max_batch[: network.models]], network.inflight - 1))


def _vectors(limits: Sequence[int], slack: int) -> Iterator[Vector]:
    if not limits:
        yield ()
        return
    for first in range(1, min(limits[0], slack + 1) + 1):
        for rest in _vectors(limits[1:], slack - first + 1):
            yield (first, *rest)


def search(
    profile: Profile,
    inflight: int,
    *,
    exhaustive: bool = False,
    max_transitions: int = SEARCH_TRANSITIONS,
    report: Report = silent,
) -> SearchResult:
    """Finds the best feasible thresholds.

    Args:
        exhaustive: solve every feasible vector exactly, whatever it takes.

    Raises:
        TooLarge: exhaustive, and some chain is over `max_transitions`.
    """
    solver = Solver(build_network(profile, inflight), max_transitions)
    vectors = feasible_vectors(solver.network)
    small = exhaustive or _fits(solver, min(EXHAUSTIVE_TRANSITIONS, max_transitions))
    found = _exhaustive(solver, vectors, report) if small else _race(solver, vectors, report)
    eager, eager_error = exact_or_sampled(solver, (1,) * solver.network.models, report)
    return SearchResult(
        inflight=inflight,
        thresholds=dict(zip(profile.names, found.vector, strict=True)),
        tokens_per_second=found.throughput,
        eager_tokens_per_second=eager,
        mean_tpot_ms=1000.0 * inflight / found.throughput,
        feasible=len(vectors),
        evaluated=found.evaluated,
        pruned=len(vectors) - found.evaluated - found.undecided,
        undecided=found.undecided,
        method="sampled" if found.error else "exact",
        standard_error=found.error,
        eager_standard_error=eager_error,
    )


def search_table(
    profile: Profile,
    inflight: int,
    *,
    exhaustive: bool = False,
    max_transitions: int = SEARCH_TRANSITIONS,
    report: Report = silent,
) -> list[SearchResult]:
    """Best thresholds for every number in flight 1..`inflight`; arguments as in `search`."""
    rows = []
    for n in range(1, inflight + 1):

        def in_table(stage: str, _share: float, n: int = n) -> None:
            report(f"{n} in flight: {stage}", (n - 1) / inflight)

        rows.append(search(profile, n, exhaustive=exhaustive, max_transitions=max_transitions, report=in_table))
    return rows


def exact_or_sampled(solver: Solver, vector: Vector, report: Report = silent) -> tuple[float, float]:
    """Throughput of one vector, exact where its chain can be solved: (tokens per second, standard error)."""
    try:
        return solver.tokens_per_second(vector), 0.0
    except (TooLarge, NotStationary):
        return sampled_throughput(solver.network, solver.scatters, vector, TARGET_ERROR, report)


def _fits(solver: Solver, max_transitions: int) -> bool:
    """Whether the largest chain, that of eager batching, has at most so many transitions."""
    try:
        build_chain(solver.network, (1,) * solver.network.models, solver.scatters, max_transitions)
    except TooLarge:
        return False
    return True


def _exhaustive(solver: Solver, vectors: list[Vector], report: Report) -> _Found:
    rates: dict[Vector, float] = {}
    for done, vector in enumerate(vectors):
        report(f"solving {len(vectors)} chains", done / len(vectors))
        with suppress(NotStationary):
            rates[vector] = solver.tokens_per_second(vector)
    if not rates:
        solver.tokens_per_second(vectors[0])  # says why
    best = _best(rates)
    return _Found(best, rates[best], 0.0, len(rates), len(vectors) - len(rates))


def _best(rates: Mapping[Vector, float]) -> Vector:
    """The highest throughput; of those that differ by rounding alone, the smallest thresholds."""
    least = max(rates.values()) * (1.0 - TIE)
    return min((vector for vector, rate in rates.items() if rate >= least), key=lambda vector: (sum(vector), vector))


def _race(solver: Solver, vectors: list[Vector], report: Report) -> _Found:
    race = Race(solver.network, solver.scatters, vectors, report)
    race.run(ROUGH_ERROR, stop_at=FEW)
    exact = _solve_finalists(solver, race, report)
    best = _best(exact) if exact else ()
    throughput, error = exact.get(best, 0.0), 0.0
    race.settle(exact, throughput)
    if race.vectors:
        race.run(TARGET_ERROR)
    leader, rate = race.leader()
    if rate > throughput:
        # A fresh estimate: the leader's own is high by the luck that made it leader.
        best = leader
        throughput, error = sampled_throughput(solver.network, solver.scatters, best, TARGET_ERROR, report)
    return _Found(best, throughput, error, len(exact), len(race.vectors))


def _solve_finalists(solver: Solver, race: Race, report: Report) -> dict[Vector, float]:
    """Exact throughput of the vectors left in the race, except those over the limit."""
    exact: dict[Vector, float] = {}
    too_large: list[Vector] = []
    for done, vector in enumerate(sorted(race.vectors, key=sum, reverse=True)):
        report(f"solving {len(race.vectors)} chains", done / len(race.vectors))
        # Lower thresholds have more states, so what is below a vector over the limit need not be tried.
        if any(all(b <= limit for b, limit in zip(vector, large, strict=True)) for large in too_large):
            continue
        try:
            exact[vector] = solver.tokens_per_second(vector)
        except TooLarge:
            too_large.append(vector)
        except NotStationary:
            continue
    return exact
