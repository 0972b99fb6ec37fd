"""Text to token ids: prompts, and the words that a client forbids or stops at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

# Behind it a word is encoded as it is within a text, without the space that some tokenizers put in front of all text.
_ANCHOR = "\n"


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The special tokens by id; they give no text."""
    return {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a prompt. What it begins with already, as a rendered template does, is not put in front again."""
    encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    ids, added = list(encoding.ids), encoding.special_tokens_mask
    front = next((i for i, mark in enumerate(added) if not mark), 0)
    return ids[front:] if ids[:front] == ids[front : 2 * front] else ids


def word_forms(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Token ids of a word with and without a space in front: most vocabularies have both, "cat" and " cat".

    A form that ends with another one is left out: where it is written, the other is too.
    """
    anchor = _encode(tokenizer, _ANCHOR)
    behind = _encode(tokenizer, _ANCHOR + word)
    within = behind[len(anchor) :] if behind[: len(anchor)] == anchor else ()
    found: list[tuple[int, ...]] = []
    for ids in sorted(
        {_encode(tokenizer, word), _encode(tokenizer, f" {word}"), within}, key=lambda ids: (len(ids), ids)
    ):
        if ids and not any(ids[-len(other) :] == other for other in found):
            found.append(ids)
    return found


def special_words(tokenizer: Tokenizer, words: Sequence[str]) -> dict[str, int]:
    """Those of the words that are one special token, with its id."""
    ids = {text: token for token, text in special_tokens(tokenizer).items()}
    return {word: ids[word] for word in words if word in ids}


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
