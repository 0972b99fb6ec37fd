"""One vocabulary for all models of a deployment: token ids travel between them, so every id must mean the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenrouter.checkpoint import end_ids, load_tokenizer, vocabulary_size
from tokenrouter.errors import ConfigError

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens", "model")
# With other special tokens: prompts are encoded once, by the first model's tokenizer, so only reading ids has to agree.
_READING = ("decoder",)


def common_size(folders: Mapping[str, Path]) -> int:
    """Token ids below this are known to every tokenizer and every model of these checkpoint folders.

    Models of one family have logits of different width (padding), and tokenizers fewer entries than that; an id from
    beyond would have no text, or no embedding at the next model.
    """
    widths = [vocabulary_size(folder) for folder in folders.values()]
    return min([*widths, *(_size(load_tokenizer(folder)) for folder in folders.values())])


def check_same_tokenizer(
    folders: Mapping[str, Path],
    *,
    allow_added_tokens: bool = False,
    allow_special_tokens: bool = False,
    compare_ends: bool = True,
) -> None:
    """Refuses models whose tokenizers differ.

    Args:
        folders: checkpoint folder by model name; the first one is what the others are compared with.
        allow_added_tokens: accept that a tokenizer has further tokens behind the ids of the others; they are never
            sampled (see `common_size`).
        allow_special_tokens: accept that an id is a special token of other meaning in each tokenizer; end ids are then
            not compared either.
        compare_ends: whether the models have to end with the same ids; not if the deployment names them.

    Raises:
        ConfigError: names the first entry that differs, or a folder whose end ids cannot be read.
    """
    (first, folder), *others = folders.items()
    reference = load_tokenizer(folder)
    compare_ends = compare_ends and not allow_special_tokens
    ends = {name: end_ids(each) for name, each in folders.items()} if compare_ends else {}
    for name, other in others:
        tokenizer = load_tokenizer(other)
        limit = min(_size(reference), _size(tokenizer)) if allow_added_tokens else None
        difference = _difference(reference, tokenizer, limit, allow_special_tokens)
        if difference is None and ends and set(ends[name]) != set(ends[first]):
            difference = f"eos_token_id is {ends[first]} and {ends[name]} (or name the ids: entry.end_ids)"
        if difference is not None:
            raise ConfigError(
                f"models {first!r} and {name!r} have different tokenizers: {difference}. Token ids travel between the "
                "models, so routing needs one tokenizer (further tokens at the end of one of them can be accepted with "
                "the parameter allow_added_tokens, special tokens of other meaning with allow_special_tokens)"
            )


def _size(tokenizer: Tokenizer) -> int:
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _difference(one: Tokenizer, other: Tokenizer, limit: int | None, allow_special: bool) -> str | None:
    """The first difference among ids below `limit` (None: all), then among the parts of the tokenizers."""
    left, right = _entries(one, limit), _entries(other, limit)
    # Added tokens stand behind the learned vocabulary; what they are called is a convention of each model.
    special = (_added(one) & _added(other)) if allow_special else set()
    for token_id in sorted((left.keys() | right.keys()) - special):
        if left.get(token_id) != right.get(token_id):
            return f"token id {token_id} is {left.get(token_id)!r} and {right.get(token_id)!r}"
    one_parts, other_parts = _parts(one, limit), _parts(other, limit)
    parts = _READING if allow_special else _PARTS
    return next((f"their {part} differs" for part in parts if one_parts.get(part) != other_parts.get(part)), None)


def _added(tokenizer: Tokenizer) -> set[int]:
    return set(tokenizer.get_added_tokens_decoder())


def _entries(tokenizer: Tokenizer, limit: int | None) -> dict[int, str]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True).items()
    return {token_id: text for text, token_id in vocabulary if limit is None or token_id < limit}


def _parts(tokenizer: Tokenizer, limit: int | None) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    if limit is not None:
        parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < limit]
    return parts
