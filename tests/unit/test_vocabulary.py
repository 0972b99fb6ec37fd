"""Token ids that not every model knows are refused at load, or never sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken

from tests.support.repositories import byte_tokenizer, emulated_spec, write_emulated
from tokenrouter.checkpoint import end_ids, load_tokenizer
from tokenrouter.errors import ConfigError
from tokenrouter.offline import TokenRouter
from tokenrouter.vocabulary import check_same_tokenizer, common_size
from tools.build_repository.build import repository_files
from tools.build_repository.check import checked


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two models that avoid the scripted token, so that the noise over their whole width decides."""
    write_emulated(tmp_path, emulated_spec(options={"margin": -100.0}))
    return tmp_path


def widen(model: Path, width: int) -> None:
    path = model / "1" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": width}))


def add_token(model: Path, text: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True)])
    tokenizer.save(str(model / "1" / "tokenizer.json"))


def greedy_ids(repository: Path, writers: str) -> list[int]:
    with TokenRouter.from_repository(repository) as router:
        params = json.dumps({"writers": [writers]})
        return router.generate(["abc"], max_tokens=60, end_id=-1, policy_params=params)[0].tokens


def test_a_wider_model_never_samples_ids_that_the_other_cannot_embed(repository: Path) -> None:
    widen(repository / "large", 2000)
    assert common_size({name: repository / name / "1" for name in ("small", "large")}) == 257
    assert max(greedy_ids(repository, "large")) < 257


def test_without_the_limit_the_wider_model_would_have_sampled_them(repository: Path) -> None:
    for name in ("small", "large"):
        widen(repository / name, 2000)
        add = byte_tokenizer()
        add.add_tokens([f"<{i}>" for i in range(257, 2000)])
        add.save(str(repository / name / "1" / "tokenizer.json"))
    assert max(greedy_ids(repository, "large")) >= 257


def test_ids_in_the_padding_behind_the_tokenizer_are_never_sampled(repository: Path) -> None:
    for name in ("small", "large"):
        widen(repository / name, 2000)
    assert max(greedy_ids(repository, "small")) < 257


def test_an_added_token_is_refused_unless_the_configuration_accepts_it(repository: Path) -> None:
    add_token(repository / "large", "<|extra|>")
    widen(repository / "large", 258)
    folders = {name: repository / name / "1" for name in ("small", "large")}
    with pytest.raises(ConfigError, match=r"token id 257 is None and '<\|extra\|>'.*allow_added_tokens"):
        check_same_tokenizer(folders)
    check_same_tokenizer(folders, allow_added_tokens=True)
    write_emulated_entry(repository)
    assert max(greedy_ids(repository, "large")) < 257


def write_emulated_entry(repository: Path) -> None:
    files = repository_files(emulated_spec(entry={"allow_added_tokens": True}))
    (repository / "tokenrouter" / "config.pbtxt").write_text(files["tokenrouter/config.pbtxt"])


def test_a_swapped_id_is_refused_even_then(repository: Path) -> None:
    path = repository / "large" / "1" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (next(text for text, i in vocabulary.items() if i == wanted) for wanted in (5, 9))
    vocabulary[first], vocabulary[second] = 9, 5
    path.write_text(json.dumps(content))
    folders = {name: repository / name / "1" for name in ("small", "large")}
    with pytest.raises(ConfigError, match="token id 5 is"):
        check_same_tokenizer(folders, allow_added_tokens=True)


def specials(folder: Path, *texts: str) -> Path:
    """A checkpoint folder whose tokenizer has these special tokens behind the bytes and their end token."""
    folder.mkdir()
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 256 + len(texts), "vocab_size": 300}))
    return folder


def test_special_tokens_of_other_meaning_are_accepted_on_request_only(tmp_path: Path) -> None:
    folders = {"one": specials(tmp_path / "one", "<think>"), "other": specials(tmp_path / "other", "<|box|>", "<b>")}
    with pytest.raises(ConfigError, match=r"token id 257 is '<think>' and '<\|box\|>'.*allow_special_tokens"):
        check_same_tokenizer(folders, allow_added_tokens=True)
    check_same_tokenizer(folders, allow_added_tokens=True, allow_special_tokens=True)
    with pytest.raises(ConfigError, match="token id 258 is None"):
        check_same_tokenizer(folders, allow_special_tokens=True)


