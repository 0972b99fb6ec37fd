"""The documentation's example runs as printed, every built-in policy is documented, and the base class's hooks."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.unit.policy_harness import Driver, Request, make
from tokenrouter.errors import ConfigError
from tokenrouter.policies import BUILTIN, policy_class

DOCS = Path(__file__).parents[2] / "docs" / "policies.md"
EXAMPLE = "tests.unit.example_policy:LowConfidence"


def test_example_runs():
    sure, doubtful = np.array([0.0, 9.0, 0.0]), np.array([1.0, 0.9, 0.0])
    models = {"small": lambda tokens: (doubtful if len(tokens) % 3 == 0 else sure, None)}
    models["large"] = lambda tokens: (np.array([0.0, 0.0, 9.0]), None)
    (trace,) = Driver(make(EXAMPLE, {"threshold": 0.6}), models, max_tokens=6).run([Request([7])])
    assert trace.tokens == [1, 1, 2, 1, 1, 2]
    assert trace.discarded == [("small", 2, 0), ("small", 5, 0)]


def test_documentation_prints_the_example_as_it_is():
    source = (Path(__file__).parent / "example_policy.py").read_text(encoding="utf-8")
    code = source.split('"""\n\n', 1)[1]
    assert code.strip() in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", BUILTIN)
def test_documentation_names_every_policy_and_knob(name):
    text = DOCS.read_text(encoding="utf-8")
    assert f"`{name}`" in text
    for field in msgspec.structs.fields(policy_class(name).Params):
        assert f"`{field.name}`" in text, f"{name}: {field.name}"


@pytest.mark.parametrize("name", BUILTIN)
def test_registered_name_is_the_class_name(name):
    assert policy_class(name).name == name


def test_hooks_have_harmless_defaults():
    policy = make("single")
    policy.prepare("small")
    policy.prepare("")
    assert list(policy.mask("small", 100)) == []


def test_what_is_missing_is_named_with_what_there_is():
    with pytest.raises(ConfigError, match=r"'single' needs 'tokenizer', which is not offered .*hidden_size, input_emb"):
        make("single", hidden_size=8, input_embedding=lambda model: None).needed("tokenizer", None)
    with pytest.raises(ConfigError, match="nothing is"):
        make("single").needed("tokenizer", None)
