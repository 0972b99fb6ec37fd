from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.support.repositories import END_ID, byte_tokenizer, emulated_spec, piece_tokenizer, write_emulated
from tokenrouter.offline import TokenRouter
from tokenrouter.response import Result
from tokenrouter.text import StopWords, TextStream

BYTES = byte_tokenizer()
MIXED = "a🙂é漢字"
ROUTINGS = [
    pytest.param({"policy": "single"}, id="one-model"),
    pytest.param({"policy": "scripted", "policy_params": '{"writers": [0, 1]}'}, id="alternating"),
    pytest.param({"policy": "scripted", "policy_params": '{"writers": [0, 0, 0, 1, 1]}'}, id="emoji-in-two-halves"),
    pytest.param({"policy": "scripted", "policy_params": '{"writers": [1, 0, 0], "trigger": "keep"}'}, id="kept"),
]


def byte_ids(data: bytes) -> list[int]:
    """Tokens of raw bytes, valid or not."""
    table = {text: i for text, i in BYTES.get_vocab().items() if i != END_ID}
    alphabet = byte_alphabet()
    return [table[alphabet[byte]] for byte in data]


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte, from its definition."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama's and Mistral's: spaces are part of the next word, unknown characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "hello", "a", "▁a", "."]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


FALLBACK = byte_fallback_tokenizer()
BYTE, WORDS = 3, range(259, 266)
SPACE, HELLO, WORLD = 259, 260, 261


def pieces(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(token) for token in tokens), stream.flush()]


# --- text -------------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(data=st.binary(max_size=80), prompt=st.text(max_size=5))
def test_the_pieces_of_any_bytes_join_to_what_decoding_them_at_once_gives(data: bytes, prompt: str) -> None:
    got = pieces(BYTES, BYTES.encode(prompt).ids, byte_ids(data))
    assert "".join(got) == data.decode("utf-8", errors="replace")


@given(text=st.text(alphabet="a é🙂漢\u0301👩\u200d", max_size=20))
def test_no_piece_of_a_valid_text_holds_a_replacement_mark(text: str) -> None:
    got = pieces(BYTES, BYTES.encode("x").ids, BYTES.encode(text).ids)
    assert "\ufffd" not in "".join(got)
    assert "".join(got) == text
    assert got[-1] == ""


def test_a_character_comes_out_with_its_last_byte() -> None:
    assert pieces(BYTES, [1], BYTES.encode("a🙂b").ids) == ["a", "", "", "", "🙂", "b", ""]


def test_a_response_that_ends_inside_a_character_ends_with_a_replacement_mark() -> None:
    assert pieces(BYTES, [1], byte_ids("a🙂".encode()[:-1])) == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_prompt_is_never_repeated_even_if_it_ends_inside_a_character(length: int) -> None:
    prompt = byte_ids(b"seen" + "🙂".encode()[:length])
    assert "seen" not in "".join(pieces(BYTES, prompt, byte_ids("🙂".encode()[length:] + b"new")))
    assert "".join(pieces(BYTES, prompt, byte_ids(b"new"))).endswith("new")


def test_special_tokens_give_no_text_and_do_not_split_a_character() -> None:
    tokens = BYTES.encode("a🙂b").ids
    for cut in range(len(tokens) + 1):
        got = pieces(BYTES, [END_ID, 1], [*tokens[:cut], END_ID, *tokens[cut:]])
        assert "".join(got) == "a🙂b"


def test_endless_broken_bytes_come_out_as_they_go_and_cost_a_bounded_decode_each() -> None:
    class Counting:
        """Counts what is decoded again."""

        def __init__(self) -> None:
            self.decoded = 0

        def decode(self, tokens: Sequence[int], **options: Any) -> str:
            self.decoded += len(tokens)
            return BYTES.decode(list(tokens), **options)

    stream = TextStream(BYTES, [1])
    stream._tokenizer = counting = Counting()  # type: ignore[assignment]
    stream._stream = type("Refusing", (), {"step": lambda *_: None})()  # as the library does for broken text
    stream._begin = lambda context: stream._stream  # type: ignore[method-assign]
    text = [stream.push(token) for token in byte_ids(b"\x80" * 2000)]
    assert len("".join(text)) > 1950
    assert counting.decoded < 2000 * 40


def test_a_character_behind_endless_broken_bytes_is_whole() -> None:
    for broken in range(10, 40):
        data = b"\x80" * broken + "🙂é".encode()
        assert "".join(pieces(BYTES, [1], byte_ids(data))) == "\ufffd" * broken + "🙂é"


def test_words_keep_their_leading_space_behind_a_prompt() -> None:
    assert pieces(FALLBACK, [HELLO], [WORLD, HELLO]) == [" world", " hello", ""]


def test_words_keep_their_leading_space_behind_a_chat_template_of_special_tokens() -> None:
    assert pieces(FALLBACK, [HELLO, *[1, 2] * 5], [WORLD]) == [" world", ""]


