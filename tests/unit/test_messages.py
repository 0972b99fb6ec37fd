from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenrouter.errors import ProtocolError
from tokenrouter.messages import (
    Close,
    Fate,
    Guess,
    Guesses,
    Hello,
    InFlight,
    Message,
    ModelInfo,
    Open,
    Outcome,
    PolicySpec,
    Report,
    ReportRow,
    Resume,
    Sampling,
    Settled,
    copy_state,
    decode_for_orchestrator,
    decode_for_subserver,
    encode,
)

NATURAL = st.integers(0, 2**63 - 1)
TOKEN = st.integers(0, 2**31 - 1)
TOKENS = st.lists(TOKEN, max_size=20)
TEXT = st.text(max_size=20)
FINITE = st.floats(allow_nan=False)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FINITE | TEXT | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
STATE = st.none() | st.dictionaries(TEXT, VALUE, max_size=3)
POLICY = st.builds(PolicySpec, TEXT, TEXT)
SAMPLING = st.builds(
    Sampling,
    max_tokens=st.integers(1, 2**31 - 1),
    end_ids=st.tuples(TOKEN, TOKEN),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 1e300),
    top_k=NATURAL,
    top_p=st.floats(0, 1, exclude_min=True),
    presence_penalty=st.floats(-1e300, 1e300),
    bad_words=st.lists(st.lists(TOKEN, max_size=3).map(tuple), max_size=3).map(tuple),
    log_probs=st.booleans(),
)
GUESSES = st.lists(st.builds(Guess, TOKEN, st.booleans(), st.none() | FINITE), max_size=4)
ROW = st.builds(
    ReportRow,
    request=NATURAL,
    visit=NATURAL,
    outcome=st.sampled_from(Outcome),
    tokens=TOKENS,
    target=TEXT,
    state=STATE,
    log_probs=st.none() | st.lists(FINITE, max_size=4),
    error=st.none() | st.tuples(TEXT, TEXT),
    guesses=st.none() | GUESSES,
    returned=st.none() | st.lists(st.booleans(), max_size=4),
)
VISIT = {"request": NATURAL, "visit": NATURAL, "in_flight": NATURAL, "tokens": TOKENS, "state": STATE, "source": TEXT}


@st.composite
def opens(draw: st.DrawFn) -> Open:
    """An `Open` whose lease holds what it asks for."""
    tokens = draw(st.lists(TOKEN, min_size=1, max_size=20))
    prompt_tokens = draw(st.integers(1, len(tokens)))
    sampling = draw(SAMPLING)
    least = max(len(tokens), prompt_tokens + sampling.max_tokens)
    fields = {name: draw(strategy) for name, strategy in VISIT.items() if name != "tokens"}
    lease = draw(st.integers(least, 2**63 - 1))
    return Open(
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        kv_tokens=lease,
        sampling=sampling,
        policy=draw(POLICY),
        **fields,
    )


TO_SUBSERVER = (
    st.builds(Hello, version=NATURAL, peer=TEXT, share=TEXT, models=st.tuples(TEXT, TEXT), policy=POLICY)
    | opens()
    | st.builds(Resume, start=NATURAL, left_ns=NATURAL, **VISIT)
    | st.builds(Guesses, request=NATURAL, visit=NATURAL, in_flight=NATURAL, start=NATURAL, guesses=GUESSES)
    | st.builds(Settled, NATURAL, NATURAL, NATURAL, NATURAL, NATURAL, NATURAL, st.sampled_from(Fate))
    | st.builds(Close, request=NATURAL, in_flight=NATURAL)
    | st.builds(InFlight, in_flight=NATURAL)
)
TO_ORCHESTRATOR = st.builds(
    ModelInfo, *[NATURAL, TEXT, TEXT, st.booleans(), NATURAL, NATURAL, st.integers(1, 2**63 - 1), NATURAL]
) | st.builds(Report, at_ns=NATURAL, rows=st.lists(ROW, max_size=4))
Decode = Callable[[bytes | memoryview], Message]
# Each side's decoder, and what the other side sends.
WIRE = st.tuples(st.just(decode_for_subserver), TO_SUBSERVER) | st.tuples(
    st.just(decode_for_orchestrator), TO_ORCHESTRATOR
)
DECODERS = [decode_for_subserver, decode_for_orchestrator]


