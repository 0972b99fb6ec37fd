"""Pieces of text: the same whatever came together, no stop word in them, every token in exactly one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenrouter.openai_api.tokens import Piece, PieceStream, Token
from tools.demo_models.tokenizer import END_OF_TEXT_ID, build_tokenizer

TOKENIZER = build_tokenizer()


def tokens(text: str) -> list[Token]:
    return [Token(token) for token in TOKENIZER.encode(text).ids]


def pieces(parts: list[list[Token]], stop: list[str]) -> list[Piece]:
    stream = PieceStream(TOKENIZER, [], stop)
    return [piece for part in parts for piece in stream.push(part)] + stream.flush()


def text(found: list[Piece]) -> str:
    return "".join(piece.text for piece in found)


@given(st.text("abü🙂", max_size=30), st.lists(st.text("abü", min_size=1, max_size=4), max_size=3), st.data())
def test_pieces_do_not_depend_on_what_came_together(written: str, stop: list[str], data: st.DataObject) -> None:
    whole = [*tokens(written), Token(END_OF_TEXT_ID)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert pieces(parts, stop) == pieces([[token] for token in whole], stop)


@given(st.text("abü🙂", max_size=30), st.lists(st.text("abü", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_stop_word_that_ends_first(written: str, stop: list[str]) -> None:
    """By the definition: the shortest beginning of the text that holds a stop word, up to where that begins."""
    expected = written
    for end in range(len(written) + 1):
        begins = [at for word in stop if (at := written[:end].find(word)) >= 0]
        if begins:
            expected = written[: min(begins)]
            break
    assert text(pieces([tokens(written)], stop)) == expected


@given(st.text("abü🙂", max_size=30))
def test_without_stop_words_every_token_is_in_one_piece(written: str) -> None:
    whole = [*tokens(written), Token(END_OF_TEXT_ID)]
    found = pieces([whole], [])
    assert text(found) == written
    assert [token for piece in found for token in piece.tokens] == whole


def test_text_that_may_begin_a_stop_word_is_held_and_then_given_out() -> None:
    stream = PieceStream(TOKENIZER, [], ["abc"])
    assert text(stream.push(tokens("xab"))) == "x"
    assert text(stream.push(tokens("d"))) == "abd"
    assert text(stream.push(tokens("ab"))) == ""
    assert text(stream.flush()) == "ab"
