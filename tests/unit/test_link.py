"""What two hosts say to each other beside the loops' frames, and the bytes that carry it; no socket anywhere."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.channel import ENTRY, LARGE, STRANGER, certificates, network
from tokenrouter.channel.address import DEFAULT_PORT, Address
from tokenrouter.channel.backoff import Backoff
from tokenrouter.channel.clocks import Offset, from_peer, to_peer
from tokenrouter.channel.framing import frame
from tokenrouter.channel.link import MARK, Link, Refused, Terms, refusal, refused
from tokenrouter.channel.remote import Plain, Remote
from tokenrouter.errors import ProtocolError
from tokenrouter.messages import Close, Open, PolicySpec, Report, Sampling
from tokenrouter.protocol_version import OLDEST_VERSION, PROTOCOL_VERSION, check_version

S = 10**9
ODD = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def pair(**theirs: Any) -> tuple[Link, Link]:
    """An entry model's link and that of `large`, nothing said yet."""
    entry, large = Terms("tokenrouter", "abc", 1), replace(Terms("large", "abc", 2), **theirs)
    return Link(entry, expected="large", now_ns=0), Link(large, expected="", now_ns=0)


def exchange(one: Link, other: Link, now_ns: int = 0) -> None:
    """Everything that either has to say, until both are silent."""
    while one.outbox or other.outbox:
        said, one.outbox[:] = list(one.outbox), []
        other.receive(said, now_ns=now_ns)
        said, other.outbox[:] = list(other.outbox), []
        one.receive(said, now_ns=now_ns)


def test_after_the_greetings_each_knows_the_other() -> None:
    entry, large = pair()
    exchange(entry, large)
    assert entry.peer is not None
    assert large.peer is not None
    assert (entry.peer.name, large.peer.name, large.peer.instance) == ("large", "tokenrouter", 1)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"repository": "abd"}, ["another model repository", "large", "tokenrouter", "abd", "abc", "every host"]),
        ({"name": "small"}, ["'large' was expected", "'small' answers", "models.*.host"]),
        ({"version": PROTOCOL_VERSION - 2, "oldest": PROTOCOL_VERSION - 3}, ["version 1", "there is too old"]),
        ({"version": PROTOCOL_VERSION + 2, "oldest": PROTOCOL_VERSION + 1}, ["version 5", "here is too old"]),
    ],
)
def test_who_does_not_fit_is_refused_by_name(theirs: dict[str, object], words: list[str]) -> None:
    entry, large = pair(**theirs)
    with pytest.raises(ProtocolError) as refusal_of_ours:
        entry.receive(large.outbox, now_ns=0)
    for word in words:
        assert word in str(refusal_of_ours.value)
    assert entry.peer is None


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_one_version_more_or_less_is_taken_by_both(step: int) -> None:
    """Hosts are upgraded one after the other."""
    entry, large = pair(version=PROTOCOL_VERSION + step, oldest=OLDEST_VERSION + step)
    exchange(entry, large)
    assert entry.peer is not None
    assert large.peer is not None


@given(ours=st.integers(1, 9), theirs=st.integers(1, 9))
def test_both_sides_judge_versions_alike_and_one_apart_is_fine(ours: int, theirs: int) -> None:
    def accepts(mine: int, other: int) -> bool:
        try:
            check_version("x", other, max(1, other - 1), version=mine, accepts=max(1, mine - 1))
        except ProtocolError:
            return False
        return True

    assert accepts(ours, theirs) == accepts(theirs, ours) == (abs(ours - theirs) <= 1)


def test_a_refusal_is_told_in_its_own_words_at_any_time() -> None:
    for greeted in (False, True):
        entry, large = pair()
        if greeted:
            exchange(entry, large)
        with pytest.raises(Refused, match="no room, d\\\\xe9sol\\\\xe9"):
            entry.receive([refusal("no room, désolé")], now_ns=0)
    assert refused(refusal("x" * 10_000)) == "x" * 2000
    assert refused(b"") is refused(MARK) is refused(MARK + b"\x90") is None


