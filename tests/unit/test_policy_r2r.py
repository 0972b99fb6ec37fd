"""R2R: its vectors, every usable class against naive numpy, files in the official layout, and what a trigger does."""

import numpy as np
import pytest
import torch

from tests.unit.policy_harness import Driver, FakeRow, Request, decide, decide_alone, make
from tests.unit.r2r_layout import BOLD, checkpoint, random_state, reference, vector_state
from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.policies.base import RouteBatch


@pytest.fixture(autouse=True)
def one_thread():
    """Networks of a few units are faster without hand-overs between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


HIDDEN = np.array([[0.3, -1.2], [1.0, 0.5]])
TOKENS = [2, 0]
LOGITS = np.array([[1.0, 3, 2, -1], [0, 0.5, -2, 4]])


def policy(folder, content, **params):
    """A policy on a file with this content; the small model's input embedding is the test vector's."""
    extras = {"input_embedding": params.pop("embedding", lambda model: vector_state()["token_embeddings.weight"])}
    torch.save(content, folder / "default_router.pt")
    return make("r2r", {"checkpoint": "default_router.pt", **params}, directory=folder, **extras)


def probabilities(instance, hidden=HIDDEN, tokens=TOKENS, logits=LOGITS):
    network = instance.network("cpu")
    batch = RouteBatch(
        "small",
        [FakeRow() for _ in tokens],
        torch.tensor(tokens),
        torch.tensor(logits).float(),
        torch.tensor(hidden).float(),
    )
    return network.probability(instance._features(network, batch)).numpy()


@pytest.mark.parametrize("keep_embedding", [False, True])
def test_vector(tmp_path, keep_embedding):
    instance = policy(tmp_path, checkpoint(vector_state(), keep_embedding=keep_embedding))
    assert len(vector_state()) == 25
    assert probabilities(instance) == pytest.approx([0.226466, 0.203184], abs=1e-6)
    # The stored threshold, 0.21.
    assert decide(instance, LOGITS, hidden=HIDDEN, tokens=TOKENS) == ["large", "small"]
    both = policy(tmp_path, checkpoint(vector_state()), threshold=0.2)
    assert decide(both, LOGITS, hidden=HIDDEN, tokens=TOKENS) == ["large", "large"]


def test_exactly_at_the_threshold_leaves(tmp_path):
    p = float(probabilities(policy(tmp_path, checkpoint(vector_state())))[0])
    at = policy(tmp_path, checkpoint(vector_state()), threshold=p)
    above = policy(tmp_path, checkpoint(vector_state()), threshold=p + 1e-6)
    assert decide(at, LOGITS, hidden=HIDDEN, tokens=TOKENS)[0] == "large"
    assert decide(above, LOGITS, hidden=HIDDEN, tokens=TOKENS)[0] == "small"


def test_without_any_threshold_it_is_one_half(tmp_path):
    instance = policy(tmp_path, checkpoint(vector_state(), threshold=None))
    assert instance.threshold(instance.network("cpu").threshold) == 0.5


CLASSES = [
    BOLD,
    "HiddenStatesTokenLMHeadClassifier",
    "HiddenStatesLogitsClassifier",
    "LogitsClassifier",
    "HiddenStatesClassifier",
    "HiddenStatesClassifierWithLMHead",
]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("model_type", [*CLASSES, BOLD.lower()])
def test_every_usable_class_equals_the_naive_forward(tmp_path, model_type, normalize):
    kind = BOLD if model_type == BOLD.lower() else model_type
    sizes = {"hidden": 6, "vocabulary": 20, "top": 5, "dims": (8, 8, 4), "expansion": 3, "normalize": normalize}
    state = random_state(kind, seed=1, **sizes)
    rng = np.random.default_rng(0)
    hidden, logits = rng.normal(size=(40, 6)), rng.normal(scale=3, size=(40, 20))
    tokens = rng.integers(0, 20, size=40).tolist()
    want = reference(state, kind, hidden=hidden, tokens=tokens, logits=logits, top=5, normalize=normalize)
    table = state.get("token_embeddings.weight", torch.zeros(20, 6)).to(torch.float32)
    content = checkpoint(state, model_type, normalize_input=normalize)
    instance = policy(tmp_path, content, embedding=lambda model: table, threshold=float(np.median(want)) + 1e-4)
    np.testing.assert_allclose(probabilities(instance, hidden, tokens, logits), want, atol=1e-5)
    names = ["large" if p >= instance.params.threshold else "small" for p in want]
    assert decide(instance, logits, hidden=hidden, tokens=tokens) == names
    assert decide_alone(instance, logits, hidden=hidden, tokens=tokens) == names
    assert set(names) == {"small", "large"}


def test_lm_head_without_top_takes_its_whole_output(tmp_path):
    kind = "HiddenStatesClassifierWithLMHead"
    state = random_state(kind, hidden=3, vocabulary=5, top=5)
    hidden = np.random.default_rng(0).normal(size=(4, 3))
    want = reference(state, kind, hidden=hidden, tokens=[0] * 4, logits=np.zeros((4, 5)), top=5)
    got = probabilities(policy(tmp_path, checkpoint(state, kind)), hidden, [0] * 4, np.zeros((4, 5)))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_three_classes_use_the_third(tmp_path):
    state = random_state("HiddenStatesClassifier", hidden=3, outputs=3)
    hidden = np.random.default_rng(0).normal(size=(9, 3))
    want = reference(state, "HiddenStatesClassifier", hidden=hidden, tokens=[0] * 9, logits=np.zeros((9, 4)), top=3)
    got = probabilities(
        policy(tmp_path, checkpoint(state, "HiddenStatesClassifier")), hidden, [0] * 9, np.zeros((9, 4))
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_position_table_adds_its_first_row(tmp_path):
    state = random_state("HiddenStatesClassifier", hidden=3)
    state["backbone.position_embedding"] = torch.randn(7, 2)
    hidden = np.random.default_rng(0).normal(size=(5, 3))
    want = reference(state, "HiddenStatesClassifier", hidden=hidden, tokens=[0] * 5, logits=np.zeros((5, 4)), top=3)
    got = probabilities(
        policy(tmp_path, checkpoint(state, "HiddenStatesClassifier")), hidden, [0] * 5, np.zeros((5, 4))
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_trigger_on_the_very_first_token_and_discarded_end_token(tmp_path):
    """The small model would end at once; every position is a trigger, so the large model decides whether to stop."""
    instance = policy(tmp_path, checkpoint(vector_state()), threshold=0.0)
    models = {
        "small": lambda tokens: ([0.0, 9.0, 0.0, 0.0], [0.3, -1.2]),
        "large": lambda tokens: ([0.0, 0.0, 9.0, 0.0] if len(tokens) < 4 else [0.0, 9.0, 0.0, 0.0], None),
    }
    (trace,) = Driver(instance, models, max_tokens=9, end_ids=(1,)).run([Request([5])])
    assert trace.tokens == [2, 2, 2, 1]
    assert trace.writers == ["large"] * 4
    assert trace.discarded == [("small", i, 1) for i in range(4)]
    assert trace.ended


def test_threshold_one_is_the_small_model_alone(tmp_path):
    instance = policy(tmp_path, checkpoint(vector_state()), threshold=1.0)
    models = {"small": lambda tokens: ([0.0, 9.0, 0.0, 0.0], [0.3, -1.2]), "large": None}
    (trace,) = Driver(instance, models, max_tokens=9).run([Request([5])])
    assert trace.writers == ["small"] * 9


MEASURED = np.array([[12, 11, 10, 9.5, 9, 8.5, 8, 7.5, 7, 6.5, 0, -3]])


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"strategy": "entropy"}, "large"),
        ({"strategy": "entropy", "entropy_threshold": 1.2833}, "large"),
        ({"strategy": "entropy", "entropy_threshold": 1.2834}, "small"),
        ({"strategy": "immediate"}, "small"),
        ({"strategy": "immediate", "aleatoric_threshold": 2.2356}, "large"),
        ({"strategy": "immediate", "aleatoric_threshold": 2.2357}, "small"),
        ({"strategy": "immediate", "epistemic_threshold": 0.10101}, "large"),
        ({"strategy": "immediate", "epistemic_threshold": 0.10102}, "small"),
        ({"strategy": "immediate", "epistemic_threshold": 0.1, "entropy_threshold": 2.0}, "small"),
        ({"strategy": "immediate", "epistemic_threshold": 0.1, "entropy_threshold": 1.0}, "large"),
    ],
)
def test_vectors_of_the_strategies_without_a_network(params, want):
    assert decide(make("r2r", params), MEASURED) == [want]


def test_prepare_tells_of_a_missing_or_foreign_embedding(tmp_path):
    instance = policy(tmp_path, checkpoint(vector_state()))
    instance.prepare("small")
    instance.prepare("large")
    foreign = policy(tmp_path, checkpoint(vector_state()), embedding=lambda model: torch.zeros(4, 3))
    with pytest.raises(ConfigError, match=r"trained for a/small.*width 2 .*'small' has 3"):
        foreign.prepare("small")
    nowhere = make("r2r", {"checkpoint": "default_router.pt"}, directory=tmp_path)
    with pytest.raises(ConfigError, match="needs 'input_embedding', which is not offered"):
        nowhere.prepare("small")


def test_wrong_small_model_is_refused_with_both_sizes(tmp_path):
    instance = policy(tmp_path, checkpoint(vector_state()))
    with pytest.raises(ConfigError, match="hidden size 3, the router expects 2"):
        decide(instance, LOGITS, hidden=np.zeros((2, 3)), tokens=TOKENS)
    with pytest.raises(ConfigError, match="3 largest logits, 'small' has only 2"):
        decide(instance, LOGITS[:, :2], hidden=HIDDEN, tokens=[0, 1])


def several():
    """A file of a class that takes three positions, of 2 logits each."""
    state = random_state("LogitsClassifier", top=6)
    return checkpoint(state, "MultiLogitsClassifier")


def test_a_network_of_several_positions_is_no_use_to_the_rule_with_a_window(tmp_path):
    instance = policy(tmp_path, several(), strategy="neural_rolling")
    with pytest.raises(ConfigError, match=r"MultiLogitsClassifier takes 3 positions.*use strategy 'neural'"):
        instance.prepare("small")


@pytest.mark.parametrize("params", [{"strategy": "momentum"}, {"strategy": "rolling"}, {}])
def test_what_is_remembered_can_be_taken_back(tmp_path, params):
    """A copy of the state's dictionary brings a request back to where it was, whatever was decided since."""
    instance = policy(tmp_path, several()) if not params else make("r2r", params)
    assert instance.remembers("small")
    assert not instance.remembers("large")
    logits = np.random.default_rng(0).normal(size=(40, 12)) * 4 + 12
    row = FakeRow()

    def decided(positions):
        return [decide(instance, logits[i : i + 1], rows=[row])[0] for i in positions]

    decided(range(10))
    kept = dict(row.state)
    rest = decided(range(10, 40))
    decided(range(5))
    row.state = kept
    assert decided(range(10, 40)) == rest


