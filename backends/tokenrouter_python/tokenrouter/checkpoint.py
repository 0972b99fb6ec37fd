"""Facts that stand in a checkpoint folder in Hugging Face format, read without loading the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from tokenrouter.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = "model.embed_tokens.weight"
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
    """The tokenizer of a checkpoint folder.

    Raises:
        ConfigError: tokenizer.json is missing or broken.
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
    return tokenizer


def end_ids(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, else of config.json; empty if neither names one."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


def vocabulary_size(folder: Path) -> int:
    """Width of the model's logits: `vocab_size` of config.json, else the tokenizer's size."""
    size = read_json(folder / "config.json").get("vocab_size")
    return int(size) if size else load_tokenizer(folder).get_vocab_size(with_added_tokens=True)


def read_embedding(checkpoint: Path) -> Tensor:
    """[V, H] input embedding of a checkpoint folder.

    Raises:
        ConfigError: no safetensors file has it.
    """
    from safetensors import safe_open

    index = checkpoint / "model.safetensors.index.json"
    name = read_json(index).get("weight_map", {}).get(_EMBEDDING)
    path = checkpoint / (name or "model.safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            table: Tensor = file.get_tensor(_EMBEDDING)
    except Exception as exc:
        raise ConfigError(f"{path}: {_EMBEDDING} cannot be read ({exc}); the router needs the input embedding") from exc
    return table
