from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.repositories import END_ID
from tests.unit.loops_server import PROMPT, Collected, Server
from tokenrouter.channel.unix import socket_path
from tokenrouter.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelUnavailable,
    PromptTooLong,
    RequestCancelled,
)
from tokenrouter.offline import TokenRouter


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


def test_a_time_out_beyond_what_a_selector_takes_ends_nothing(serve: Callable[..., Server]) -> None:
    server = serve().start("small", "large")
    far = server.submit(timeout_ns=2**62)
    assert far.tokens() == server.submit().tokens()


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
    server.submit()  # the loop looks at its deadlines when it has something to do
    assert isinstance(running.final().error, ModelUnavailable)
    server.wait(lambda: server.broke == ["large", "entry"], "the entry says so")


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


def test_at_the_end_of_the_grace_period_nothing_looks_like_a_complete_response(serve: Callable[..., Server]) -> None:
    server = serve(repeat=True, step_ms=0.5, max_seq_len=65536).start("small", "large")
    running = server.submit(max_tokens=40_000, stream=True)
    running.wait(lambda reply: bool(reply.updates), "a token")
    server.loop.stop_at(time.monotonic_ns() + 20_000_000)
    assert isinstance(running.final().error, ModelUnavailable)
    assert isinstance(server.submit().final().error, ModelUnavailable)
    server.wait(server.idle, "everything is free again")


def test_a_model_that_cannot_be_loaded_says_why_and_leaves_no_socket(serve: Callable[..., Server]) -> None:
    server = serve(max_batch_size=4, max_num_tokens=4)
    with pytest.raises(ConfigError, match="max_num_tokens"):
        server.start("small")
    assert not socket_path(server.sockets, "small").exists()
    server.decoding.clear()
