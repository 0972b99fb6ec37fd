"""Routing by a matrix: the process it produces, independence of batching, and what it refuses."""

from collections import Counter
from itertools import pairwise

import pytest

from tests.unit.policy_harness import TWO, Driver, FakeRow, Request, decide, make
from tokenrouter.errors import InvalidRequest
from tokenrouter.rng import Stream, draw

THREE = ("small", "medium", "large")
R2R = {"routing": {"small": {"small": 0.65, "large": 0.35}, "large": {"small": 1.0}}, "commit": {"large": {"small": 1}}}
CHAIN = {
    "routing": {
        "small": {"small": 0.5, "medium": 0.5},
        "medium": {"small": 0.2, "medium": 0.3, "large": 0.5},
        "large": {"small": 0.6, "medium": 0.4},
    },
    "commit": {"medium": {"small": 1}, "large": {"small": 1, "medium": 1}},
}


def always(token: int):
    return lambda tokens: ([10.0 if i == token else 0.0 for i in range(4)], None)


MODELS = {"small": always(1), "medium": always(2), "large": always(3)}


def moves(trace) -> Counter:
    """(from, to) of every step, rebuilt from what was committed and discarded."""
    at = [(position, model) for position, model in enumerate(trace.writers)]
    discarded: dict[int, list[str]] = {}
    for model, position, _ in trace.discarded:
        discarded.setdefault(position, []).append(model)
    steps = [model for position, writer in at for model in (*discarded.get(position, []), writer)]
    return Counter(pairwise(steps))


def test_decision_is_the_draw_of_seed_position_and_model():
    policy = make("markov", CHAIN, THREE)
    for index, model in enumerate(THREE):
        rows = [FakeRow(model=model, seed=seed, position=position) for seed in range(8) for position in range(8)]
        row = CHAIN["routing"][model]
        for got, request in zip(decide(policy, [[0.0]] * 64, model=model, rows=rows), rows, strict=True):
            u, total = draw(request.seed, request.position, Stream.MODEL + index), 0.0
            want = next(name for name in THREE if (total := total + row.get(name, 0.0)) > u)
            assert got == want


def test_frequencies_are_the_matrix():
    traces = Driver(make("markov", CHAIN, THREE), MODELS, max_tokens=800).run([Request([0], seed=s) for s in range(8)])
    counts: Counter = sum((moves(trace) for trace in traces), Counter())
    for model, row in CHAIN["routing"].items():
        total = sum(count for (source, _), count in counts.items() if source == model)
        for target in THREE:
            assert counts[model, target] / total == pytest.approx(row.get(target, 0.0), abs=0.03)


def test_r2r_matrix_discards_at_the_small_model_and_lets_the_large_one_write_single_tokens():
    (trace,) = Driver(make("markov", R2R), MODELS, max_tokens=300).run([Request([0], seed=4)])
    assert {model for model, _, _ in trace.discarded} == {"small"}
    assert [position for _, position, _ in trace.discarded] == [
        i for i, writer in enumerate(trace.writers) if writer == "large"
    ]
    assert trace.writers == ["large" if draw(4, i, Stream.MODEL) >= 0.65 else "small" for i in range(300)]


def test_decisions_do_not_depend_on_the_neighbours():
    driver = Driver(make("markov", CHAIN, THREE), MODELS, max_tokens=60)
    requests = [Request([0], seed=seed) for seed in range(6)]
    together = driver.run(requests)
    assert [driver.run([request])[0].writers for request in requests] == [trace.writers for trace in together]


def test_entry_and_visited():
    policy = make("markov", {"routing": {"medium": {"medium": 0.5, "large": 0.5}, "large": {"medium": 1.0}},
                             "commit": {"large": {"medium": 1}}, "entry": "medium"}, THREE)  # fmt: skip
    assert policy.visited() == ("medium", "large")
    (trace,) = Driver(policy, MODELS, max_tokens=50).run([Request([0])])
    assert trace.visits[0] == ("medium", 0)
    assert set(trace.writers) == {"medium", "large"}


def test_absorbing_model_and_rounded_rows_are_accepted():
    third = 0.3333333
    make("markov", {"routing": dict.fromkeys(THREE, dict.fromkeys(THREE, third)),
                    "commit": dict.fromkeys(THREE, dict.fromkeys(THREE, 1))}, THREE)  # fmt: skip
    assert make("markov", {"routing": {"small": {"small": 1.0}}}).visited() == ("small",)


def test_zero_probability_is_never_drawn():
    policy = make("markov", {"routing": {"small": {"small": 0.0, "large": 1.0}, "large": {"large": 1.0, "small": 0.0}}})
    rows = [FakeRow(seed=seed) for seed in range(500)]
    assert set(decide(policy, [[0.0]] * 500, rows=rows)) == {"large"}


STAY = {"small": {"small": 1.0}}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"routing": {"small": {"small": 0.5, "large": 0.4}, "large": {"small": 1.0}}}, r"routing\.small sums to 0\.9"),
        ({"routing": {"small": {"small": 1.5, "large": -0.5}}}, "not negative"),
        ({"routing": {"small": {"small": 1.0, "huge": 0.0}}}, "routing names 'huge'; known: small, large"),
        ({"routing": STAY, "commit": {"huge": {}}}, "commit names 'huge'"),
        ({"routing": STAY, "entry": "huge"}, "entry names 'huge'"),
        ({"routing": STAY, "entry": "large"}, "no row for 'large'"),
        ({"routing": {"small": {"large": 1.0}}}, "no row for 'large'"),
        ({"routing": STAY, "commit": {"small": {"small": 0}}}, r"without committing a token \(small\)"),
        ({"routing": {"small": {"large": 1.0}, "large": {"small": 1.0}}}, r"\(small, large\)"),
        ({"routing": STAY, "commit": {"small": {"small": 2}}}, "commit"),
        ({}, "routing"),
    ],
)
def test_refusals(params, message):
    with pytest.raises(InvalidRequest, match=message):
        make("markov", params, TWO)


def test_cycle_over_three_models_needs_one_commit():
    ring = {"small": {"medium": 1.0}, "medium": {"large": 1.0}, "large": {"small": 1.0}}
    with pytest.raises(InvalidRequest, match="circle"):
        make("markov", {"routing": ring}, THREE)
    make("markov", {"routing": ring, "commit": {"large": {"small": 1}}}, THREE)
