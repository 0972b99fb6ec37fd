"""Text to token ids: prompts, and the words that a client forbids or stops at.

The batch calls of `tokenizers` release Python's lock and its single ones do not, so batches of one are used wherever a
text or a list of ids may be long: other threads go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from tokenizers import Tokenizer

# Behind it a word is encoded as it is within a text, without the space that some tokenizers put in front of all text.
_ANCHOR = "\n"
# Characters. The encoding of a million tokens takes 15 ms to be freed, in which no other thread runs.
_PIECE = 1 << 15


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The special tokens by id; they give no text."""
    return {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a prompt. What it begins with already, as a rendered template does, is not put in front again."""
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
    front = _added_in_front(tokenizer) if add_special_tokens else 0
    return ids[front:] if ids[:front] == ids[front : 2 * front] else ids


def surely_tokens(tokenizer: Tokenizer, text: str) -> Iterator[int]:
    """How many tokens a long text has at least, by more and more of its pieces, none of which costs much.

    Pieces are cut anywhere, where text alone may have more tokens than within the whole: so half of them count.
    """
    tokens = 0
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        tokens += len(tokenizer.encode_batch([piece], add_special_tokens=False)[0])
        yield tokens // 2


def decode_prompt(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of a prompt that came as ids, without special tokens."""
    return str(tokenizer.decode_batch([ids], skip_special_tokens=True)[0])


@lru_cache(maxsize=8)
def largest_id(tokenizer: Tokenizer) -> int:
    """The largest token id that a text can give."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)


@lru_cache(maxsize=8)
def _added_in_front(tokenizer: Tokenizer) -> int:
    """How many special tokens its template puts in front of a text."""
    added = tokenizer.encode("a").special_tokens_mask
    return next((i for i, mark in enumerate(added) if not mark), 0)


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
