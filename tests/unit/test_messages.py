from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenrouter.messages import (
    Close,
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
    copy_state,
    decode_for_orchestrator,
    decode_for_subserver,
    encode,
)

NATURAL = st.integers(0, 2**63 - 1)
TOKENS = st.lists(st.integers(0, 2**31), max_size=20)
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
    max_tokens=NATURAL,
    end_ids=st.tuples(NATURAL, NATURAL),
    seed=st.integers(0, 2**64 - 1),
    temperature=FINITE,
    top_k=NATURAL,
    top_p=FINITE,
    bad_words=st.lists(st.lists(NATURAL, max_size=3).map(tuple), max_size=3).map(tuple),
    log_probs=st.booleans(),
)
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
)
VISIT = {"request": NATURAL, "visit": NATURAL, "in_flight": NATURAL, "tokens": TOKENS, "state": STATE, "source": TEXT}
TO_SUBSERVER = (
    st.builds(Hello, version=NATURAL, peer=TEXT, share=TEXT, models=st.tuples(TEXT, TEXT), policy=POLICY)
    | st.builds(Open, prompt_tokens=NATURAL, kv_tokens=NATURAL, sampling=SAMPLING, policy=POLICY, **VISIT)
    | st.builds(Resume, start=NATURAL, left_ns=NATURAL, **VISIT)
    | st.builds(Close, request=NATURAL, in_flight=NATURAL)
    | st.builds(InFlight, in_flight=NATURAL)
)
TO_ORCHESTRATOR = st.builds(
    ModelInfo, *[NATURAL, TEXT, TEXT, st.booleans(), NATURAL, NATURAL, NATURAL, NATURAL]
) | st.builds(Report, at_ns=NATURAL, rows=st.lists(ROW, max_size=4))
Decode = Callable[[bytes | memoryview], Message]
# Each side's decoder, and what the other side sends.
WIRE = st.tuples(st.just(decode_for_subserver), TO_SUBSERVER) | st.tuples(
    st.just(decode_for_orchestrator), TO_ORCHESTRATOR
)
DECODERS = [decode_for_subserver, decode_for_orchestrator]


@settings(deadline=None)
@given(wire=WIRE)
def test_every_message_comes_out_as_it_went_in(wire: tuple[Decode, Message]) -> None:
    decode, message = wire
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@settings(deadline=None)
@given(wire=WIRE)
def test_a_message_for_the_other_side_is_a_decode_error(wire: tuple[Decode, Message]) -> None:
    decode, message = wire
    (other,) = [decoder for decoder in DECODERS if decoder is not decode]
    with pytest.raises(msgspec.DecodeError):
        other(encode(message))


@pytest.mark.parametrize("decode", DECODERS)
@settings(deadline=None, max_examples=300)
@given(payload=st.binary(max_size=60))
def test_arbitrary_bytes_are_a_message_or_a_decode_error(decode: Decode, payload: bytes) -> None:
    try:
        message = decode(payload)
    except msgspec.DecodeError:
        return
    assert decode(encode(message)) == message


@settings(deadline=None)
@given(wire=WIRE, cut=st.integers(0, 400))
def test_a_cut_off_message_is_a_decode_error(wire: tuple[Decode, Message], cut: int) -> None:
    decode, message = wire
    payload = encode(message)
    if cut < len(payload):
        with pytest.raises(msgspec.DecodeError):
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
def test_what_is_no_message_raises_a_decode_error(decode: Decode, content: Any) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(msgspec.msgpack.encode(content))


@given(state=STATE)
def test_a_copied_state_is_what_would_arrive(state: dict[str, Any] | None) -> None:
    arrived = decode_for_subserver(encode(Resume(1, 1, 1, 0, [], state)))
    assert isinstance(arrived, Resume)
    assert copy_state(state or {}) == (arrived.state or {})


def test_a_copied_state_shares_nothing_with_the_original() -> None:
    state = {"list": [1]}
    copy_state(state)["list"].append(2)
    assert state == {"list": [1]}
