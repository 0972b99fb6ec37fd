"""The thread that sends responses and asks whether clients are still there."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from tokenrouter.errors import InternalError, RequestCancelled
from tokenrouter.response import Result, Update
from tokenrouter.triton.responder import Responder

PATIENCE_S = 30.0


class FakeSender:
    """Fails like Triton, which crashes, if it is asked or told anything after its final response."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.sent: list[Update] = []
        self.asked = 0
        self.gone = False
        self.over = threading.Event()
        self.violations: list[str] = []
        self._delay_s = delay_s

    def send(self, update: Update) -> None:
        self._check("send")
        time.sleep(self._delay_s)
        self.sent.append(update)
        if update.final:
            self.over.set()

    def cancelled(self) -> bool:
        self._check("cancelled")
        self.asked += 1
        return self.gone

    def _check(self, what: str) -> None:
        if self.over.is_set():
            self.violations.append(what)


def final(key: int = 1) -> Update:
    result = Result("", [], [], "stop", [], {}, 0, {}, 0, "single", False, 0, 0, 0, 0)
    return Update(key, result=result)


def test_nobody_is_asked_about_after_its_final_response() -> None:
    cancelled: list[FakeSender] = []
    responder: Responder[FakeSender] = Responder("test", cancelled.append)
    senders = [FakeSender(delay_s=0.002) for _ in range(60)]
    for sender in senders:
        responder.watch(sender)
    for sender in senders:
        # The polls are due all the time, so one falls together with a final response sooner or later.
        responder._next_poll = 0.0
        responder.put(sender, final())
    assert all(sender.over.wait(5) for sender in senders)
    responder.stop()
    assert [sender.violations for sender in senders] == [[]] * len(senders)
    assert sum(sender.asked for sender in senders) > 0
    assert not responder._watched
    assert cancelled == []


def test_who_was_asked_about_is_kept_for_a_while_and_not_beyond_the_end() -> None:
    """Triton's thread may still look at it after it has answered."""
    responder: Responder[FakeSender] = Responder("test", lambda _: None)
    sender = FakeSender()
    responder.watch(sender)
    asked = time.monotonic() + 5
    while not sender.asked and time.monotonic() < asked:
        time.sleep(0.001)
    over, kept = sender.over, weakref.ref(sender)
    responder.put(sender, final())
    del sender
    assert over.wait(5)
    gc.collect()
    assert kept() is not None
    responder.stop()
    gc.collect()
    assert kept() is None


class Unsendable(FakeSender):
    """Its first responses cannot be sent, as many as it is told; only whole ones are of use then."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self._failures = failures

    def send(self, update: Update) -> None:
        self._failures -= 1
        if self._failures >= 0:
            raise ValueError("no such tensor")
        super().send(update)


@pytest.mark.parametrize("failures", [1, 3])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_response_that_cannot_be_sent_ends_its_own_request(failures: int, at_the_end: bool) -> None:
    ended: list[Unsendable] = []
    responder: Responder[Unsendable] = Responder("test", ended.append)
    bad, good = Unsendable(failures), Unsendable(0)
    for sender in (bad, good):
        responder.watch(sender)
    responder.put(bad, final() if at_the_end else Update(1, tokens=[7]))
    responder.put(good, final(2))
    assert good.over.wait(PATIENCE_S)
    if not at_the_end:
        until_s = time.monotonic() + PATIENCE_S
        while not ended and time.monotonic() < until_s:
            time.sleep(0.001)
        assert ended == [bad]
        responder.put(bad, Update(1, error=RequestCancelled("the orchestrator heard of it")))
    responder.stop()
    assert [isinstance(update.error, InternalError) for update in bad.sent] == [True] * (failures == 1)
    assert bad.violations == good.violations == []
    assert not responder._watched
    assert not responder._failed


def test_a_client_that_went_away_is_reported_once_and_forgotten() -> None:
    reported = threading.Event()
    cancelled: list[FakeSender] = []

    def on_cancelled(sender: FakeSender) -> None:
        cancelled.append(sender)
        reported.set()

    responder: Responder[FakeSender] = Responder("test", on_cancelled)
    sender = FakeSender()
    responder.watch(sender)
    sender.gone = True
    assert reported.wait(5)
    responder.put(sender, final())
    assert sender.over.wait(5)
    responder.stop()
    assert cancelled == [sender]
    assert not responder._watched
    assert not responder._pending


def test_updates_that_wait_are_merged_and_nothing_is_lost() -> None:
    responder: Responder[FakeSender] = Responder("test", lambda sender: None)
    sender = FakeSender(delay_s=0.01)
    for i in range(50):
        responder.put(sender, Update(1, text=f"{i},", tokens=[i]))
    responder.put(sender, final())
    assert sender.over.wait(5)
    responder.stop()
    assert "".join(update.text for update in sender.sent) == "".join(f"{i}," for i in range(50))
    assert [token for update in sender.sent for token in update.tokens] == list(range(50))
    assert len(sender.sent) < 20


def test_stopping_sends_what_waits() -> None:
    responder: Responder[FakeSender] = Responder("test", lambda sender: None)
    sender = FakeSender(delay_s=0.01)
    responder.put(sender, Update(1, text="a", tokens=[1]))
    responder.put(sender, final())
    responder.stop()
    assert sender.over.is_set()
