"""Facts that stand in a checkpoint folder in Hugging Face format, read without loading the model."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tokenrouter.errors import ConfigError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} if there is no such file.

    Raises:
        ConfigError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    refuse_pointer(path)
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as exc:
        raise ConfigError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no JSON object")
    return content


def refuse_pointer(path: Path) -> None:
    """Raises ConfigError if the file is what Git leaves in its place when its content was not fetched."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ConfigError(f"{path} is a Git LFS pointer, not the file; run `git lfs pull` in {path.parent}")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder, with the tokens that only tokenizer_config.json adds.

    Raises:
        ConfigError: tokenizer.json is missing or broken, or the two files give a token different ids.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; a checkpoint folder needs a fast tokenizer (tokenizer.json)")
    refuse_pointer(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:
        raise ConfigError(f"{path} cannot be loaded: {exc}") from exc
    # Training scripts leave these in the file; a prompt would be cut or padded in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(tokenizer, folder / "tokenizer_config.json")
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, path: Path) -> None:
    """Adds what `added_tokens_decoder` has and tokenizer.json has not, or with other flags, as transformers does."""
    entries = read_json(path).get("added_tokens_decoder") or {}
    try:
        tokens = sorted(((int(key), AddedToken(**entry)) for key, entry in entries.items()), key=itemgetter(0))
    except (AttributeError, TypeError, ValueError) as exc:
        raise ConfigError(f"{path}: added_tokens_decoder is no table of tokens by id ({exc}); save it again") from exc
    known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([token for _, token in tokens if repr(token) not in known])
    for token_id, token in tokens:
        found = tokenizer.token_to_id(token.content)
        if found != token_id:
            raise ConfigError(
                f"{path}: added_tokens_decoder has {token.content!r} with id {token_id}, but with tokenizer.json it "
                f"gets {found}; save the tokenizer again, so that both say the same"
            )


def end_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end a response; empty if no file names one.

    `eos_token_id` of generation_config.json, else of config.json, else what tokenizer_config.json or
    special_tokens_map.json calls `eos_token`.

    Raises:
        ConfigError: a file names something else than token ids, or a token that model or tokenizer do not have.
    """
    for name in ("generation_config.json", "config.json"):
        ids = _text_field(folder / name, "eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise ConfigError(f"{folder / name}: eos_token_id is {json.dumps(ids)}; token ids are whole numbers")
        beyond = [token_id for token_id in ids if token_id >= vocabulary_size(folder)]
        if beyond:
            raise ConfigError(
                f"{folder / name}: eos_token_id is {beyond[0]}, which is no token of the model's "
                f"{vocabulary_size(folder)}; correct it, or name the ids of the deployment (entry.end_ids)"
            )
        return tuple(ids)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = read_json(folder / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None:
            return (_token_id(folder, name, text),)
    return ()


def _token_id(folder: Path, name: str, text: Any) -> int:
    token_id = load_tokenizer(folder).token_to_id(text) if isinstance(text, str) else None
    if token_id is None:
        raise ConfigError(
            f"{folder / name}: eos_token is {text!r}, which tokenizer.json does not have; correct one of them, or name "
            "the id in generation_config.json (eos_token_id)"
        )
    return token_id


def vocabulary_size(folder: Path) -> int:
    """Width of the model's logits: `vocab_size` of config.json, else the tokenizer's size."""
    size = _text_field(folder / "config.json", "vocab_size")
    return int(size) if size else load_tokenizer(folder).get_vocab_size(with_added_tokens=True)


def _text_field(path: Path, key: str) -> Any:
    """A field of the language model, which models of text and images keep in a part `text_config`."""
    content = read_json(path)
    text = content.get("text_config")
    value = content.get(key)
    return text.get(key) if value is None and isinstance(text, dict) else value
