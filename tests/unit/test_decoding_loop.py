from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.repositories import emulated_spec, write_emulated
from tests.support.waiting import until
from tokenrouter.assembly import Entry, build_subserver
from tokenrouter.channel.carrier import Connected, Event, Received
from tokenrouter.loops.decoding import DecodingLoop
from tokenrouter.messages import (
    Close,
    InFlight,
    Open,
    Outcome,
    PolicySpec,
    Report,
    ReportRow,
    Sampling,
    ToSubserver,
    decode_for_orchestrator,
    encode,
)
from tokenrouter.repository import Repository
from tokenrouter.subserver.machine import Subserver

PATIENCE_S = 30.0
STEPS = 40


class Peer:
    """A carrier with one peer, which says everything at once and listens until its request is over."""

    def __init__(self, *messages: ToSubserver, elsewhere: bool = False) -> None:
        self._events: list[Event] = [Connected(1, "", elsewhere)]
        self._woken = threading.Event()
        self.say(*messages)
        self.rows: list[ReportRow] = []
        self.over = threading.Event()
        self.told: Callable[[list[ReportRow]], None] = self.rows.extend

    def say(self, *messages: ToSubserver) -> None:
        self._events = [*self._events, *[Received(1, encode(each)) for each in messages]]
        self._woken.set()

    def poll(self, timeout_s: float | None) -> list[Event]:
        if not self._events:
            self._woken.wait(timeout_s)
            self._woken.clear()
        events, self._events = self._events, []
        return events

    def send(self, peer: int, *payloads: bytes) -> None:
        for message in map(decode_for_orchestrator, payloads):
            self.told(message.rows if isinstance(message, Report) else [])
        if self.rows and self.rows[-1].outcome != Outcome.STAY:
            self.over.set()

    def drop(self, peer: int, why: str = "") -> None:
        raise AssertionError(why)

    def offset_ns(self, peer: int) -> int | None:
        return 0

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("talks", [False, True])
def test_a_model_at_work_is_asked_once_per_step(tmp_path: Path, talks: bool) -> None:
    write_emulated(tmp_path, emulated_spec(options={"repeat": True}))
    source = Repository(tmp_path)
    hello = Entry(source.entry("tokenrouter"), source).hello("tokenrouter", "direct")
    opened = Open(1, 1, 1, [5, 6], 2, 2 + STEPS, Sampling(max_tokens=STEPS), PolicySpec("single"))
    peer = Peer(hello, opened)
    plans = []

    def told(rows: list[ReportRow]) -> None:
        peer.rows += rows
        if talks:
            peer.say(InFlight(1))

    def build() -> Subserver:
        subserver = build_subserver(source.model("small"), source)
        ask = subserver.poll

        def counted(*, now_ns: int) -> Any:
            plan = ask(now_ns=now_ns)
            plans.extend([] if plan is None else [plan])
            return plan

        subserver.poll = counted  # type: ignore[method-assign]
        return subserver

    peer.told = told
    loop = DecodingLoop(build, peer)
    subserver = loop.start()
    try:
        assert peer.over.wait(PATIENCE_S)
    finally:
        loop.stop()
    assert [row.outcome for row in peer.rows] == [Outcome.STAY] * (STEPS - 1) + [Outcome.LENGTH]
    assert subserver.statistics.steps == STEPS
    assert len(plans) == STEPS


@pytest.mark.parametrize("waits", [False, True])
def test_what_staying_requests_wrote_is_told_while_the_next_step_computes(tmp_path: Path, waits: bool) -> None:
    batching = {"threshold": 2, "max_queue_delay_microseconds": 500_000} if waits else {}
    write_emulated(tmp_path, emulated_spec(options={"repeat": True}, model={"batching": batching}))
    source = Repository(tmp_path)
    hello = Entry(source.entry("tokenrouter"), source).hello("tokenrouter", "direct")
    # Two are in flight, and one is elsewhere: with a threshold of 2 every step starts by the deadline.
    opened = Open(1, 1, 2, [5, 6], 2, 4, Sampling(max_tokens=2), PolicySpec("single"))
    peer = Peer(hello, opened)
    happened: list[str] = []

    def told(rows: list[ReportRow]) -> None:
        peer.rows += rows
        happened.extend(row.outcome.name for row in rows)

    def build() -> Subserver:
        subserver = build_subserver(source.model("small"), source)
        engine: Any = subserver.engine
        step, compute = engine.step, engine._result

        def whole(*args: Any) -> Any:
            result = step(*args)
            happened.append("end")
            return result

        def computed(*args: Any) -> Any:
            happened.append("begin")
            return compute(*args)

        engine.step, engine._result = whole, computed
        return subserver

    peer.told = told
    loop = DecodingLoop(build, peer)
    loop.start()
    try:
        assert peer.over.wait(PATIENCE_S)
    finally:
        loop.stop()
    step = ["end", "STAY", "begin"] if waits else ["end", "begin", "STAY"]
    assert happened == ["begin", *step, "end", "LENGTH"]


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_model_that_ends_waits_only_for_what_another_host_had_begun(tmp_path: Path, elsewhere: bool) -> None:
    write_emulated(tmp_path, emulated_spec(options={"repeat": True, "step_ms": 1.0, "max_seq_len": 16_384}))
    source = Repository(tmp_path)
    hello = Entry(source.entry("tokenrouter"), source).hello("tokenrouter", "direct")

    def opened(request: int, tokens: int) -> Open:
        sampling = Sampling(max_tokens=tokens)
        return Open(request, 1, request, [5, 6], 2, 2 + tokens, sampling, PolicySpec("single"))

    peer = Peer(hello, opened(1, 10_000), elsewhere=elsewhere)
    loop = DecodingLoop(lambda: build_subserver(source.model("small"), source), peer)
    subserver = loop.start()
    try:
        until(lambda: subserver.held() == {(1, 1)})
        drained = threading.Event()
        ending = threading.Thread(target=lambda: (loop.drain(10 * PATIENCE_S), drained.set()), daemon=True)
        ending.start()
        peer.say(opened(2, 10_000))
        until(lambda: (1, 2) in subserver.held())
        assert not drained.is_set()
        peer.say(Close(1, 1))
        until(lambda: subserver.held() == {(1, 2)})
        assert drained.wait(PATIENCE_S if elsewhere else 0.3) is elsewhere
        peer.say(Close(2, 0))
        ending.join(PATIENCE_S)
        assert drained.is_set()
    finally:
        loop.stop()