@given(wire=WIRE)
def test_every_message_comes_out_as_it_went_in(wire: tuple[Decode, Message]) -> None:
    decode, message = wire
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@given(wire=WIRE)
def test_a_message_for_the_other_side_is_a_protocol_error(wire: tuple[Decode, Message]) -> None:
    decode, message = wire
    (other,) = [decoder for decoder in DECODERS if decoder is not decode]
    with pytest.raises(ProtocolError):
        other(encode(message))


@pytest.mark.parametrize("decode", DECODERS)
@settings(max_examples=300)
@given(payload=st.binary(max_size=60))
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(decode: Decode, payload: bytes) -> None:
    try:
        message = decode(payload)
    except ProtocolError:
        return
    assert decode(encode(message)) == message


@given(wire=WIRE, cut=st.integers(0, 400))
def test_a_cut_off_message_is_a_protocol_error(wire: tuple[Decode, Message], cut: int) -> None:
    decode, message = wire
    payload = encode(message)
    if cut < len(payload):
        with pytest.raises(ProtocolError):
            decode(payload[:cut])


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "content",
    [
        pytest.param([99, 1], id="unknown-tag"),
        pytest.param([], id="no-tag"),
        pytest.param({"in_flight": 1}, id="a-map"),
        pytest.param([5, "one"], id="wrong-type"),
        pytest.param([4, 1], id="missing-field"),
        pytest.param([17, 0, [[1, 1, 77, []]]], id="unknown-outcome"),
        pytest.param(None, id="nothing"),
    ],
)
def test_what_is_no_message_raises_a_protocol_error(decode: Decode, content: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(content))


NESTED = b"\x91" * 100_000
SOUND = Open(1, 1, 1, [1, 2], 1, 9, Sampling(max_tokens=8), PolicySpec("single"))


@pytest.mark.parametrize("decode", DECODERS)
def test_deep_nesting_is_no_message(decode: Decode) -> None:
    with pytest.raises(ProtocolError, match="no message"):
        decode(b"\x98\x03\x01\x01\x01\x00\x90\x81\xa1a" + NESTED)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param((1,), -1, id="request"),
        pytest.param((4, 0), -1, id="token"),
        pytest.param((4, 0), 2**31, id="token-too-large"),
        pytest.param((4,), [], id="no-tokens"),
        pytest.param((5,), 0, id="no-prompt"),
        pytest.param((5,), 3, id="prompt-longer-than-tokens"),
        pytest.param((6,), 1, id="lease-below-tokens"),
        pytest.param((6,), 8, id="lease-below-response"),
        pytest.param((7, 0), 0, id="max_tokens"),
        pytest.param((7, 3), math.nan, id="temperature"),
        pytest.param((7, 3), -1.0, id="temperature-negative"),
        pytest.param((7, 5), 0.0, id="top_p"),
        pytest.param((7, 7), 0.0, id="repetition_penalty"),
        pytest.param((7, 8), math.inf, id="presence_penalty"),
        pytest.param((7, 9), math.nan, id="frequency_penalty"),
    ],
)
def test_an_open_that_could_not_be_served_is_no_message(path: tuple[int, ...], value: Any) -> None:
    content = msgspec.msgpack.decode(encode(SOUND))
    *outer, last = path
    target = content
    for index in outer:
        target = target[index]
    target[last] = value
    with pytest.raises(ProtocolError):
        decode_for_subserver(msgspec.msgpack.encode(content))
    assert decode_for_subserver(encode(SOUND)) == SOUND


def test_a_resume_from_a_negative_position_is_no_message() -> None:
    with pytest.raises(ProtocolError):
        decode_for_subserver(msgspec.msgpack.encode([3, 1, 1, 1, -1, []]))


def test_what_cannot_travel_is_a_protocol_error() -> None:
    for state in ({"set": object()}, {"text": "\ud800"}, {"number": 2**70}):
        with pytest.raises(ProtocolError, match="cannot be encoded"):
            encode(Resume(1, 1, 1, 0, [], state))


@given(state=STATE)
def test_a_copied_state_is_what_would_arrive(state: dict[str, Any] | None) -> None:
    arrived = decode_for_subserver(encode(Resume(1, 1, 1, 0, [], state)))
    assert isinstance(arrived, Resume)
    assert copy_state(state or {}) == (arrived.state or {})


def test_a_copied_state_shares_nothing_with_the_original() -> None:
    state = {"list": [1]}
    copy_state(state)["list"].append(2)
    assert state == {"list": [1]}
