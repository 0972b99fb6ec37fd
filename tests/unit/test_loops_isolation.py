"""What breaks at one request, or at one peer, costs nobody else anything."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.repositories import END_ID
from tests.unit.loops_server import PATIENCE_S, PROMPT, Collected, Server
from tokenrouter.channel.framing import FrameDecoder, frame
from tokenrouter.channel.unix import socket_path
from tokenrouter.errors import InternalError, InvalidRequest, ProtocolError
from tokenrouter.messages import InFlight, Open, Outcome, PolicySpec, Report, Sampling, decode_for_orchestrator, encode
from tokenrouter.orchestrator.transcript import Transcript
from tokenrouter.request import RequestFields
from tokenrouter.response import Update


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frame(b"no message"), id="no-message"),
        pytest.param(frame(encode(InFlight(3))), id="no-hello"),
        pytest.param(frame(encode(Report(0, []))), id="for-an-orchestrator"),
        pytest.param(b"\xff\xff\xff\xff", id="no-frame"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_dropped_and_nobody_else_notices(
    serve: Callable[..., Server], data: bytes
) -> None:
    server = serve().start("small", "large")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(PATIENCE_S)
        peer.connect(str(socket_path(server.sockets, "small")))
        peer.sendall(data)
        answer = b"".join(iter(lambda: peer.recv(1 << 16), b""))
    assert (b"no message" in answer or b"before Hello" in answer) or data[:1] == b"\xff", "it is told why"
    assert server.submit().tokens()[-1] == END_ID


def test_a_subserver_that_breaks_the_protocol_is_dropped_and_dialled_again(serve: Callable[..., Server]) -> None:
    server = serve().start("large")
    path = socket_path(server.sockets, "small")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(PATIENCE_S)
        listener.bind(str(path))
        listener.listen()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(PATIENCE_S)
            connection.sendall(frame(encode(InFlight(3))))
            while connection.recv(1000):
                pass
    server.start("small")
    assert server.submit().tokens()[-1] == END_ID


def test_a_message_that_no_frame_can_hold_ends_its_own_request(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve().start("small", "large")
    whole = server.submit().tokens()
    monkeypatch.setattr("tokenrouter.channel.framing.MAX_FRAME", 2048)
    large = server.submit("x" * 3000)
    assert server.submit().tokens() == whole
    assert isinstance(large.final().error, ProtocolError)
    server.wait(server.idle, "all KV is free")


def test_a_bug_at_one_request_is_told_to_that_request_alone(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve().start("small", "large")
    whole = server.submit().tokens()
    written = Transcript.write

    def write(transcript: Transcript) -> None:
        if transcript._key == broken:
            raise RuntimeError("no text for this one")
        written(transcript)

    broken = server.orchestrator._next_key + 1
    monkeypatch.setattr(Transcript, "write", write)
    before, at, behind = [server.submit(stream=True) for _ in range(3)]
    assert before.tokens() == behind.tokens() == whole
    assert isinstance(at.final().error, InternalError)
    server.wait(server.idle, "all KV is free")


class Deaf(Collected):
    """A reply that cannot be told anything from its third update on."""

    def update(self, update: Update) -> None:
        if len(self.updates) > 1:
            raise RuntimeError("nobody listens")
        super().update(update)


def test_a_client_that_cannot_be_told_costs_its_own_request(serve: Callable[..., Server]) -> None:
    server = serve(repeat=True, step_ms=0.5, max_seq_len=65536).start("small", "large")
    deaf, request = Deaf(), server.entry.builder.build(RequestFields(text_input=PROMPT, max_tokens=40_000, stream=True))
    server.loop.submit(request, deaf, arrived_ns=time.monotonic_ns())
    assert len(server.submit(max_tokens=60).tokens()) == 60
    server.wait(server.idle, "the request that nobody hears has ended")
    server.loop.refuse(deaf, InvalidRequest("and one that cannot be told why"))
    assert len(server.submit(max_tokens=5).tokens()) == 5


def test_a_message_at_which_the_orchestrator_breaks_costs_its_model_the_connection(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve().start("small", "large")
    whole = server.submit().tokens()
    receive = server.orchestrator.receive

    def fail(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(server.orchestrator, "receive", receive)
        raise RuntimeError("a bug")

    monkeypatch.setattr(server.orchestrator, "receive", fail)
    assert server.submit().tokens() == whole
    assert server.broke == []


def test_a_request_that_cannot_be_taken_in_is_told_so(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve().start("small", "large")
    submit = server.orchestrator.submit

    def fail(*_: Any, **__: Any) -> int:
        monkeypatch.setattr(server.orchestrator, "submit", submit)
        raise RuntimeError("a bug")

    monkeypatch.setattr(server.orchestrator, "submit", fail)
    error = server.submit().final().error
    assert isinstance(error, InternalError)
    assert "a bug" in str(error)
    assert server.submit().tokens()


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x91" * 100_000, id="nesting"),
        pytest.param(b"", id="empty"),
        pytest.param(encode(InFlight(1)), id="before-hello"),
        pytest.param(b"\xff" * 10, id="garbage"),
    ],
)
def test_a_peer_that_sends_no_message_pays_alone(serve: Callable[..., Server], payload: bytes) -> None:
    server = serve().start("small", "large")
    running = server.submit(max_tokens=200)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(str(socket_path(server.sockets, "small")))
        stranger.sendall(frame(payload))
        told = b"".join(iter(lambda: stranger.recv(1 << 16), b""))
        assert b"no message" in told or b"before Hello" in told
    assert running.tokens()


def test_a_stranger_with_ids_that_the_model_lacks_fails_alone(serve: Callable[..., Server]) -> None:
    server = serve().start("small", "large")
    hello = server.entry.hello("stranger", "direct")
    running = server.submit(max_tokens=200)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(str(socket_path(server.sockets, "small")))
        bad = Open(1, 1, 1, [2**31 - 1], 1, 9, Sampling(max_tokens=8), PolicySpec("single"))
        stranger.sendall(frame(encode(hello)) + frame(encode(bad)))
        decoder, frames = FrameDecoder(), []
        while len(frames) < 2:
            frames += decoder.feed(stranger.recv(1 << 16))
        report = decode_for_orchestrator(frames[1])
    assert isinstance(report, Report)
    assert [(row.outcome, row.error and row.error[0]) for row in report.rows] == [(Outcome.FAILED, "invalid_request")]
    assert running.tokens()
