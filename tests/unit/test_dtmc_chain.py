"""The exact chain: the paper's figures, a naive reference, and properties of random networks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.dtmc.chain import build_chain
from tools.dtmc.errors import ThresholdError, TooLarge
from tools.dtmc.network import Network, build_network
from tools.dtmc.profile import ModelProfile, Profile, load_profile, parse_profile
from tools.dtmc.scatter import scatter_tables
from tools.dtmc.solve import Solver, solve
from tools.dtmc.stationary import _aggregation, recurrent_part, stationary_distribution

PROFILES = Path(__file__).parents[2] / "configs" / "profiles"
R2R = load_profile(PROFILES / "r2r_qwen3_0.6b_32b.yaml")
ME = load_profile(PROFILES / "me_qwen3_0.6b_8b_32b.yaml")

FIGURE_10 = [
    *((2, b, rate) for b, rate in enumerate([99.0, 110.3], start=1)),
    *((3, b, rate) for b, rate in enumerate([142.3, 158.1, 151.9], start=1)),
    *((4, b, rate) for b, rate in enumerate([187.2, 195.4, 207.9, 190.7], start=1)),
]
EIGHT = list(enumerate([369.2, 370.6, 374.4, 386.8, 399.0, 397.7, 381.1, 332.4], start=1))


def two_models(p: float = 0.35, small: float = 6.0, large: float = 27.9, **fields: object) -> Profile:
    """An R2R-like profile; `fields` replace or add fields."""
    base: dict[str, object] = {
        "models": {"small": ModelProfile(step_ms=small), "large": ModelProfile(step_ms=large)},
        "entry": "small",
        "routing": {"small": {"small": 1 - p, "large": p}, "large": {"small": 1.0}},
        "commit": {"small": {"small": 1.0}, "large": {"small": 1.0}},
    }
    return Profile(**(base | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("inflight", "large", "rate"), FIGURE_10)
def test_figure_10_of_the_paper(inflight: int, large: int, rate: float) -> None:
    assert solve(R2R, inflight, {"small": 1, "large": large}).tokens_per_second == pytest.approx(rate, abs=0.1)


@pytest.mark.parametrize(("large", "rate"), EIGHT)
def test_eight_in_flight(large: int, rate: float) -> None:
    assert solve(R2R, 8, {"small": 1, "large": large}).tokens_per_second == pytest.approx(rate, rel=1e-3)


def test_one_in_flight() -> None:
    assert solve(R2R, 1, {"small": 1, "large": 1}).tokens_per_second == pytest.approx(63.4, abs=0.1)


@pytest.mark.parametrize(
    ("inflight", "large", "states"), [(2, 1, 12), (3, 1, 308), (4, 1, 715), (8, 1, 3453), (8, 4, 75)]
)
def test_reachable_states_are_as_many_as_the_paper_notes(inflight: int, large: int, states: int) -> None:
    assert solve(R2R, inflight, {"small": 1, "large": large}).states == states


# --- a naive reference: dictionaries, one request at a time, dense algebra -------------------------------------------


def naive_throughput(profile: Profile, inflight: int, thresholds: Mapping[str, int]) -> float:
    """Straight from the paper's text, sharing nothing with the tool: no grid, exact fractions of milliseconds."""
    names = list(profile.models)
    index: dict[tuple[object, ...], int] = {}
    moves: list[dict[int, float]] = []
    committed: list[float] = []
    holding: list[float] = []

    def launched(wait: list[int], run: list[int], left: list[Fraction]) -> tuple[object, ...]:
        for i, name in enumerate(names):
            if run[i] == 0 and wait[i] >= thresholds[name]:
                model = profile.models[name]
                run[i] = min(wait[i], model.max_batch or inflight)
                wait[i] -= run[i]
                left[i] = Fraction(str(round(model.step_time_ms(run[i]), 6)))
        return (tuple(wait), tuple(run), tuple(left))

    def number(state: tuple[object, ...]) -> int:
        if state not in index:
            index[state] = len(index)
            todo.append(state)
        return index[state]

    todo: list[tuple[object, ...]] = []
    start = [inflight if name == profile.entry else 0 for name in names]
    number(launched(start, [0] * len(names), [Fraction(0)] * len(names)))
    while todo:
        wait, run, left = todo.pop(0)
        assert isinstance(wait, tuple)
        assert isinstance(run, tuple)
        assert isinstance(left, tuple)
        tau = min(left[i] for i in range(len(names)) if run[i])
        finished = [i for i in range(len(names)) if run[i] and left[i] == tau]
        leaving = [i for i in finished for _ in range(run[i])]  # one entry per request
        out: dict[int, float] = {}
        mean = 0.0
        for goals in itertools.product(range(len(names)), repeat=len(leaving)):
            chance = 1.0
            tokens = 0.0
            arrived = list(wait)
            for i, j in zip(leaving, goals, strict=True):
                chance *= profile.routing[names[i]].get(names[j], 0.0)
                tokens += profile.commit.get(names[i], {}).get(names[j], 0.0)
                arrived[j] += 1
            if chance == 0.0:
                continue
            running = [0 if i in finished else run[i] for i in range(len(names))]
            rest = [left[i] - tau if running[i] else Fraction(0) for i in range(len(names))]
            target = number(launched(arrived, running, rest))
            out[target] = out.get(target, 0.0) + chance
            mean += chance * tokens
        moves.append(out)
        committed.append(mean)
        holding.append(float(tau))
    matrix = np.zeros((len(index), len(index)))
    for s, out in enumerate(moves):
        for t, chance in out.items():
            matrix[t, s] = chance
    system = np.vstack([matrix - np.eye(len(index)), np.ones(len(index))])
    pi = np.linalg.lstsq(system, np.append(np.zeros(len(index)), 1.0), rcond=None)[0]
    return float(1000 * (pi @ committed) / (pi @ holding))


