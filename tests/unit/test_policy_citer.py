"""CITER: the network against layer-by-layer numpy, the rule, the vector, the files."""

import numpy as np
import pytest
import torch

from tests.unit.citer_layout import random_state, reference, vector_state
from tests.unit.policy_harness import Driver, Request, decide, decide_alone, make
from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.policies.checkpoints import RouterFile, save_router
from tokenrouter.policies.checkpoints.citer import build


@pytest.fixture
def vector_file(tmp_path):
    torch.save(vector_state(), tmp_path / "mlp_iter_0.123.pth")
    return tmp_path


def policy(folder, name="mlp_iter_0.123.pth", **params):
    return make("citer", {"checkpoint": name, **params}, directory=folder)


HIDDEN = np.array([[1.0, 2.0], [-1.0, -1.0]])


def test_vector(vector_file):
    network = policy(vector_file).network("cpu")
    assert network.score(torch.tensor(HIDDEN).float()).tolist() == pytest.approx([0.985936, 0.549834], abs=1e-6)
    assert decide(policy(vector_file), hidden=HIDDEN) == ["small", "large"]
    assert decide(policy(vector_file, threshold=0.5), hidden=HIDDEN) == ["small", "small"]


def test_exactly_at_the_threshold_stays(vector_file):
    score = float(policy(vector_file).network("cpu").score(torch.tensor(HIDDEN).float())[1])
    assert decide(policy(vector_file, threshold=score), hidden=HIDDEN[1:]) == ["small"]
    assert decide(policy(vector_file, threshold=score + 1e-6), hidden=HIDDEN[1:]) == ["large"]


def test_decisions_equal_the_reference_alone_and_batched(tmp_path):
    torch.save(random_state(), tmp_path / "r.pth")
    hidden = np.random.default_rng(2).normal(size=(80, 8))
    scores = reference(random_state(), hidden)
    threshold = float(np.median(scores)) + 1e-4
    p = policy(tmp_path, "r.pth", threshold=threshold)
    want = ["large" if score < threshold else "small" for score in scores]
    assert decide(p, hidden=hidden) == want
    assert decide_alone(p, np.zeros((80, 4)), hidden=hidden) == want
    assert set(want) == {"small", "large"}


def test_folded_network_equals_the_layers():
    hidden = np.random.default_rng(5).normal(size=(50, 8))
    got = build(RouterFile("citer", random_state())).score(torch.tensor(hidden).float())
    np.testing.assert_allclose(got.numpy(), reference(random_state(), hidden), atol=1e-5)


def test_threshold_of_the_request_before_the_files_before_the_default(tmp_path):
    save_router(RouterFile("citer", vector_state(), threshold=0.5), tmp_path / "r.safetensors")
    assert decide(policy(tmp_path, "r.safetensors"), hidden=HIDDEN) == ["small", "small"]
    assert decide(policy(tmp_path, "r.safetensors", threshold=0.99), hidden=HIDDEN) == ["large", "large"]


def test_one_token_by_the_large_model_from_the_very_first_position_on(vector_file):
    unsure = [0.0, 5.0, 0.0, 0.0], [-1.0, -1.0]
    models = {"small": lambda tokens: unsure, "large": lambda tokens: ([0.0, 0.0, 5.0, 0.0], None)}
    (trace,) = Driver(policy(vector_file), models, max_tokens=4, end_ids=(1,)).run([Request([5])])
    assert trace.tokens == [2] * 4
    assert [position for _, position, _ in trace.discarded] == [0, 1, 2, 3]
    assert trace.visits == [(("small", "large")[i % 2], (i + 1) // 2 - (i % 2)) for i in range(9)][: len(trace.visits)]


def test_instances_share_the_weights(vector_file):
    one, other = policy(vector_file, threshold=0.1), policy(vector_file, threshold=0.2)
    assert one.network("cpu") is other.network("cpu")


@pytest.mark.parametrize("name", [n for n in vector_state() if n != "mlp.1.num_batches_tracked"])
def test_a_missing_or_misshapen_tensor_is_named(name):
    state = vector_state()
    del state[name]
    with pytest.raises(ConfigError, match=f"'{name}' of shape .* is missing"):
        build(RouterFile("citer", state))
    if name != "mlp.0.weight":
        state[name] = torch.zeros(3, 3)
        with pytest.raises(ConfigError, match=f"'{name}' has shape"):
            build(RouterFile("citer", state))


def test_another_small_model_is_refused_with_both_sizes(vector_file):
    with pytest.raises(ConfigError, match=r"hidden size 3, the router expects 2 .*trained for another"):
        decide(policy(vector_file), hidden=np.zeros((1, 3)))
    with pytest.raises(ConfigError, match="needs hidden states"):
        decide(policy(vector_file), np.zeros((1, 4)))


@pytest.mark.parametrize(("size", "text"), [(3, "hidden size 3, the router expects 2"), (0, "does not give")])
def test_prepare_notices_another_small_model(vector_file, size, text):
    params = {"checkpoint": "mlp_iter_0.123.pth"}
    with pytest.raises(ConfigError, match=text):
        make("citer", params, directory=vector_file, hidden_size=size).prepare("small")
    make("citer", params, directory=vector_file, hidden_size=2).prepare("small")


def test_prepare_loads_at_the_small_model_only(tmp_path):
    missing = policy(tmp_path, "none.pth")
    missing.prepare("large")
    missing.prepare("")
    with pytest.raises(ConfigError, match=r"'none\.pth' does not exist"):
        missing.prepare("small")


def test_refusals(vector_file):
    with pytest.raises(InvalidRequest, match="checkpoint is missing"):
        make("citer")
    with pytest.raises(InvalidRequest, match="threshold is 2"):
        policy(vector_file, threshold=2)
    with pytest.raises(InvalidRequest, match="lies outside"):
        policy(vector_file, "../elsewhere.pth")
