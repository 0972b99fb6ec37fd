"""The random baseline against its definition."""

import random

import numpy as np
import pytest

from tests.unit.policy_harness import TWO, Driver, Request, decide, make
from tokenrouter.errors import InvalidRequest
from tokenrouter.rng import Stream, draw

SMALL, LARGE = 1, 2


def always(token: int, vocabulary: int = 4):
    return lambda tokens: ([10.0 if i == token else 0.0 for i in range(vocabulary)], None)


MODELS = {"small": always(SMALL), "large": always(LARGE)}


def test_vector(monkeypatch):
    draws = random.Random(42)
    monkeypatch.setattr("tokenrouter.policies.random.draw", lambda *_: draws.random())
    assert decide(make("random", {"p": 0.25}), np.zeros((4, 4))) == ["small", "large", "small", "large"]


def test_writer_of_each_position_is_the_draw_of_seed_and_position():
    traces = Driver(make("random", {"p": 0.3}), MODELS, max_tokens=50).run([Request([5], seed=s) for s in range(4)])
    for seed, trace in enumerate(traces):
        want = ["large" if draw(seed, i, Stream.ROUTING) < 0.3 else "small" for i in range(50)]
        assert trace.writers == want
        assert trace.tokens == [LARGE if writer == "large" else SMALL for writer in want]
        assert [position for _, position, _ in trace.discarded] == [i for i in range(50) if want[i] == "large"]


@pytest.mark.parametrize(("p", "writer"), [(0.0, "small"), (1.0, "large")])
def test_extremes_are_one_model(p, writer):
    (trace,) = Driver(make("random", {"p": p}), MODELS, max_tokens=40).run([Request([5], seed=9)])
    assert set(trace.writers) == {writer}


def test_share_of_the_large_model_is_p():
    traces = Driver(make("random", {"p": 0.35}), MODELS, max_tokens=400).run([Request([5], seed=s) for s in range(10)])
    writers = [writer for trace in traces for writer in trace.writers]
    assert writers.count("large") / len(writers) == pytest.approx(0.35, abs=0.03)


def test_end_token_at_a_trigger_is_discarded_and_elsewhere_ends():
    end = SMALL
    (trace,) = Driver(make("random", {"p": 1.0}), MODELS, max_tokens=5, end_ids=(end,)).run([Request([5])])
    assert trace.tokens == [LARGE] * 5
    assert not trace.ended
    (trace,) = Driver(make("random", {"p": 0.0}), MODELS, max_tokens=5, end_ids=(end,)).run([Request([5])])
    assert trace.tokens == [SMALL]
    assert trace.ended


def test_refusals():
    with pytest.raises(InvalidRequest, match=r"p is 1\.5; it lies in"):
        make("random", {"p": 1.5})
    with pytest.raises(Exception, match="routes between two models"):
        make("random", models=(*TWO, "third"))
