"""Malformed input: the generators, and what they do to the channel's framing and codec."""

from __future__ import annotations

import importlib.util
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.fuzz import grpc, http, openai
from perf.fuzz.answers import Answers
from perf.fuzz.codec import check, corpus
from perf.fuzz.frames import TO_ORCHESTRATOR, TO_SUBSERVER, payload, traffic
from perf.fuzz.values import NUMBERS, TEXTS
from tokenrouter.channel.carrier import Disconnected, Received
from tokenrouter.channel.framing import frame
from tokenrouter.channel.unix import UnixCarrier
from tokenrouter.errors import ProtocolError
from tokenrouter.messages import Message, decode_for_orchestrator, decode_for_subserver, encode

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0
SIDES = [
    pytest.param(decode_for_subserver, TO_SUBSERVER, id="to-subserver"),
    pytest.param(decode_for_orchestrator, TO_ORCHESTRATOR, id="to-orchestrator"),
]
ODD = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.lists(st.integers(-2, 2**40), max_size=3)
    | st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2)
)


@pytest.mark.parametrize("make", [http.http_request, openai.openai_request, grpc.grpc_request, payload])
def test_a_request_follows_from_seed_and_number_and_every_kind_comes(make: Any) -> None:
    arguments = [TO_SUBSERVER] if make is payload else []
    first = [make(random.Random(f"1/{number}"), *arguments) for number in range(400)]
    again = [make(random.Random(f"1/{number}"), *arguments) for number in range(400)]
    assert repr(first) == repr(again)
    assert make is payload or len(Counter(request.kind for request in first)) == len(
        sys.modules[make.__module__].KINDS  # type: ignore[attr-defined]
    )


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all parts of a decoded message."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(found for key, value in inner for found in places(value, (*path, key)))]


@pytest.mark.parametrize(("decode", "messages"), SIDES)
@settings(max_examples=300)
@given(data=st.data(), value=ODD)
def test_any_part_of_any_message_may_be_anything(
    decode: Any, messages: Sequence[Message], data: st.DataObject, value: Any
) -> None:
    """It is refused, or it is a message that comes out as it went in."""
    content = msgspec.msgpack.decode(encode(data.draw(st.sampled_from(messages))))
    path = data.draw(st.sampled_from(places(content)))
    if not path:
        content = value
    else:
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = value
    check(msgspec.msgpack.encode(content))


@pytest.mark.parametrize(("decode", "messages"), SIDES)
@settings(max_examples=200)
@given(data=st.data())
def test_any_part_of_any_message_may_be_missing_or_doubled(
    decode: Any, messages: Sequence[Message], data: st.DataObject
) -> None:
    content = msgspec.msgpack.decode(encode(data.draw(st.sampled_from(messages))))
    *path, last = data.draw(st.sampled_from([path for path in places(content) if path]))
    parent = content
    for key in path:
        parent = parent[key]
    if data.draw(st.booleans()):
        del parent[last]
    elif isinstance(parent, list):
        parent.insert(last, parent[last])
    check(msgspec.msgpack.encode(content))


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_nearly_messages_and_streams_of_them_are_refused_or_sound(seed: int) -> None:
    draw = random.Random(seed)
    for messages in (TO_SUBSERVER, TO_ORCHESTRATOR):
        check(payload(draw, messages))
        check(b"".join(traffic(draw, messages)))


def test_check_finds_a_decoder_that_raises_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: bytes) -> Message:
        raise OverflowError("not for a peer to see")

    monkeypatch.setattr("perf.fuzz.codec.decode_for_subserver", broken)
    with pytest.raises(OverflowError):
        check(encode(TO_SUBSERVER[0]))


def test_sound_messages_are_messages() -> None:
    for message in TO_SUBSERVER:
        assert decode_for_subserver(encode(message)) == message
    for message in TO_ORCHESTRATOR:
        assert decode_for_orchestrator(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_for_subserver(b"\xc1")


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_of_two_peers_only_the_one_that_sends_malformed_traffic_pays(seed: int) -> None:
    """The other one's frames arrive, all and in order."""
    with tempfile.TemporaryDirectory(prefix="tr-") as folder:
        path = Path(folder) / "s" / "small.sock"
        path.parent.mkdir(mode=0o700)
        server = UnixCarrier(listen=path)
        try:
            _two_peers(server, path, random.Random(seed))
        finally:
            server.close()


def _two_peers(server: UnixCarrier, path: Path, draw: random.Random) -> None:
    sound = [b"%d" % number for number in range(20)]
    got: dict[int, list[bytes]] = {}
    lost = []
    with socket.socket(socket.AF_UNIX) as good, socket.socket(socket.AF_UNIX) as bad:
        good.connect(str(path))
        good.sendall(b"".join(map(frame, sound[:10])))
        bad.connect(str(path))
        bad.sendall(draw.randbytes(draw.randint(1, 50)) + b"".join(traffic(draw)))
        bad.shutdown(socket.SHUT_WR)
        good.sendall(b"".join(map(frame, sound[10:])))
        deadline = time.monotonic() + PATIENCE_S
        while (not lost or sound not in got.values()) and time.monotonic() < deadline:
            for event in server.poll(0.1):
                if isinstance(event, Received):
                    got.setdefault(event.peer, []).append(event.payload)
                elif isinstance(event, Disconnected):
                    lost.append(event.peer)
    (mine,) = [peer for peer, payloads in got.items() if payloads == sound]
    assert lost
    assert mine not in lost


def test_what_was_not_answered_and_slow_medians_are_told() -> None:
    answers = Answers()
    for status, seconds in (("400", 0.25), ("400", 0.125), ("500", 0.5)):
        answers.note("odd", status, seconds)
    answers.note("odd", "closed", 9.0, answered=False)
    facts = answers.facts()
    assert (facts["requests"], facts["answered"], facts["median_seconds"], facts["slowest_seconds"]) == (
        4,
        3,
        0.25,
        0.5,
    )
    assert facts["unanswered"] == [("odd", "closed")]
    assert facts["statuses"] == {"odd": {"400": 2, "500": 1, "closed": 1}}


def test_the_values_have_what_breaks_readers() -> None:
    assert any(number != number for number in NUMBERS)
    assert {2**63, -1, 2**64} <= set(NUMBERS)
    assert any("\ud800" in text for text in TEXTS)


def test_the_corpus_is_sound_and_broken() -> None:
    contents = corpus()
    assert contents == corpus()
    for content in contents:
        check(content)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this platform")
def test_coverage_finds_nothing_in_the_codec() -> None:
    """A bounded number of runs, so that it takes seconds on any machine."""
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(corpus()):
            (Path(folder) / f"{number}").write_bytes(content)
        command = [
            sys.executable,
            "-m",
            "perf.fuzz.coverage",
            folder,
            "-runs=20000",
            "-seed=1",
            f"-artifact_prefix={folder}/",
        ]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "Done 20000 runs" in found.stderr