NAIVE_CASES = [
    pytest.param(two_models(), 3, (1, 1), id="eager"),
    pytest.param(two_models(), 3, (2, 2), id="both-delayed"),
    pytest.param(two_models(small=2.0, large=4.0), 4, (2, 3), id="simultaneous-completions"),
    pytest.param(
        two_models(
            models={"small": ModelProfile(step_ms={1: 2.0, 3: 3.0}), "large": ModelProfile(step_ms={1: 5.0, 2: 6.0})}
        ),
        4, (1, 2), id="batch-dependent-times",
    ),
    pytest.param(
        two_models(models={"small": ModelProfile(step_ms=2.0), "large": ModelProfile(step_ms=5.0, max_batch=2)}),
        4, (1, 2), id="maximum-batch",
    ),
    pytest.param(ME, 2, (1, 1, 2), id="three-models"),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "inflight", "thresholds"), NAIVE_CASES)
def test_the_naive_reference_agrees(profile: Profile, inflight: int, thresholds: tuple[int, ...]) -> None:
    named = dict(zip(profile.names, thresholds, strict=True))
    fast = solve(profile, inflight, named).tokens_per_second
    assert fast == pytest.approx(naive_throughput(profile, inflight, named), rel=1e-8)


# --- extensions -------------------------------------------------------------------------------------------------------


def test_a_handoff_delay_is_exact_for_one_request() -> None:
    delayed = two_models(handoff_ms=0.4)
    # A visit to the large model (p = 0.35 per small step) costs its step and two hand-offs.
    assert solve(delayed, 1, {"small": 1, "large": 1}).mean_tpot_ms == pytest.approx(6.0 + 0.35 * (27.9 + 0.8))


def test_a_handoff_delay_equals_a_third_model_that_only_forwards() -> None:
    forward = {
        "small": {"small": 0.65, "to_large": 0.35},
        "to_large": {"large": 1.0},
        "large": {"to_small": 1.0},
        "to_small": {"small": 1.0},
    }
    steps = {"small": 6.0, "large": 27.9, "to_large": 0.4, "to_small": 0.4}
    explicit = Profile(
        models={name: ModelProfile(step_ms=step) for name, step in steps.items()},
        entry="small",
        routing=forward,
        commit={"small": {"small": 1.0}, "large": {"to_small": 1.0}},
    )
    thresholds = {"small": 1, "large": 2}
    want = solve(explicit, 3, thresholds | {"to_large": 1, "to_small": 1})
    got = solve(two_models(handoff_ms=0.4), 3, thresholds)
    assert got.tokens_per_second == pytest.approx(want.tokens_per_second)
    assert got.mean_wait_ms["large"] == pytest.approx(want.mean_wait_ms["large"])


def test_extended_tokens_lengthen_the_step_by_their_mean() -> None:
    slow = {"small": ModelProfile(step_ms=6.0), "large": ModelProfile(step_ms=27.9, extend_ms_per_token=0.7)}
    # Per large step 1 / 0.35 tokens are taken in, one of which is the usual input; the grid rounds 29.2 exactly.
    want = 6.0 + 0.35 * (27.9 + 0.7 * (1 / 0.35 - 1))
    assert solve(two_models(models=slow), 1, {"small": 1, "large": 1}).mean_tpot_ms == pytest.approx(want)