def test_nothing_is_remembered_where_one_position_decides(tmp_path):
    for params in ({"strategy": "entropy"}, {"strategy": "immediate"}):
        assert not make("r2r", params).remembers("small")
    assert not policy(tmp_path, checkpoint(vector_state())).remembers("small")


def test_logits_that_are_no_evidence_are_critical():
    """digamma has poles at whole numbers below 0; the source takes the small model only if a measure is below."""
    logits = np.array([[-1.0, -2, -3, -4, -5, -6, -7, -8, -9, -10, -11]])
    assert decide(make("r2r", {"strategy": "immediate"}), logits) == ["large"]


def test_refusals():
    with pytest.raises(InvalidRequest, match="checkpoint is missing"):
        make("r2r")
    with pytest.raises(InvalidRequest, match="entropy_threshold has no use with strategy 'neural'"):
        make("r2r", {"checkpoint": "x.pt", "entropy_threshold": 0.5})
    with pytest.raises(InvalidRequest, match="momentum_factor has no use with strategy 'rolling'; it is for momentum"):
        make("r2r", {"strategy": "rolling", "momentum_factor": 0.5})
    with pytest.raises(InvalidRequest, match="threshold has no use with strategy 'momentum'; it is for neural, neural"):
        make("r2r", {"strategy": "momentum", "threshold": 0.5})
    with pytest.raises(InvalidRequest, match=r"momentum_factor is 1\.5; it lies in \[0, 1\]"):
        make("r2r", {"strategy": "momentum", "momentum_factor": 1.5})
    with pytest.raises(InvalidRequest, match="window_size is 0; it is at least 1"):
        make("r2r", {"strategy": "duo_rolling", "window_size": 0})
    with pytest.raises(InvalidRequest, match=r"'neural_multi_input'.*strategy \(.*rolling, "):
        make("r2r", {"strategy": "neural_multi_input"})
    with pytest.raises(InvalidRequest, match="known parameters: checkpoint, threshold"):
        make("r2r", {"treshold": 0.5})
