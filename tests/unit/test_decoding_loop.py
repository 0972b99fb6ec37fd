from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.support.repositories import emulated_spec, write_emulated
from tokenrouter.assembly import Entry, build_subserver
from tokenrouter.channel.carrier import Connected, Event, Received
from tokenrouter.loops.decoding import DecodingLoop
from tokenrouter.messages import (
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

    def __init__(self, *messages: ToSubserver) -> None:
        self._events: list[Event] = [Connected(1, ""), *[Received(1, encode(each)) for each in messages]]
        self._woken = threading.Event()
        self.rows: list[ReportRow] = []
        self.over = threading.Event()

    def poll(self, timeout_s: float | None) -> list[Event]:
        if not self._events:
            self._woken.wait(timeout_s)
            self._woken.clear()
        events, self._events = self._events, []
        return events

    def send(self, peer: int, *payloads: bytes) -> None:
        for message in map(decode_for_orchestrator, payloads):
            self.rows += message.rows if isinstance(message, Report) else []
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


def test_a_model_at_work_is_asked_once_per_step(tmp_path: Path) -> None:
    write_emulated(tmp_path, emulated_spec(options={"repeat": True}))
    source = Repository(tmp_path)
    hello = Entry(source.entry("tokenrouter"), source).hello("tokenrouter", "direct")
    opened = Open(1, 1, 1, [5, 6], 2, 2 + STEPS, Sampling(max_tokens=STEPS), PolicySpec("single"))
    peer = Peer(hello, opened)
    plans = []

    def build() -> Subserver:
        subserver = build_subserver(source.model("small"), source)
        ask = subserver.poll

        def counted(*, now_ns: int) -> Any:
            plan = ask(now_ns=now_ns)
            plans.extend([] if plan is None else [plan])
            return plan

        subserver.poll = counted  # type: ignore[method-assign]
        return subserver

    loop = DecodingLoop(build, peer)
    subserver = loop.start()
    try:
        assert peer.over.wait(PATIENCE_S)
    finally:
        loop.stop()
    assert [row.outcome for row in peer.rows] == [Outcome.STAY] * (STEPS - 1) + [Outcome.LENGTH]
    assert subserver.statistics.steps == STEPS
    # Two policies that are loaded come in between.
    assert len(plans) <= STEPS + 2
