"""ME: the draws, the visit lengths that are known ahead, and the distribution of what comes out."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.unit.policy_harness import Driver, FakeRow, Request, decide, make
from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.policies.base import EntryRequest
from tokenrouter.rng import Stream, draw

THREE = ("small", "middle", "large")
PAPER = (0.5, 0.3, 0.2)


def fixed(p):
    logits = np.log(np.asarray(p))
    return lambda tokens: (logits, None)


def reference_writer(models, weights, seed, position):
    """The definition: the first model whose cumulative weight exceeds u."""
    u, total = draw(seed, position, Stream.ROUTING), sum(weights)
    cumulative = 0.0
    for model, weight in zip(models, weights, strict=True):
        cumulative += weight / total
        if u < cumulative:
            return model
    return [model for model, weight in zip(models, weights, strict=True) if weight > 0][-1]


def test_vector_of_draws(monkeypatch):
    draws = random.Random(42)
    values = np.array([draws.random() for _ in range(12)])
    monkeypatch.setattr("tokenrouter.policies.me.uniform", lambda *_: values)
    names = decide(make("me", {"weights": PAPER}, THREE), np.zeros((12, 4)))
    assert [THREE.index(name) for name in names] == [1, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 1]


def test_every_position_is_written_by_the_model_drawn_for_it_and_nothing_is_discarded():
    models = {name: fixed(p) for name, p in zip(THREE, np.eye(4)[:3] * 0.9 + 0.025, strict=True)}
    requests = [Request([5], seed=seed) for seed in range(6)]
    traces = Driver(make("me", {"weights": PAPER}, THREE), models, max_tokens=60).run(requests)
    for seed, trace in enumerate(traces):
        assert trace.writers == [reference_writer(THREE, PAPER, seed, i) for i in range(60)]
        assert trace.tokens == [THREE.index(writer) for writer in trace.writers]
        assert trace.discarded == []


def test_decisions_do_not_depend_on_who_else_is_in_the_batch():
    models = {name: fixed(p) for name, p in zip(THREE, np.random.default_rng(3).dirichlet(np.ones(5), 3), strict=True)}
    policy = make("me", {"weights": PAPER}, THREE)
    requests = [Request([5], seed=seed) for seed in range(5)]
    together = Driver(policy, models, temperature=1.0).run(requests)
    alone = [Driver(policy, models, temperature=1.0).run([request])[0] for request in requests]
    assert [t.tokens for t in together] == [t.tokens for t in alone]
    assert [t.writers for t in together] == [t.writers for t in alone]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 10_000),
    weights=st.lists(st.floats(0.01, 10.0), min_size=2, max_size=4),
)
def test_announced_visit_ends_where_the_draw_changes(seed, position, weights):
    models = tuple("abcd"[: len(weights)])
    policy = make("me", {"weights": weights}, models)
    here = reference_writer(models, weights, seed, position)
    plan = policy.receive(FakeRow(model=here, seed=seed, position=position))
    run = [reference_writer(models, weights, seed, position + i) for i in range(300)]
    if plan.limit is None:
        assert set(run[:257]) == {here}
    else:
        assert run[: plan.limit] == [here] * plan.limit
        assert run[plan.limit] == plan.then != here


def test_rows_without_announced_end_are_routed_by_the_same_draws():
    policy = make("me", {"weights": [0.9, 0.1]})
    rows = [FakeRow(seed=7, position=i) for i in range(200)]
    names = decide(policy, np.zeros((200, 4)), rows=rows)
    assert names == [reference_writer(("small", "large"), (0.9, 0.1), 7, i + 1) for i in range(200)]


def test_first_writer_is_drawn_too():
    policy = make("me", {"weights": PAPER}, THREE)
    entries = [policy.entry(EntryRequest("", [1], seed)) for seed in range(2000)]
    counts = [entries.count(name) for name in THREE]
    assert chisquare(counts, 2000 * np.asarray(PAPER)).pvalue > 1e-3


def responses(temperature, count):
    """Histogram of all tokens, and of first tokens, of two models with fixed distributions and equal weights."""
    models = {"small": fixed((0.7, 0.2, 0.1)), "large": fixed((0.1, 0.6, 0.3))}
    requests = [Request([5], seed=seed) for seed in range(count)]
    traces = Driver(make("me"), models, max_tokens=3, temperature=temperature).run(requests)
    everything = np.bincount([token for trace in traces for token in trace.tokens], minlength=3)
    return everything, np.bincount([trace.tokens[0] for trace in traces], minlength=3)


def test_output_is_distributed_as_the_mixture():
    everything, first = responses(temperature=1.0, count=3000)
    mixture = np.array([0.4, 0.4, 0.2])
    assert chisquare(everything, everything.sum() * mixture).pvalue > 1e-3
    assert chisquare(first, first.sum() * mixture).pvalue > 1e-3


def test_temperature_acts_on_the_drawn_model_not_on_the_mean():
    """Vector: at T = 0.5 the tempered mixture, not the mixture that is tempered afterwards."""
    everything, _ = responses(temperature=0.5, count=6000)
    assert chisquare(everything, everything.sum() * np.array([0.464573, 0.428341, 0.107086])).pvalue > 1e-3
    assert chisquare(everything, everything.sum() * np.array([0.444444, 0.444445, 0.111111])).pvalue < 1e-3


def test_models_without_weight_are_never_visited():
    policy = make("me", {"weights": {"small": 2, "large": 1}}, THREE)
    assert policy.visited() == ("small", "large")
    models = {"small": fixed((0.5, 0.5)), "large": fixed((0.5, 0.5))}
    traces = Driver(policy, models, max_tokens=50).run([Request([5], seed=s) for s in range(10)])
    assert {writer for trace in traces for writer in trace.writers} == {"small", "large"}


def test_single_weight_is_one_endless_visit():
    policy = make("me", {"weights": [0.0, 1.0, 0.0]}, THREE)
    assert policy.entry(EntryRequest("", [1], 3)) == "middle"
    assert policy.receive(FakeRow(model="middle", seed=3)).limit is None
    assert decide(policy, np.zeros((3, 4)), model="middle") == ["middle"] * 3


def test_end_token_of_any_model_ends():
    models = {"small": fixed((0.05, 0.95)), "large": fixed((0.95, 0.05))}
    (trace,) = Driver(make("me"), models, max_tokens=50, end_ids=(0,)).run([Request([5], seed=1)])
    assert trace.ended
    assert trace.writers.index("large") == len(trace.writers) - 1


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([1.0], "has 1 entries; the models are small, large"),
        ([0.0, 0.0], "not all zero"),
        ([-1.0, 2.0], "not negative"),
        ({"smal": 1.0}, "'smal'; known: small, large"),
    ],
)
def test_refused_weights(weights, text):
    with pytest.raises(InvalidRequest, match=text):
        make("me", {"weights": weights})


def test_one_model_is_no_ensemble():
    with pytest.raises(ConfigError, match="only solo"):
        make("me", {}, ("solo",))
