from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenrouter.channel.framing import FrameDecoder, frame
from tokenrouter.errors import ProtocolError


@given(payloads=st.lists(st.binary(max_size=300), max_size=12), cuts=st.lists(st.integers(0, 4000), max_size=20))
def test_the_frames_do_not_depend_on_how_the_bytes_are_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, payloads))
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    decoder = FrameDecoder()
    got = [found for i, j in pairwise(edges) for found in decoder.feed(stream[i:j])]
    assert got == payloads
    assert not decoder.partial


def test_frames_come_byte_by_byte_too_each_as_soon_as_it_is_whole() -> None:
    decoder = FrameDecoder()
    stream = frame(b"") + frame(b"abc") + frame(b"d")
    got = [(i, found) for i in range(len(stream)) for found in decoder.feed(stream[i : i + 1])]
    assert got == [(3, b""), (10, b"abc"), (15, b"d")]


@pytest.mark.parametrize("length", range(1, 10))
def test_a_stream_that_ends_inside_a_frame_is_partial(length: int) -> None:
    decoder = FrameDecoder()
    assert decoder.feed(frame(b"x" * 6)[:length]) == []
    assert decoder.partial


def test_an_oversized_frame_is_refused_before_its_body_arrives() -> None:
    decoder = FrameDecoder(max_frame=10)
    assert decoder.feed(frame(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(ProtocolError, match="11 bytes; the limit is 10"):
        decoder.feed((11).to_bytes(4, "little"))


def test_an_oversized_payload_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenrouter.channel.framing.MAX_FRAME", 10)
    with pytest.raises(ProtocolError, match="11 bytes"):
        frame(b"x" * 11)


def test_memory_views_are_fine_and_copied() -> None:
    data = bytearray(frame(b"abc"))
    (payload,) = FrameDecoder().feed(memoryview(data))
    data[:] = bytes(len(data))
    assert payload == b"abc"