def test_frames_before_the_greeting_are_none() -> None:
    entry, _ = pair()
    with pytest.raises(ProtocolError, match="no greeting"):
        entry.receive([b"\x92\x01\x02"], now_ns=0)


@settings(max_examples=300)
@given(value=ODD, greeted=st.booleans())
def test_any_payload_of_the_link_is_refused_or_understood(value: object, greeted: bool) -> None:
    entry, large = pair()
    if greeted:
        exchange(entry, large)
    try:
        payload = MARK + msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        return
    with contextlib.suppress(ProtocolError):
        assert entry.receive([payload], now_ns=0) == []


@given(
    offset_ns=st.integers(-(10**13), 10**13),
    trips=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=30),
)
def test_the_offset_is_right_to_half_of_the_quickest_of_the_last_8_round_trips(
    offset_ns: int, trips: list[tuple[int, int]]
) -> None:
    """Whatever part of a round trip either way takes: the bound of NTP (RFC 5905, section 8)."""
    offset, now_ns = Offset(), 2 * 10**13
    assert offset.ns is None
    for there_ns, back_ns in trips:
        arrived_ns = now_ns + there_ns
        offset.pong(sent_ns=now_ns, peer_ns=arrived_ns + offset_ns, now_ns=arrived_ns + back_ns)
        now_ns = arrived_ns + back_ns + S
    assert offset.ns is not None
    assert abs(offset.ns - offset_ns) <= min(there + back for there, back in trips[-8:]) / 2 + 1


def test_pings_tell_the_offset_through_the_link() -> None:
    entry, large = pair()
    exchange(entry, large)
    hour = 3600 * S
    entry.tick(now_ns=5 * S)
    said, entry.outbox[:] = list(entry.outbox), []
    large.receive(said, now_ns=5 * S + hour + 200)
    entry.receive(large.outbox, now_ns=5 * S + 400)
    assert entry.offset.ns == hour


def test_times_travel_on_the_clock_of_whoever_reads_them() -> None:
    report = Report(5_000, [])
    message = Open(1, 1, 1, [1], 1, 9, Sampling(max_tokens=1), PolicySpec("single"), left_ns=7_000)
    assert from_peer(report, 0) is report
    assert to_peer(message, 0) is message
    assert from_peer(report, 4_000) == Report(1_000, [])
    assert from_peer(report, None) == Report(0, [])
    assert from_peer(report, 9_000) == Report(0, [])
    sent = to_peer(message, 500)
    assert isinstance(sent, Open)
    assert sent.left_ns == 7_500
    unknown = to_peer(message, None)
    assert isinstance(unknown, Open)
    assert unknown.left_ns == 0
    assert to_peer(Close(1, 0), None) == Close(1, 0)


def test_pings_go_out_every_two_seconds_and_thirty_of_silence_are_the_end() -> None:
    entry, large = pair()
    assert entry.due_ns == 30 * S
    exchange(entry, large)
    pings = 0
    while entry.due_ns < 30 * S:
        entry.tick(now_ns=entry.due_ns)
        pings += len(entry.outbox)
        entry.outbox.clear()
    with pytest.raises(ProtocolError, match="it has said nothing for 30 s"):
        entry.tick(now_ns=entry.due_ns)
    assert pings == 15


def test_a_peer_that_answers_pings_does_not_hang() -> None:
    entry, large = pair()
    exchange(entry, large)
    for now_ns in range(0, 200 * S, S):
        entry.tick(now_ns=now_ns)
        large.tick(now_ns=now_ns)
        exchange(entry, large, now_ns)


@given(st.integers(0, 2**32))
def test_pauses_double_from_50_ms_to_2_s_less_at_most_a_half(seed: int) -> None:
    backoff = Backoff(random.Random(seed))
    for full_ms in (50, 100, 200, 400, 800, 1600, 2000, 2000):
        assert full_ms / 2 <= backoff.pause_ns() / 1e6 <= full_ms
    assert 1000 <= backoff.longest_ns() / 1e6 <= 2000
    backoff.reset()
    assert backoff.pause_ns() <= 50e6


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield certificates(Path(folder))