def test_littles_law_links_the_measures() -> None:
    solution = solve(R2R, 6, {"small": 2, "large": 3})
    per_ms = solution.tokens_per_second / 1000  # small steps per ms; 0.35 as many large ones
    requests = per_ms * (6.0 + solution.mean_wait_ms["small"])
    requests += 0.35 * per_ms * (27.9 + solution.mean_wait_ms["large"])
    assert requests == pytest.approx(6)
    assert solution.utilisation["large"] * solution.mean_batch["large"] == pytest.approx(0.35 * per_ms * 27.9)


def test_aggregation_and_the_direct_solution_agree() -> None:
    solver = Solver(build_network(R2R, 4))
    chain, pi = solver.stationary((1, 1))
    assert np.abs(_aggregation(chain) - pi).sum() < 1e-7


def test_a_chain_over_the_limit_is_refused() -> None:
    with pytest.raises(TooLarge, match=r"more than .* transitions"):
        solve(R2R, 8, {"small": 1, "large": 1}, max_transitions=1000)


# --- properties -------------------------------------------------------------------------------------------------------


@st.composite
def networks(draw: st.DrawFn) -> tuple[Profile, int, tuple[int, ...]]:
    """A small random profile, requests in flight, and feasible thresholds."""
    names = ["a", "b", "c"][: draw(st.integers(2, 3))]
    models = {
        name: ModelProfile(step_ms=draw(st.integers(1, 6)) / 2, max_batch=draw(st.sampled_from([None, 2, 3])))
        for name in names
    }
    weights = {i: [draw(st.integers(1, 4)) for _ in names] for i in names}
    routing = {i: {j: w / sum(row) for j, w in zip(names, row, strict=True)} for i, row in weights.items()}
    profile = Profile(
        models=models,
        entry=names[0],
        routing=routing,
        commit={i: dict.fromkeys(names, 1.0) for i in names},
        delta_ms=0.5,
    )
    inflight = draw(st.integers(1, 4))
    slack, thresholds = inflight - 1, []
    for model in models.values():
        thresholds.append(draw(st.integers(1, min(slack + 1, model.max_batch or inflight))))
        slack -= thresholds[-1] - 1
    return profile, inflight, tuple(thresholds)


@settings(max_examples=60)
@given(networks())
def test_every_reachable_state_is_lawful_and_pi_is_a_distribution(case: tuple[Profile, int, tuple[int, ...]]) -> None:
    profile, inflight, thresholds = case
    network = build_network(profile, inflight)
    chain = build_chain(network, thresholds, scatter_tables(network))
    waiting, running, residual = chain.states
    assert ((waiting + running).sum(axis=0) == inflight).all(), "a request was lost or made"
    assert (running.sum(axis=0) > 0).all(), "a deadlock"
    assert ((residual > 0) == (running > 0)).all()
    assert (waiting[running == 0] < np.broadcast_to(np.array(thresholds)[:, None], waiting.shape)[running == 0]).all()
    assert np.allclose(chain.transition.sum(axis=0), 1.0)
    chain = recurrent_part(chain)
    pi = stationary_distribution(chain)
    assert pi.min() >= 0
    assert pi.sum() == pytest.approx(1)
    assert np.abs(chain.transition @ pi - pi).sum() < 1e-7


@settings(max_examples=25)
@given(networks(), st.sampled_from([0.5, 2.0, 10.0]))
def test_throughput_scales_with_the_unit_of_time(case: tuple[Profile, int, tuple[int, ...]], factor: float) -> None:
    profile, inflight, thresholds = case
    named = dict(zip(profile.names, thresholds, strict=True))
    slower = Profile(
        models={
            name: ModelProfile(step_ms=model.step_time_ms(1) * factor, max_batch=model.max_batch)
            for name, model in profile.models.items()
        },
        entry=profile.entry,
        routing=profile.routing,
        commit=profile.commit,
        delta_ms=profile.delta_ms * factor,
    )
    want = solve(profile, inflight, named).tokens_per_second / factor
    assert solve(slower, inflight, named).tokens_per_second == pytest.approx(want, rel=1e-6)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 8))
def test_thresholds_that_can_deadlock_are_refused(inflight: int, small: int, large: int) -> None:
    network: Network = build_network(R2R, inflight)
    feasible = small + large - 2 < inflight
    try:
        network.threshold_vector({"small": small, "large": large})
    except ThresholdError as exc:
        assert not feasible
        assert str(exc).startswith("thresholds: ")  # noqa: PT017
    else:
        assert feasible


def test_a_finer_grid_changes_nothing_when_times_are_on_both() -> None:
    text = (PROFILES / "r2r_qwen3_0.6b_32b.yaml").read_text()
    fine = parse_profile(text.replace("delta_ms: 0.1", "delta_ms: 0.05"))
    thresholds = {"small": 1, "large": 2}
    assert solve(fine, 3, thresholds).tokens_per_second == pytest.approx(solve(R2R, 3, thresholds).tokens_per_second)
