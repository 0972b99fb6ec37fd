from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from tests.support.repositories import END_ID, VOCAB_SIZE, byte_tokenizer, emulated_spec, write_emulated
from tokenrouter.assembly import Entry
from tokenrouter.checkpoint import end_ids, load_tokenizer, vocabulary_size
from tokenrouter.errors import ConfigError
from tokenrouter.offline import TokenRouter
from tokenrouter.repository import Repository
from tokenrouter.vocabulary import check_same_tokenizer


def with_token(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<think>", special=True)])
    return tokenizer


def with_swap(tokenizer: Tokenizer) -> Tokenizer:
    parts = json.loads(tokenizer.to_str())
    vocab = parts["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    return Tokenizer.from_str(json.dumps(parts))


def with_normalizer(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def checkpoint(folder: Path, tokenizer: Tokenizer | None = None, **facts: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END_ID, **facts}))
    return folder


# --- one tokenizer for all --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "facts", "says"),
    [
        pytest.param(with_token, {}, "token id 257 is None and '<think>'", id="an-added-token"),
        pytest.param(with_swap, {}, "token id 32 is 'A' and 'B'", id="two-swapped-ids"),
        pytest.param(lambda t: t, {"eos_token_id": 7}, r"eos_token_id is \(256,\) and \(7,\)", id="another-end"),
        pytest.param(with_normalizer, {}, "their normalizer differs", id="another-normalizer"),
    ],
)
def test_models_with_different_tokenizers_are_refused_with_the_first_difference(
    tmp_path: Path, change: Callable[[Tokenizer], Tokenizer], facts: dict[str, Any], says: str
) -> None:
    small = checkpoint(tmp_path / "small")
    same = checkpoint(tmp_path / "same")
    large = checkpoint(tmp_path / "large", change(byte_tokenizer()), **facts)
    check_same_tokenizer({"small": small, "same": same})
    with pytest.raises(ConfigError, match=f"'small' and 'large' have different tokenizers: {says}"):
        check_same_tokenizer({"small": small, "same": same, "large": large})


def test_a_repository_with_two_tokenizers_does_not_load(tmp_path: Path) -> None:
    write_emulated(tmp_path, emulated_spec())
    checkpoint(tmp_path / "large" / "1", with_token(byte_tokenizer()))
    with pytest.raises(ConfigError, match="'small' and 'large'"):
        TokenRouter.from_repository(tmp_path)


def test_the_order_of_several_end_ids_does_not_matter(tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "a", eos_token_id=[1, 2]), checkpoint(tmp_path / "b", eos_token_id=[2, 1])
    check_same_tokenizer({"a": one, "b": other})


# --- facts in a folder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        pytest.param({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, (1, 2), id="generation-config-first"),
        pytest.param({}, {"eos_token_id": 3}, (3,), id="config"),
        pytest.param({"eos_token_id": 0}, {}, (0,), id="zero"),
        pytest.param(None, {}, (), id="none"),
    ],
)
def test_the_end_of_a_response_comes_from_the_checkpoint(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], ends: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8, **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_ids(tmp_path) == ends


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        pytest.param("config.json", "{", "config.json is not valid JSON", id="broken-config"),
        pytest.param("config.json", "[]", "config.json is no JSON object", id="a-list"),
        pytest.param("tokenizer.json", "{}", "tokenizer.json cannot be loaded", id="broken-tokenizer"),
        pytest.param("tokenizer.json", None, "tokenizer.json is missing", id="no-tokenizer"),
    ],
)
def test_a_bad_file_of_a_checkpoint_is_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    checkpoint(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=f"{tmp_path}.*{says}"):
        check_same_tokenizer({"small": tmp_path, "large": tmp_path})


def test_the_width_of_the_logits_is_the_models_not_the_tokenizers(tmp_path: Path) -> None:
    assert vocabulary_size(checkpoint(tmp_path / "a", vocab_size=300)) == 300
    assert vocabulary_size(checkpoint(tmp_path / "b")) == VOCAB_SIZE


def test_a_tokenizer_that_was_saved_with_truncation_or_padding_leaves_prompts_as_they_are(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=8, pad_id=0)
    loaded = load_tokenizer(checkpoint(tmp_path, tokenizer))
    assert len(loaded.encode("a").ids) == 1
    assert len(loaded.encode("a long prompt").ids) == 13


# --- an entry -------------------------------------------------------------------------------------------------------


def test_an_entry_takes_its_defaults_from_the_first_model(tmp_path: Path) -> None:
    write_emulated(tmp_path, emulated_spec(entry={"policy": "single", "policy_params": {}}))
    repository = Repository(tmp_path)
    entry = Entry(repository.entry("tokenrouter"), repository)
    assert (entry.builder.end_ids, entry.builder.vocab_size) == ((END_ID,), VOCAB_SIZE)
    hello = entry.hello("tokenrouter", "routed")
    assert (hello.peer, hello.share, hello.models) == ("tokenrouter", "routed", ("small", "large"))
    assert entry.orchestrator().settings.models == ("small", "large")


@pytest.mark.parametrize(
    ("policy", "params", "says"),
    [
        pytest.param("nothing", {}, "policy is 'nothing'", id="unknown"),
        pytest.param("random", {"q": 1}, "unknown field `q`", id="unknown-parameter"),
        pytest.param("single", {"model": "huge"}, "'huge'", id="unknown-model"),
    ],
)
def test_a_deployment_with_a_bad_policy_does_not_load(
    tmp_path: Path, policy: str, params: dict[str, Any], says: str
) -> None:
    write_emulated(tmp_path, emulated_spec(entry={"policy": policy, "policy_params": params}))
    repository = Repository(tmp_path)
    config = repository.entry("tokenrouter")
    with pytest.raises(Exception, match=says):
        Entry(config, repository)


def test_end_ids_beyond_the_vocabulary_are_refused_at_load(tmp_path: Path) -> None:
    write_emulated(tmp_path, emulated_spec())
    raw = dict(Repository(tmp_path).config("tokenrouter"))
    raw["parameters"] = {**raw["parameters"], "end_ids": {"string_value": f"1,{VOCAB_SIZE}"}}
    repository = Repository(tmp_path, configs={"tokenrouter": raw})
    with pytest.raises(ConfigError, match=f"end_ids.*{VOCAB_SIZE}"):
        Entry(repository.entry("tokenrouter"), repository)