def remotes(folder: Path | None, client: str = ENTRY) -> tuple[Remote, Remote]:
    """A dialled connection and the accepted one."""
    own, theirs = network(folder, client), network(folder, LARGE)
    return own.dialled("large", "127.0.0.1", now_ns=0), theirs.accepted(now_ns=0)


def talk(one: Remote, other: Remote, cut: Callable[[bytes], list[bytes]]) -> tuple[list[bytes], list[bytes]]:
    """Moves bytes both ways, cut somehow, until both are silent. Returns what each was told."""
    told: tuple[list[bytes], list[bytes]] = ([], [])
    while (there := one.take()) or other.link.outbox:
        for part in cut(there):
            told[1].extend(other.feed(part, now_ns=0))
        for part in cut(other.take()):
            told[0].extend(one.feed(part, now_ns=0))
        if not there:
            break
    return told


@pytest.mark.parametrize("secure", [True, False], ids=["mtls", "mesh"])
@settings(max_examples=15)
@given(payloads=st.lists(st.binary(max_size=20_000), max_size=4), size=st.integers(40, 5000))
def test_what_arrives_does_not_depend_on_how_the_bytes_are_cut(
    keys: Path, secure: bool, payloads: list[bytes], size: int
) -> None:
    def cut(data: bytes) -> list[bytes]:
        return [data[i : i + size] for i in range(0, len(data), size)]

    payloads = [payload for payload in payloads if payload[:1] != MARK]
    entry, large = remotes(keys if secure else None)
    entry.begin()
    large.begin()
    for _ in range(4):
        talk(entry, large, cut)
        talk(large, entry, cut)
    assert entry.counts
    assert large.counts
    sealed = entry.seal(b"".join(map(frame, payloads)))
    assert [found for part in cut(sealed) for found in large.feed(part, now_ns=0)] == payloads


@settings(max_examples=20)
@given(noise=st.binary(min_size=1, max_size=400), place=st.integers(0, 3))
def test_noise_is_refused_and_nothing_else_raised(keys: Path, noise: bytes, place: int) -> None:
    """At whatever point of a connection it comes."""
    entry, large = remotes(keys)
    entry.begin()
    large.begin()
    for _ in range(place):
        talk(entry, large, lambda data: [data])
    for part in (noise, noise * 50):
        try:
            assert large.feed(part, now_ns=0) == []
        except ProtocolError:
            large.farewell("noise")
            return


def test_a_stranger_may_not_announce_a_big_frame() -> None:
    _, large = remotes(None)
    with pytest.raises(ProtocolError, match="announced a frame"):
        large.feed((1 << 21).to_bytes(4, "little"), now_ns=0)


def test_a_certificate_of_another_name_is_refused_before_anything_is_heard(keys: Path) -> None:
    entry, large = remotes(keys, STRANGER)
    entry.begin()
    large.feed(entry.take(), now_ns=0)
    assert entry.feed(large.take(), now_ns=0) == []
    with pytest.raises(ProtocolError, match=r"certificate is of stranger.test; tls.peers allows entry.test"):
        large.feed(entry.take(), now_ns=0)
    with pytest.raises(Refused, match=r"stranger.test"):
        entry.feed(large.farewell("its certificate is of stranger.test"), now_ns=0)


def test_a_mesh_has_no_names_to_check() -> None:
    assert Plain().names() == ()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("gpu-b", Address("gpu-b", DEFAULT_PORT)),
        ("gpu-b.models.svc:9", Address("gpu-b.models.svc", 9)),
        (" 10.0.0.1:65535", Address("10.0.0.1", 65535)),
        ("[::1]:8004", Address("::1", 8004)),
        ("[::1]", Address("::1", DEFAULT_PORT)),
        ("::1", Address("::1", DEFAULT_PORT)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", ":8004", "a:", "a:b", "a:0", "a:65536", "a b", "http://a", "a/b:1", "[::1]:x"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"port|host"):
        Address.parse(text)
