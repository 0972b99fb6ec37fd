"""R-Stitch against its definition in plain numpy, its vectors, and the hand-off that must not livelock."""

import math

import numpy as np
import pytest

from tests.unit.policy_harness import Driver, Request, decide, decide_alone, make
from tokenrouter.errors import InvalidRequest
from tokenrouter.policies.measures import entropy

torch = pytest.importorskip("torch")


def reference(logits, threshold):
    """One row at a time, in float64: who writes next, whichever model is active."""
    names = []
    for row in np.asarray(logits, dtype=np.float64):
        p = np.exp(row - row.max())
        p /= p.sum()
        h = -sum(x * math.log(x) for x in p if x > 0) / math.log(len(row))
        names.append("large" if h > threshold else "small")
    return names


@pytest.mark.parametrize("model", ["small", "large"])
@pytest.mark.parametrize("threshold", [0.02, 0.3, 0.7])
def test_decisions_equal_the_reference_alone_and_batched(model, threshold):
    logits = np.random.default_rng(1).normal(scale=3.0, size=(64, 50)).astype(np.float32)
    policy = make("rstitch", {"threshold": threshold})
    names = decide(policy, logits, model=model)
    assert names == reference(logits, threshold)
    assert len(set(names)) == 2 or threshold == 0.02
    assert [decide(policy, logits[i : i + 1], model=model)[0] for i in range(64)] == names
    if model == "small":
        assert decide_alone(policy, logits) == names


def test_vector_of_four_logits():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert float(entropy(logits)) == pytest.approx(0.947537, abs=1e-6)
    assert float(entropy(logits)) / math.log(4) == pytest.approx(0.683503, abs=1e-6)
    assert float(logits.softmax(-1).max()) == pytest.approx(0.643914, abs=1e-6)


TWO_POINT = {0.99: 0.004694, 0.95: 0.016638, 0.9: 0.027246, 0.8: 0.041941}


def two_point(p, vocabulary=151_936):
    row = torch.full((vocabulary,), -math.inf)
    row[7], row[9] = math.log(p), math.log(1.0 - p)
    return row


def test_vectors_of_two_point_distributions():
    logits = torch.stack([two_point(p) for p in TWO_POINT])
    assert (entropy(logits) / math.log(logits.shape[1])).tolist() == pytest.approx(list(TWO_POINT.values()), abs=1e-6)
    assert decide(make("rstitch", {"threshold": 0.02}), logits) == ["small", "small", "large", "large"]
    assert decide(make("rstitch", {"threshold": 0.03}), logits) == ["small", "small", "small", "large"]


def with_entropy(h, vocabulary=1000):
    """[V] logits whose normalised entropy is h: one token against all others, by bisection."""
    low, high = 1.0 / vocabulary, 1.0
    for _ in range(200):
        p = (low + high) / 2
        rest = (1 - p) / (vocabulary - 1)
        now = -(p * math.log(p) + (vocabulary - 1) * rest * math.log(rest)) / math.log(vocabulary) if p < 1 else 0.0
        low, high = (p, high) if now > h else (low, p)
    row = np.full(vocabulary, math.log((1 - low) / (vocabulary - 1)))
    row[0] = math.log(low)
    return row


def test_vector_of_a_trace():
    """SLM 0.01 keep; SLM 0.05 discard; LLM 0.04 keep and stay; LLM 0.02 keep and return; SLM 0.03 keep."""
    small = {0: 0.01, 1: 0.05, 3: 0.0299}
    large = {1: 0.04, 2: 0.02}
    models = {
        "small": lambda tokens: (with_entropy(small[len(tokens) - 1]), None),
        "large": lambda tokens: (with_entropy(large[len(tokens) - 1]), None),
    }
    (trace,) = Driver(make("rstitch", {"threshold": 0.03}), models, max_tokens=4).run([Request([5])])
    assert trace.writers == ["small", "large", "large", "small"]
    assert [(model, position) for model, position, _ in trace.discarded] == [("small", 1)]


def test_exactly_at_the_threshold_both_sides_say_small():
    """Equal is not above: V equal logits have H = 1 exactly, or within rounding; 1 token of certainty has H = 0."""
    sure = [[100.0, -1e30, -1e30, -1e30]]
    policy = make("rstitch", {"threshold": 0.0})
    assert decide(policy, sure) == ["small"]
    assert decide(policy, sure, model="large") == ["small"]


def test_models_that_are_never_sure_do_not_livelock():
    flat = {name: (lambda tokens: ([0.0] * 8, None)) for name in ("small", "large")}
    (trace,) = Driver(make("rstitch"), flat, max_tokens=20, max_steps=100).run([Request([5])])
    assert trace.writers == ["large"] * 20
    assert len(trace.discarded) == 1


def test_large_model_that_is_sure_writes_one_token_per_visit():
    models = {"small": lambda tokens: ([0.0] * 8, None), "large": lambda tokens: ([50.0] + [0.0] * 7, None)}
    (trace,) = Driver(make("rstitch"), models, max_tokens=6, max_steps=100).run([Request([5])])
    assert trace.writers == ["large"] * 6
    assert len(trace.discarded) == 6


def test_confidence_of_the_first_version():
    policy = make("rstitch", {"measure": "max_prob", "threshold": 0.64})
    logits = [[2.0, 1.0, 0.0, -1.0], [1.0, 1.0, 0.0, -1.0]]
    assert decide(policy, logits) == ["small", "large"]
    assert decide(policy, logits, model="large") == ["small", "large"]


def test_refusals():
    with pytest.raises(InvalidRequest, match=r"threshold is -0\.1"):
        make("rstitch", {"threshold": -0.1})
