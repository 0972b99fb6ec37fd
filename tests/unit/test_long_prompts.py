"""Prompts for which no model has room: refused before much is made of them, and no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.repositories import END_ID, VOCAB_SIZE, byte_tokenizer
from tokenrouter import tokenization
from tokenrouter.errors import PromptTooLong
from tokenrouter.messages import PolicySpec
from tokenrouter.request import RequestBuilder, RequestFields
from tokenrouter.tokenization import surely_tokens

BUILDER = RequestBuilder(byte_tokenizer(), VOCAB_SIZE, (END_ID,), PolicySpec("single", "{}"))
WORDS = ["hello", "world", "a", "routing", "tokens", "\n", "12", "antidisestablishmentarianism"]


class Limit:
    """Of a prompt's tokens; remembers what it was asked."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, list[int]()

    def __call__(self, prompt_tokens: int, *, at_least: bool = False) -> None:
        self.asked.append(prompt_tokens)
        if prompt_tokens >= self.most:
            raise PromptTooLong(f"{prompt_tokens} {at_least}")


def test_a_text_is_refused_by_its_first_pieces() -> None:
    """A token per byte: a million of them, of which 2,000 suffice."""
    limit = Limit(1000)
    with pytest.raises(PromptTooLong, match="16384 True"):
        BUILDER.build(RequestFields(text_input="x" * 1_000_000, max_tokens=1), check_length=limit)
    assert limit.asked == [250_000, tokenization._PIECE // 2]


def test_a_text_that_only_looks_long_is_served() -> None:
    """Eight characters a token: as many as four times the limit, and 500 tokens."""
    tokenizer = Tokenizer(
        models.BPE({"h": 0, "hh": 1, "hhhh": 2, "hhhhhhhh": 3}, [("h", "h"), ("hh", "hh"), ("hhhh", "hhhh")])
    )
    builder = RequestBuilder(tokenizer, 4, (), PolicySpec("single", "{}"))
    limit = Limit(1000)
    request = builder.build(RequestFields(text_input="h" * 4000, max_tokens=1), check_length=limit)
    assert request.tokens == [3] * 500
    assert limit.asked == [1000, 250, 500]


def test_ids_are_refused_by_their_number() -> None:
    limit = Limit(1000)
    with pytest.raises(PromptTooLong):
        BUILDER.build(RequestFields(input_ids=[VOCAB_SIZE] * 1000, max_tokens=1), check_length=limit)
    assert limit.asked == [1000]
    BUILDER.build(RequestFields(input_ids=[65] * 1000, input_length=999, max_tokens=1), check_length=limit)


def trained(*, words: bool) -> Tokenizer:
    """A byte-level BPE over the words, which merges within words only or across them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS) * 3, *WORDS], trainer)
    return tokenizer


TRAINED = {"within words": trained(words=True), "across words": trained(words=False)}


@pytest.mark.parametrize("tokenizer", TRAINED.values(), ids=TRAINED)
@given(words=st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=60))
def test_a_text_never_has_fewer_tokens_than_its_pieces_say(tokenizer: Tokenizer, words: list[str]) -> None:
    text = " ".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "_PIECE", 48)
        found = list(surely_tokens(tokenizer, text))
    assert found == sorted(found)
    assert not found or found[-1] <= len(tokenizer.encode(text).ids)