def test_a_swapped_byte_is_refused_with_other_special_tokens_too(tmp_path: Path) -> None:
    folders = {"one": specials(tmp_path / "one", "<think>"), "other": specials(tmp_path / "other", "<|box|>")}
    path = folders["other"] / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (next(text for text, i in vocabulary.items() if i == wanted) for wanted in (5, 9))
    vocabulary[first], vocabulary[second] = 9, 5
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="token id 5 is"):
        check_same_tokenizer(folders, allow_special_tokens=True)


# Tokens and ends that only tokenizer_config.json names


def tokenizer_config(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **fields})
    )
    return folder


def added(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    return {"content": content, **plain, **flags}


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param({"257": added("<think>", special=True)}, id="special"),
        pytest.param({"258": added("cat"), "257": added("<|a|>", special=True, rstrip=True)}, id="two"),
        pytest.param({"256": added("<|endoftext|>", special=True)}, id="known"),
        pytest.param({"256": added("<|endoftext|>", special=True, lstrip=True)}, id="known-with-other-flags"),
        pytest.param({}, id="none"),
    ],
)
def test_tokens_of_tokenizer_config_have_the_ids_that_transformers_gives_them(
    tmp_path: Path, tokens: dict[str, Any]
) -> None:
    folder = tokenizer_config(tmp_path, added_tokens_decoder=tokens)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = load_tokenizer(folder)
    for text in ("a cat <think> b", "<|a|>  cats", "x <|endoftext|> y"):
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_token_with_another_id_in_each_file_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_config(tmp_path, added_tokens_decoder={"300": added("<think>")})
    with pytest.raises(
        ConfigError, match=r"tokenizer_config\.json: added_tokens_decoder has '<think>' with id 300.*257"
    ):
        load_tokenizer(folder)
    tokenizer_config(tmp_path, added_tokens_decoder={"x": 3})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: added_tokens_decoder is no table"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"eos_token": "<|endoftext|>"}, (256,)),
        ({"eos_token": added("<|endoftext|>", special=True)}, (256,)),
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"257": added("<|im_end|>", special=True)}}, (257,)),
        ({"eos_token": None}, ()),
    ],
)
def test_an_end_that_only_the_tokenizer_names_ends_a_response(
    tmp_path: Path, fields: dict[str, Any], ends: tuple[int, ...]
) -> None:
    folder = tokenizer_config(tmp_path, **fields)
    assert end_ids(folder) == ends
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert end_ids(folder) == (5, 6)


def test_an_end_in_special_tokens_map_counts_too(tmp_path: Path) -> None:
    folder = tokenizer_config(tmp_path)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert end_ids(folder) == (256,)


def test_an_end_that_nobody_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tokenizer_config\.json: eos_token is '</s>', which tokenizer\.json does not"
    ):
        end_ids(tokenizer_config(tmp_path, eos_token="</s>"))
    with pytest.raises(ConfigError, match=r"eos_token is '</s>'"):
        check_same_tokenizer({"alone": tmp_path})
    check_same_tokenizer({"alone": tmp_path}, compare_ends=False)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [256, 257]}))
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id is 257, which is no token of the model's 257; "):
        end_ids(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ["a"]}))
    with pytest.raises(ConfigError, match=r'config\.json: eos_token_id is \["a"\]; token ids are whole numbers'):
        end_ids(tmp_path)


def test_ends_that_the_deployment_names_need_not_be_the_same_in_every_model(tmp_path: Path) -> None:
    write_emulated(tmp_path, emulated_spec())
    (tmp_path / "large" / "1" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 7]}))
    with pytest.raises(
        ConfigError, match=r"eos_token_id is \(256,\) and \(256, 7\) \(or name the ids: entry\.end_ids\)"
    ):
        TokenRouter.from_repository(tmp_path)
    spec = emulated_spec(entry={"end_ids": [256]})
    (tmp_path / "tokenrouter" / "config.pbtxt").write_text(repository_files(spec)["tokenrouter/config.pbtxt"])
    with TokenRouter.from_repository(tmp_path) as router:
        assert router.generate(["abc"], max_tokens=3)[0].tokens
    assert checked(spec, tmp_path).entry.end_ids == (256,)
