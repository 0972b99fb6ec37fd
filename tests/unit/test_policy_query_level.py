"""Query-level routing: the rule, the text it looks at, each router, and calibration."""

import math
import zlib
from itertools import pairwise

import numpy as np
import pytest

from tests.unit.policy_harness import Driver, FakeRow, Request, decide, make
from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.policies.base import EntryRequest
from tokenrouter.policies.checkpoints import RouterFile, save_router
from tokenrouter.policies.checkpoints.win_rate import Bert, Classifier, win_rate
from tokenrouter.policies.query_level import threshold_for_share
from tokenrouter.rng import Stream, draw

THREE = ("small", "middle", "large")


def entry(policy, prompt="", tokens=(1,), seed=0):
    return policy.entry(EntryRequest(prompt, tokens, seed))


def test_vector_of_three_class_logits():
    assert win_rate([1.2, 0.1, -0.3]) == pytest.approx(0.642673, abs=1e-6)


def test_vector_of_calibration():
    win_rates = [k / 10 for k in range(1, 11)]
    threshold = threshold_for_share(win_rates, 0.3)
    assert threshold == pytest.approx(0.73)
    assert sum(w >= threshold for w in win_rates) / len(win_rates) == 0.3
    with pytest.raises(InvalidRequest, match="no win rates"):
        threshold_for_share([], 0.3)


def test_length_rule_counts_tokens():
    policy = make("query_level", {"min_tokens": 3})
    assert [entry(policy, tokens=range(n)) for n in (2, 3, 4)] == ["small", "large", "large"]


@pytest.mark.parametrize("seed", range(8))
def test_threshold_is_inclusive(seed):
    w = draw(seed, 0, Stream.ENTRY)
    for threshold, want in ((w, "large"), (math.nextafter(w, 1.0), "small"), (0.0, "large")):
        assert entry(make("query_level", {"router": "random", "threshold": threshold}), seed=seed) == want


def test_many_models_count_the_thresholds_reached():
    policy = make("query_level", {"router": "random", "threshold": [0.3, 0.8]}, THREE)
    for seed in range(50):
        w = draw(seed, 0, Stream.ENTRY)
        assert entry(policy, seed=seed) == THREE[(w >= 0.3) + (w >= 0.8)]
    even = make("query_level", {"router": "random"}, THREE)
    for seed in range(50):
        w = draw(seed, 0, Stream.ENTRY)
        assert entry(even, seed=seed) == THREE[(w >= 1 / 3) + (w >= 2 / 3)]


def test_whole_response_stays_where_it_began():
    models = {name: (lambda tokens, i=i: (np.eye(3)[i], None)) for i, name in enumerate(THREE)}
    policy = make("query_level", {"router": "random"}, THREE)
    traces = Driver(policy, models, max_tokens=10).run([Request([1], seed=s) for s in range(10)])
    for seed, trace in enumerate(traces):
        assert trace.writers == [entry(policy, seed=seed)] * 10
        assert trace.discarded == []
    assert len({trace.writers[0] for trace in traces}) == 3
    assert policy.receive(FakeRow()).limit is None
    assert decide(policy, np.zeros((2, 3)), model="middle") == ["middle"] * 2


CHAT = "<|im_start|>system\nprove<|im_end|>\n<|im_start|>user\nprove it<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(
    ("prompt", "params", "want"),
    [
        (CHAT, {}, "hello"),
        (CHAT + "<|im_start|>assistant\n", {}, "hello"),
        ("plain text", {}, "plain text"),
        ("<|im_start|>user\nno end", {}, "no end"),
        ("Q: one A: two Q: three A:", {"message_start": "Q:", "message_end": "A:"}, " three "),
        (CHAT, {"message_start": ""}, CHAT),
    ],
)
def test_only_the_last_message_counts(prompt, params, want):
    assert make("query_level", params).last_message(prompt) == want


def test_patterns_of_a_file(tmp_path):
    (tmp_path / "hard.txt").write_text("# hard ones\n\n(?i)\\bprove\\b\n\\d{4,}\n", encoding="utf-8")
    policy = make("query_level", {"router": "regex", "checkpoint": "hard.txt"}, directory=tmp_path)
    policy.prepare("")
    assert entry(policy, "Prove that") == "large"
    assert entry(policy, "improve 12345") == "large"
    assert entry(policy, "improve that") == "small"
    # The word is in earlier messages only.
    assert entry(policy, CHAT) == "small"


@pytest.mark.parametrize(("text", "message"), [("# none\n", "no pattern"), ("(", "regular expressions")])
def test_refused_patterns(tmp_path, text, message):
    (tmp_path / "p.txt").write_text(text, encoding="utf-8")
    policy = make("query_level", {"router": "regex", "checkpoint": "p.txt"}, directory=tmp_path)
    policy.prepare("small")
    with pytest.raises(ConfigError, match=message):
        policy.prepare("")


