"""Co-LLM: the deferral column and the separate row, what must never be sampled, the warm-up, the vectors."""

import math

import numpy as np
import pytest
import torch

from tests.unit.policy_harness import Driver, FakeRow, Request, decide, decide_alone, make
from tests.unit.text_tokenizer import tokenizer_of
from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.policies.checkpoints import RouterFile, save_router

VECTOR = [[1.0, 2.0, 0.5, -1.5]]


def test_vector_of_the_column():
    assert 1 / (1 + math.exp(1.5)) == pytest.approx(0.182426, abs=1e-6)
    assert decide(make("collm", {"threshold": 0.15}), VECTOR) == ["large"]
    assert decide(make("collm", {"threshold": 0.25}), VECTOR) == ["small"]
    # Not the softmax over all four columns, which gives 0.018626.
    assert decide(make("collm", {"threshold": 0.018627}), VECTOR) == ["large"]


def test_vector_of_the_tokens_that_are_left():
    """Log-softmax over the first three columns, as the sampler sees them."""
    banned = list(make("collm").mask("small", 4))
    left = torch.tensor(VECTOR[0])
    left[banned] = -math.inf
    assert left.log_softmax(-1)[:3].tolist() == pytest.approx([-1.464369, -0.464369, -1.964369], abs=1e-6)


def test_deferring_takes_the_large_models_token():
    """Vector: composing would give token 1 here, deferring gives 0."""
    small, large = np.exp([-1.464369, -0.464369, -1.964369]), np.array([0.7, 0.2, 0.1])
    composed = (1 - 0.182426) * small + 0.182426 * large
    assert composed == pytest.approx([0.316741, 0.550357, 0.132903], abs=1e-6)
    models = {"small": lambda tokens: (VECTOR[0], None), "large": lambda tokens: (np.log(large), None)}
    (trace,) = Driver(make("collm", {"threshold": 0.15}), models, max_tokens=3).run([Request([1])])
    assert trace.tokens == [0, 0, 0]
    assert trace.discarded == [("small", i, 1) for i in range(3)]
    (trace,) = Driver(make("collm", {"threshold": 0.25}), models, max_tokens=3).run([Request([1])])
    assert trace.tokens == [1, 1, 1]


def test_column_in_front_of_padding():
    assert decide(make("collm", {"threshold": 0.15, "deferral_id": 3}), [[*VECTOR[0], -9.0, 9.0]]) == ["large"]
    assert decide(make("collm", {"threshold": 0.25, "deferral_id": 3}), [[*VECTOR[0], -9.0, 9.0]]) == ["small"]


def test_exactly_at_the_threshold_stays():
    assert decide(make("collm", {"threshold": 0.5}), [[1.0, 0.0], [1.0, 1e-6]]) == ["small", "large"]


def test_column_decisions_equal_the_reference_alone_and_batched():
    logits = np.random.default_rng(0).normal(scale=2.0, size=(80, 11)).astype(np.float32)
    want = ["large" if 1 / (1 + math.exp(-row[-1])) > 0.3 else "small" for row in logits]
    policy = make("collm", {"threshold": 0.3})
    assert decide(policy, logits) == want
    assert decide_alone(policy, logits) == want
    assert set(want) == {"small", "large"}


ROW = torch.tensor([0.5, -1.0, 2.0])


@pytest.mark.parametrize("form", ["native", "vector", "matrix"])
def test_separate_row_equals_the_definition(tmp_path, form):
    name = "row.safetensors" if form == "native" else "gperp_init.bin"
    if form == "native":
        save_router(RouterFile("collm", {"deferral.weight": ROW}, threshold=0.3), tmp_path / name)
    else:
        torch.save(ROW if form == "vector" else ROW[None], tmp_path / name)
    hidden = np.random.default_rng(0).normal(size=(60, 3))
    want = ["large" if 1 / (1 + math.exp(-(h @ ROW.numpy()))) > 0.3 else "small" for h in hidden]
    params = {"checkpoint": name} if form == "native" else {"checkpoint": name, "threshold": 0.3}
    policy = make("collm", params, directory=tmp_path)
    assert decide(policy, hidden=hidden) == want
    assert decide_alone(policy, np.zeros((60, 4)), hidden=hidden) == want
    with pytest.raises(ConfigError, match=r"hidden size 4, the router expects 3 .*trained for another"):
        decide(policy, hidden=np.zeros((1, 4)))