def test_words_keep_their_leading_space_behind_a_broken_character() -> None:
    assert pieces(FALLBACK, [HELLO], [263, BYTE + 0x80, WORLD, WORLD]) == ["a", "", "\ufffd world", " world", ""]


@pytest.mark.parametrize("seed", range(5))
def test_a_byte_fallback_tokenizer_gives_the_text_of_the_whole_history_behind_the_prompt(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        prompt = [rng.choice(WORDS) for _ in range(rng.randint(1, 8))]
        tokens: list[int] = []
        for _ in range(rng.randint(1, 10)):
            character = [BYTE + byte for byte in rng.choice("🙂é漢").encode()]
            tokens += character if rng.random() < 0.4 else [rng.choice([*WORDS, 1, 2])]
        head = FALLBACK.decode(prompt)
        whole = FALLBACK.decode(prompt + tokens)
        assert head + "".join(pieces(FALLBACK, prompt, tokens)) == whole


# --- stop words -------------------------------------------------------------------------------------------------------


def first_match(text: str, words: Sequence[str]) -> int | None:
    """Naive: the shortest prefix that ends with a stop word."""
    return next(
        (end for end in range(len(text) + 1) if any(word and text[:end].endswith(word) for word in words)), None
    )


@settings(max_examples=400)
@given(
    deltas=st.lists(st.text(alphabet="ab\n", max_size=4), max_size=8),
    words=st.lists(st.text(alphabet="ab\n", max_size=9), max_size=3),
)
def test_the_first_match_in_text_order_is_found_wherever_the_pieces_begin(deltas: list[str], words: list[str]) -> None:
    stop = StopWords(words)
    sent = ""
    for delta in deltas:
        cut = stop.cut(delta)
        if cut is not None:
            assert len(sent) + cut == first_match("".join(deltas), words)
            return
        sent += delta
    assert first_match(sent, words) is None


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenRouter]:
    folder: Path = tmp_path_factory.mktemp("repository")
    write_emulated(folder, emulated_spec(), piece_tokenizer("AB", "CC", "DEF", "GH"))
    with TokenRouter.from_repository(folder) as loaded:
        yield loaded


def streamed(router: TokenRouter, prompt: str, **fields: Any) -> tuple[str, Result]:
    """The join of all deltas, and the result."""
    text = ""
    for update in router.stream(prompt, **fields):
        text += update.text
        if update.result is not None:
            return text, update.result
    raise AssertionError("the stream ended without a result")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_cut_anywhere_the_deltas_join_to_the_text_of_the_tokens(router: TokenRouter, routing: dict[str, Any]) -> None:
    data = MIXED.encode()
    for cut in range(1, len(data) + 1):
        (whole,) = router.generate([MIXED], max_tokens=cut, **routing)
        joined, result = streamed(router, MIXED, max_tokens=cut, **routing)
        assert joined == result.text == whole.text == data[:cut].decode("utf-8", errors="replace")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("words", "text"),
    [
        pytest.param(["DE"], "ABCCDE", id="inside-a-token"),
        pytest.param(["CD"], "ABCCD", id="across-tokens"),
        pytest.param(["F"], "ABCCDEF", id="end-of-a-token"),
        pytest.param(["BCCDEFG"], "ABCCDEFG", id="across-four-tokens"),
        pytest.param(["EF", "CCD"], "ABCCD", id="the-later-word-ends-earlier"),
        pytest.param(["ABX", "H"], "ABCCDEFGH", id="a-false-start"),
        pytest.param(["Z", ""], "ABCCDEFGH", id="never"),
        pytest.param(["A"], "A", id="first-token"),
    ],
)
def test_generation_ends_at_the_first_match_and_nothing_behind_it_is_sent(
    router: TokenRouter, routing: dict[str, Any], words: list[str], text: str
) -> None:
    (whole,) = router.generate(["ABCCDEFGH"], max_tokens=20, stop_words=words, **routing)
    joined, result = streamed(router, "ABCCDEFGH", max_tokens=20, stop_words=words, **routing)
    assert joined == result.text == whole.text == text
    assert whole.finish_reason == result.finish_reason == "stop"
    assert whole.tokens == result.tokens
    for subserver in router._driver.subservers.values():
        assert subserver.engine.blocks_leased == 0


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [
        pytest.param(0, "ABCCD", id="none"),
        pytest.param(2, "ABCCD", id="ends-behind-the-minimum-though-it-begins-before"),
        pytest.param(3, "ABCCDEFGH", id="ends-before-the-minimum"),
    ],
)
def test_a_stop_word_counts_if_it_ends_behind_min_tokens(
    router: TokenRouter, routing: dict[str, Any], min_tokens: int, text: str
) -> None:
    fields: dict[str, Any] = {"max_tokens": 20, "min_tokens": min_tokens, "stop_words": ["CCD"], **routing}
    (whole,) = router.generate(["ABCCDEFGH"], **fields)
    joined, _ = streamed(router, "ABCCDEFGH", **fields)
    assert whole.text == joined == text
