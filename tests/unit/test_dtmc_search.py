"""Sampling, the race and the search against exact solutions."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tools.dtmc import stationary
from tools.dtmc.errors import NotStationary, TooLarge
from tools.dtmc.network import build_network
from tools.dtmc.profile import load_profile
from tools.dtmc.sampling import Sampler
from tools.dtmc.scatter import scatter_tables
from tools.dtmc.search import EXHAUSTIVE_TRANSITIONS, _exhaustive, _race, feasible_vectors, search, search_table
from tools.dtmc.solve import Solver
from tools.progress import silent

PROFILES = Path(__file__).parents[2] / "configs" / "profiles"
R2R = load_profile(PROFILES / "r2r_qwen3_0.6b_32b.yaml")
ME = load_profile(PROFILES / "me_qwen3_0.6b_8b_32b.yaml")


@pytest.mark.parametrize(("inflight", "best"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 2)), (4, (1, 3)), (8, (1, 5))])
def test_the_best_thresholds_of_the_paper(inflight: int, best: tuple[int, int]) -> None:
    result = search(R2R, inflight)
    assert tuple(result.thresholds.values()) == best
    assert (result.method, result.standard_error, result.pruned, result.undecided) == ("exact", 0.0, 0, 0)
    assert result.evaluated == result.feasible == inflight * (inflight + 1) // 2
    assert result.mean_tpot_ms == pytest.approx(1000 * inflight / result.tokens_per_second)


def test_two_models_have_n_n_plus_1_over_2_feasible_vectors_and_all_are_accepted() -> None:
    network = build_network(R2R, 7)
    vectors = feasible_vectors(network)
    assert len(set(vectors)) == len(vectors) == 28
    for vector in vectors:
        assert network.threshold_vector(dict(zip(network.names, vector, strict=True))) == vector


def test_samples_agree_with_the_exact_chain() -> None:
    solver = Solver(build_network(R2R, 5))
    vectors = feasible_vectors(solver.network)
    sampler = Sampler(solver.network, vectors, solver.scatters)
    sampler.run(600)
    estimate = sampler.estimate()
    exact = np.array([solver.tokens_per_second(vector) for vector in vectors])
    assert (np.abs(estimate.mean - exact) < 4.5 * estimate.error + 1e-6 * exact).all()
    assert (estimate.error < 0.01 * exact).all()


@pytest.mark.parametrize("inflight", [6, 10])
def test_the_race_finds_what_exhaustion_finds(inflight: int) -> None:
    solver = Solver(build_network(R2R, inflight))
    vectors = feasible_vectors(solver.network)
    raced, exhausted = _race(solver, vectors, silent), _exhaustive(solver, vectors, silent)
    assert raced.vector == exhausted.vector
    assert raced.throughput == pytest.approx(exhausted.throughput, rel=1e-9)
    assert raced.evaluated < exhausted.evaluated
    assert raced.undecided == 0


def test_three_models_raced_and_exhausted_agree() -> None:
    solver = Solver(build_network(ME, 3))
    vectors = feasible_vectors(solver.network)
    raced, exhausted = _race(solver, vectors, silent), _exhaustive(solver, vectors, silent)
    assert raced.vector == exhausted.vector


def test_what_cannot_be_solved_exactly_is_sampled_to_a_stated_error() -> None:
    exact, sampled = search(R2R, 6), search(R2R, 6, max_transitions=10)
    assert (exact.method, sampled.method) == ("exact", "sampled")
    assert sampled.evaluated == 0
    assert sampled.undecided >= 1
    assert 0 < sampled.standard_error < 4e-4 * sampled.tokens_per_second
    assert sampled.thresholds == exact.thresholds
    assert abs(sampled.tokens_per_second - exact.tokens_per_second) < 5 * sampled.standard_error
    assert abs(sampled.eager_tokens_per_second - exact.eager_tokens_per_second) < 5 * sampled.eager_standard_error


def test_vectors_without_a_stationary_distribution_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hand-offs of probability 1e-5; here large chains are given no time at all."""
    whole = search(R2R, 8)
    monkeypatch.setattr(stationary, "DIRECT_STATES", 400)
    monkeypatch.setattr(stationary, "MAX_CYCLES", 0)
    result = search(R2R, 8)
    assert result.thresholds == whole.thresholds
    assert result.tokens_per_second == pytest.approx(whole.tokens_per_second)
    assert (result.method, result.pruned) == ("exact", 0)
    assert result.undecided > 0
    assert result.evaluated + result.undecided == result.feasible
    assert result.eager_standard_error > 0
    monkeypatch.setattr(stationary, "DENSE_STATES", 0)
    monkeypatch.setattr(stationary, "DIRECT_STATES", 0)
    with pytest.raises(NotStationary, match="raise delta_ms"):
        search(R2R, 8)


def test_of_thresholds_that_differ_by_rounding_the_smallest_are_best() -> None:
    """With hand-offs of probability 1e-4 no threshold matters."""
    routing = {"small": {"small": 0.9999, "large": 0.0001}, "large": {"small": 1.0}}
    assert set(search(msgspec.structs.replace(R2R, routing=routing), 5).thresholds.values()) == {1}


def test_an_exhaustive_search_over_the_limit_is_refused() -> None:
    with pytest.raises(TooLarge, match="more than 10 transitions; raise --max-transitions"):
        search(R2R, 6, exhaustive=True, max_transitions=10)


def test_thirty_two_in_flight_are_raced_and_the_winner_is_solved_exactly() -> None:
    result = search(R2R, 32)
    assert result.method == "exact"
    assert result.evaluated + result.pruned + result.undecided == result.feasible == 528
    solver = Solver(build_network(R2R, 32))
    best = tuple(result.thresholds.values())
    for change in [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1)]:
        neighbour = tuple(b + step for b, step in zip(best, change, strict=True))
        if min(neighbour) >= 1 and sum(neighbour) - 2 < 32:
            assert solver.tokens_per_second(neighbour) < result.tokens_per_second


def test_the_table_has_a_row_for_every_number_in_flight() -> None:
    rows = search_table(R2R, 4)
    assert [row.inflight for row in rows] == [1, 2, 3, 4]
    assert [row.thresholds["large"] for row in rows] == [1, 2, 2, 3]
    assert all(row.tokens_per_second >= row.eager_tokens_per_second for row in rows)


def test_the_largest_exhausted_chain_is_that_of_eager_batching_at_sixteen() -> None:
    network = build_network(R2R, 16)
    chain, _ = Solver(network).stationary((1, 1))
    assert chain.transition.nnz <= EXHAUSTIVE_TRANSITIONS


def test_a_multinomial_table_is_exact_and_samples_by_it() -> None:
    table = scatter_tables(build_network(ME, 3))[0]
    _, outcome = table.expand(np.array([3]))
    by_count = {tuple(table.counts[:, i]): table.probability[i] for i in outcome}
    assert by_count[1, 1, 1] == pytest.approx(6 * 0.5 * 0.3 * 0.2)
    assert sum(by_count.values()) == pytest.approx(1)
    uniform = (np.arange(1000) + 0.5) / 1000
    drawn = table.counts[:, table.sample(np.full(1000, 3), uniform)]
    assert (drawn.sum(axis=0) == 3).all()
    assert drawn.mean(axis=1) == pytest.approx([1.5, 0.9, 0.6], abs=0.01)