def classifier_tensors(buckets=64, width=4):
    rng = np.random.default_rng(0)
    return {
        "embedding.weight": rng.normal(size=(buckets, width)).astype(np.float32),
        "output.weight": rng.normal(size=(1, width)).astype(np.float32),
        "output.bias": np.array([0.1], dtype=np.float32),
    }


def test_classifier_equals_its_definition(tmp_path):
    tensors = classifier_tensors()
    save_router(RouterFile("query_level", tensors, threshold=0.55), tmp_path / "q.safetensors")
    text = "Prove: 2+2 = 4"
    words = ["prove", ":", "2", "+", "2", "=", "4"]
    features = [*words, *(f"{a} {b}" for a, b in pairwise(words))]
    rows = [zlib.crc32(feature.encode()) % 64 for feature in features]
    z = 0.1 + tensors["embedding.weight"][rows].mean(0) @ tensors["output.weight"][0]
    w = 1 / (1 + math.exp(-z))
    assert Classifier(tmp_path / "q.safetensors")(text) == pytest.approx(w, abs=1e-6)
    policy = make("query_level", {"router": "classifier", "checkpoint": "q.safetensors"}, directory=tmp_path)
    # The file's threshold is used.
    assert entry(policy, text) == ("large" if w >= 0.55 else "small")
    assert Classifier(tmp_path / "q.safetensors")("") == pytest.approx(1 / (1 + math.exp(-0.1)))


@pytest.mark.parametrize("name", ["embedding.weight", "output.weight", "output.bias"])
def test_classifier_names_the_tensor_that_does_not_fit(tmp_path, name):
    tensors = classifier_tensors()
    save_router(
        RouterFile("query_level", tensors | {name: np.zeros((2, 2, 2), np.float32)}), tmp_path / "q.safetensors"
    )
    with pytest.raises(ConfigError, match=f"'{name}' has shape"):
        Classifier(tmp_path / "q.safetensors")
    del tensors[name]
    save_router(RouterFile("query_level", tensors), tmp_path / "q.safetensors")
    with pytest.raises(ConfigError, match=f"'{name}' is missing"):
        Classifier(tmp_path / "q.safetensors")


def bert_folder(folder, labels=3):
    """A tiny BERT classifier with random weights, as RouteLLM's format has it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    torch.manual_seed(0)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "prove": 2, "hello": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    fast.model_max_length = 512
    fast.save_pretrained(folder)
    config = BertConfig(
        vocab_size=4,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        num_labels=labels,
        initializer_range=1.0,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_bert_is_the_probability_of_its_first_class(tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = bert_folder(tmp_path / "bert")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[2, 3]]), attention_mask=torch.ones(1, 2)).logits[0]
    w = float(logits.softmax(-1)[0])
    assert Bert(folder)("prove hello") == pytest.approx(w, abs=1e-5)
    for threshold, want in ((w - 1e-4, "large"), (w + 1e-4, "small")):
        params = {"router": "bert", "checkpoint": "bert", "threshold": threshold}
        assert entry(make("query_level", params, directory=tmp_path), "prove hello") == want
    # Longer than the model's positions: truncated.
    assert 0.0 <= Bert(folder)("prove " * 100) <= 1.0


def test_bert_with_other_classes_or_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has 2 classes; expected 3"):
        Bert(bert_folder(tmp_path / "two", labels=2))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be loaded as a sequence classifier"):
        Bert(tmp_path / "empty")


@pytest.mark.parametrize(
    ("params", "models", "text"),
    [
        ({"threshold": 1.5}, ("small", "large"), r"threshold is 1\.5"),
        ({"threshold": [0.2, 0.4]}, ("small", "large"), "2 models need 1 thresholds"),
        ({"threshold": 0.4}, THREE, "3 models need 2 thresholds"),
        ({"threshold": [0.4, 0.2]}, THREE, "in rising order"),
        ({"router": "bert"}, THREE, "'bert' needs a checkpoint"),
        ({"checkpoint": "x"}, THREE, "'length' has no use for a checkpoint"),
    ],
)
def test_refusals(params, models, text):
    with pytest.raises(InvalidRequest, match=text):
        make("query_level", params, models)


def test_checkpoint_outside_of_the_deployment_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="lies outside"):
        make("query_level", {"router": "regex", "checkpoint": "/etc/passwd"}, directory=tmp_path)


def test_one_model_leaves_nothing_to_choose():
    with pytest.raises(ConfigError, match="only solo"):
        make("query_level", {}, ("solo",))
