from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.repositories import END_ID, emulated_spec, write_emulated
from tokenrouter.assembly import Entry, build_subserver
from tokenrouter.channel.framing import FrameDecoder, frame
from tokenrouter.channel.unix import UnixCarrier, socket_path
from tokenrouter.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelUnavailable,
    PromptTooLong,
    ProtocolError,
    RequestCancelled,
)
from tokenrouter.loops.decoding import DecodingLoop
from tokenrouter.loops.orchestrating import OrchestratorLoop
from tokenrouter.messages import InFlight, Open, Outcome, PolicySpec, Report, Sampling, decode_for_orchestrator, encode
from tokenrouter.offline import TokenRouter
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.orchestrator.transcript import Transcript
from tokenrouter.repository import Repository
from tokenrouter.request import RequestFields
from tokenrouter.response import Update
from tokenrouter.subserver.machine import Subserver

PATIENCE_S = 30.0
PROMPT = "a prompt of some length"


class Collected:
    """A reply that keeps all updates."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self._changed = threading.Condition()

    def update(self, update: Update) -> None:
        with self._changed:
            assert not (self.updates and self.updates[-1].final), "an update after the final one"
            self.updates.append(update)
            self._changed.notify_all()

    def wait(self, condition: Callable[[Collected], bool], why: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), PATIENCE_S), f"not within {PATIENCE_S:g} s: {why}"

    def final(self) -> Update:
        self.wait(lambda reply: bool(reply.updates) and reply.updates[-1].final, "the end of the request")
        return self.updates[-1]

    def tokens(self) -> list[int]:
        result = self.final().result
        assert result is not None, self.updates[-1].error
        return result.tokens


class Server:
    """All loops of a deployment in this process, over real sockets."""

    def __init__(self, repository: Path, sockets: Path, entry: dict[str, Any] | None = None, **options: Any) -> None:
        write_emulated(repository, emulated_spec(entry=entry, options=options))
        self.repository, self.sockets = repository, sockets
        self.turned = threading.Condition()
        self.decoding: dict[str, DecodingLoop] = {}
        self.subservers: dict[str, Subserver] = {}
        self.source = Repository(repository)
        config = self.source.entry("tokenrouter")
        self.entry = Entry(config, self.source)
        self.orchestrator: Orchestrator = self.entry.orchestrator()
        dial = {name: socket_path(sockets, name) for name in config.models}
        hello = self.entry.hello("tokenrouter", "routed")
        self.broke: list[str] = []
        self.loop = OrchestratorLoop(
            self.orchestrator,
            UnixCarrier(dial=dial),
            hello=hello,
            changed=self._turned,
            broke=lambda: self._broke("entry"),
        )
        self.loop.start()

    def _turned(self) -> None:
        with self.turned:
            self.turned.notify_all()

    def _broke(self, name: str) -> None:
        self.broke.append(name)
        self._turned()

    def start(self, *names: str) -> Server:
        for name in names:
            config = self.source.model(name)
            self.decoding[name] = DecodingLoop(
                lambda config=config: build_subserver(config, self.source),  # type: ignore[misc]
                UnixCarrier(listen=socket_path(self.sockets, name)),
                changed=self._turned,
                broke=lambda name=name: self._broke(name),  # type: ignore[misc]
            )
            self.subservers[name] = self.decoding[name].start()
        return self

    def kill(self, name: str) -> None:
        self.decoding.pop(name).stop()

    def submit(self, prompt: str = PROMPT, *, timeout_ns: int | None = None, **fields: Any) -> Collected:
        reply = Collected()
        fields.setdefault("max_tokens", 64)
        request = self.entry.builder.build(RequestFields(text_input=prompt, **fields), timeout_ns=timeout_ns)
        self.loop.submit(request, reply, arrived_ns=time.monotonic_ns())
        return reply

    def wait(self, condition: Callable[[], bool], why: str) -> None:
        with self.turned:
            assert self.turned.wait_for(condition, PATIENCE_S), f"not within {PATIENCE_S:g} s: {why}"

    def idle(self) -> bool:
        """Whether no model and no ledger holds anything."""
        return self.orchestrator.in_flight == self.orchestrator.queued == 0 and all(
            subserver.engine.blocks_leased == 0 and self.orchestrator.reserved_blocks(name) == 0
            for name, subserver in self.subservers.items()
        )

    def stop(self) -> None:
        self.loop.stop()
        for loop in self.decoding.values():
            loop.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True) as folder:
        # A folder in it, because the last loop to end removes the sockets' directory.
        sockets = Path(folder) / "s"
        sockets.mkdir(mode=0o700)

        def start(**options: Any) -> Server:
            servers.append(Server(tmp_path, sockets, **options))
            return servers[-1]

        yield start
        for server in servers:
            server.stop()


def test_responses_over_sockets_are_those_of_the_offline_engine(serve: Callable[..., Server]) -> None:
    server = serve(margin=2.0).start("small", "large")
    fields = {"max_tokens": 40, "temperature": 1.0}
    seeds = range(6)
    replies = [server.submit(seed=seed, stream=seed % 2 == 0, **fields) for seed in seeds]
    with TokenRouter.from_repository(server.repository) as offline:
        want = [offline.generate([PROMPT], seed=seed, **fields)[0] for seed in seeds]
    for seed, reply in zip(seeds, replies, strict=True):
        assert reply.tokens() == want[seed].tokens
        assert "".join(update.text for update in reply.updates) == want[seed].text
        assert len(reply.updates) == 1 or seed % 2 == 0
    server.wait(server.idle, "everything is free again")


def test_a_request_waits_for_models_that_start_later(serve: Callable[..., Server]) -> None:
    server = serve()
    reply = server.submit()
    server.wait(lambda: server.orchestrator.queued == 1, "the request is queued")
    server.start("large", "small")
    assert reply.tokens()[-1] == END_ID


def test_a_cancelled_request_is_told_so_once_and_its_memory_is_free(serve: Callable[..., Server]) -> None:
    server = serve(repeat=True, step_ms=0.5, max_seq_len=65536).start("small", "large")
    neighbour = server.submit(max_tokens=30)
    endless = server.submit(max_tokens=40_000, stream=True)
    endless.wait(lambda reply: len(reply.updates) > 3, "some tokens")
    server.loop.cancel(endless)
    server.loop.cancel(endless)
    assert isinstance(endless.final().error, RequestCancelled)
    assert len(neighbour.tokens()) == 30
    server.wait(server.idle, "everything is free again")
    server.loop.cancel(neighbour)
    assert len(server.submit(max_tokens=5).tokens()) == 5


def test_a_model_that_restarts_in_the_middle_changes_no_token(serve: Callable[..., Server]) -> None:
    server = serve(repeat=True, step_ms=0.2).start("small", "large")
    reply = server.submit(max_tokens=300, stream=True)
    for name in ("large", "small"):
        seen = len(reply.updates)
        reply.wait(lambda reply, seen=seen: len(reply.updates) > seen + 10, "some tokens")
        server.kill(name)
        server.start(name)
    prompt = server.entry.tokenizer.encode(PROMPT).ids
    assert reply.tokens() == (prompt * 300)[:300]
    assert [token for update in reply.updates for token in update.tokens] == reply.tokens()
    assert server.orchestrator.statistics.recovered >= 1
    server.wait(server.idle, "everything is free again")


def test_requests_that_wait_too_long_are_refused_while_another_runs(serve: Callable[..., Server]) -> None:
    server = serve(entry={"max_inflight": 1}, repeat=True, step_ms=0.5, max_seq_len=65536).start("small", "large")
    running = server.submit(max_tokens=40_000, stream=True)
    running.wait(lambda reply: bool(reply.updates), "a token")
    late = server.submit(timeout_ns=50_000_000)
    assert isinstance(late.final().error, DeadlineExceeded)
    assert not running.updates[-1].final
    server.loop.cancel(running)
    running.final()


def test_refused_requests_are_told_so_and_counted_in_their_own_reason(serve: Callable[..., Server]) -> None:
    server = serve(max_seq_len=64).start("small", "large")
    server.submit(max_tokens=5).final()
    assert isinstance(server.submit(max_tokens=1000).final().error, PromptTooLong)
    refused = Collected()
    server.loop.refuse(refused, InvalidRequest("max_tokens is missing"))
    assert isinstance(refused.final().error, InvalidRequest)
    assert server.orchestrator.statistics.failed == {"prompt_too_long": 1, "invalid_request": 1}


def test_a_stopping_loop_tells_everybody(serve: Callable[..., Server]) -> None:
    server = serve(entry={"max_inflight": 1}, repeat=True, step_ms=0.5, max_seq_len=65536).start("small", "large")
    running = server.submit(max_tokens=40_000, stream=True)
    running.wait(lambda reply: bool(reply.updates), "a token")
    waiting = server.submit()
    server.loop.stop()
    late = server.submit()
    for reply in (running, waiting, late):
        error = reply.final().error
        assert isinstance(error, ModelUnavailable)
        assert "the server is stopping" in str(error)
    server.loop.cancel(late)


def test_loops_that_exceptions_end_answer_first_and_then_say_so(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(repeat=True, step_ms=0.5, max_seq_len=65536).start("small", "large")
    running = server.submit(max_tokens=40_000, stream=True)
    running.wait(lambda reply: bool(reply.updates), "a token")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(server.subservers["large"], "poll", fail)
    server.wait(lambda: server.broke == ["large"], "large says so")
    monkeypatch.setattr(server.orchestrator, "next_deadline_ns", fail)
    assert isinstance(running.final().error, ModelUnavailable)
    server.wait(lambda: server.broke == ["large", "entry"], "the entry says so")


def test_at_the_end_of_the_grace_period_nothing_looks_like_a_complete_response(serve: Callable[..., Server]) -> None:
    server = serve(repeat=True, step_ms=0.5, max_seq_len=65536).start("small", "large")
    running = server.submit(max_tokens=40_000, stream=True)
    running.wait(lambda reply: bool(reply.updates), "a token")
    server.loop.stop_at(time.monotonic_ns() + 20_000_000)
    assert isinstance(running.final().error, ModelUnavailable)
    assert isinstance(server.submit().final().error, ModelUnavailable)
    server.wait(server.idle, "everything is free again")


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


def test_a_model_that_cannot_be_loaded_says_why_and_leaves_no_socket(serve: Callable[..., Server]) -> None:
    server = serve(max_batch_size=4, max_num_tokens=4)
    with pytest.raises(ConfigError, match="max_num_tokens"):
        server.start("small")
    assert not socket_path(server.sockets, "small").exists()
    server.decoding.clear()


# --- one request, one peer --------------------------------------------------------------------------------------------


def test_a_time_out_beyond_what_a_selector_takes_ends_nothing(serve: Callable[..., Server]) -> None:
    server = serve().start("small", "large")
    far = server.submit(timeout_ns=2**62)
    assert far.tokens() == server.submit().tokens()


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


@pytest.mark.parametrize("name", ["small", "entry"])
def test_a_loop_that_something_else_than_an_exception_ends_says_so_too(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server = serve().start("small", "large")
    server.submit().final()

    def leave(*_: Any, **__: Any) -> None:
        raise SystemExit("a library leaves")

    if name == "entry":
        monkeypatch.setattr(server.orchestrator, "next_deadline_ns", leave)
    else:
        monkeypatch.setattr(server.subservers[name], "poll", leave)
    server.submit()
    server.wait(lambda: server.broke == [name], "it says so")


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