def test_deferral_and_padding_ids_are_never_sampled():
    """The largest logits are the deferral column and a padding id; greedy and sampled, neither comes out."""
    row = [1.0, 2.0, 0.5, 9.0, 8.0]
    models = {"small": lambda tokens: (row, None), "large": lambda tokens: ([0.0] * 3, None)}
    policy = make("collm", {"threshold": 1.0, "vocab_size": 3})
    assert list(policy.mask("small", 5)) == [3, 4]
    assert list(policy.mask("large", 3)) == []
    for temperature in (0.0, 1.0):
        traces = Driver(policy, models, max_tokens=100, temperature=temperature).run([Request([1], seed=4)])
        assert set(traces[0].tokens) <= {0, 1, 2}
        assert traces[0].writers == ["small"] * 100


@pytest.mark.parametrize(
    ("params", "width", "tokenizer", "banned"),
    [
        ({}, 5, None, [4]),
        ({}, 6, 3, [3, 4, 5]),
        ({}, 4, 9, [3]),
        ({"vocab_size": 2}, 5, 4, [2, 3, 4]),
        ({"deferral_id": 3}, 8, None, [3, 4, 5, 6, 7]),
        ({"checkpoint": "row.bin"}, 5, None, []),
        ({"checkpoint": "row.bin"}, 5, 3, [3, 4]),
    ],
)
def test_mask(params, width, tokenizer, banned):
    extras = {} if tokenizer is None else {"tokenizer": tokenizer_of([f"t{i}" for i in range(tokenizer)])}
    assert list(make("collm", params, **extras).mask("small", width)) == banned


@pytest.mark.parametrize(("warmup", "half"), [("linear", 0.575), ("cosine", 0.575), ("exponential", math.sqrt(0.15))])
def test_warm_up_lowers_the_threshold_from_one(warmup, half):
    policy = make("collm", {"threshold": 0.15, "warmup": warmup, "warmup_tokens": 10})
    for position, threshold in ((0, 1.0), (5, half), (10, 0.15), (400, 0.15)):
        below, above = (math.log(d / (1 - d)) if d < 1 else 60.0 for d in (threshold - 1e-4, min(1, threshold + 1e-4)))
        rows = [FakeRow(position=position), FakeRow(position=position)]
        want = ["small", "large" if threshold < 1.0 else "small"]
        assert decide(policy, [[0.0, below], [0.0, above]], rows=rows) == want


def test_warm_up_is_by_row():
    policy = make("collm", {"threshold": 0.15, "warmup": "linear"})
    rows = [FakeRow(position=0), FakeRow(position=15)]
    assert decide(policy, [[0.0, 1.0], [0.0, 1.0]], rows=rows) == ["small", "large"]


def test_trigger_on_the_very_first_token_and_discarded_end_token():
    models = {"small": lambda tokens: ([0.0, 5.0, 0.0, 3.0], None), "large": lambda tokens: ([0.0, 0.0, 5.0], None)}
    (trace,) = Driver(make("collm"), models, max_tokens=3, end_ids=(1,)).run([Request([1])])
    assert trace.tokens == [2, 2, 2]
    assert [position for _, position, _ in trace.discarded] == [0, 1, 2]


def test_refusals():
    with pytest.raises(InvalidRequest, match="exchange tokens, not distributions"):
        make("collm", {"mode": "compose"})
    with pytest.raises(InvalidRequest, match="vocab_size is 0"):
        make("collm", {"vocab_size": 0})
    with pytest.raises(InvalidRequest, match="names a logit column, checkpoint a row"):
        make("collm", {"deferral_id": 3, "checkpoint": "row.bin"})
    with pytest.raises(ConfigError, match="deferral_id is 9; 'small' has 4 logit columns"):
        decide(make("collm", {"deferral_id": 9}), VECTOR)
    with pytest.raises(InvalidRequest, match="warmup_tokens is 0"):
        make("collm", {"warmup_tokens": 0})
    with pytest.raises(InvalidRequest, match=r"threshold is 1\.5"):
        make("collm", {"threshold": 1.5})
