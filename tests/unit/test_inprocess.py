"""When the driver in one process works, when it sleeps, and what ends the sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.repositories import VOCAB_SIZE, emulated_spec, write_emulated
from tests.unit.test_submitting import Loop
from tokenrouter.assembly import Entry
from tokenrouter.batcher import Batching
from tokenrouter.engines.base import EngineInfo, VisitNews
from tokenrouter.inprocess import InProcessDriver
from tokenrouter.messages import Outcome
from tokenrouter.policies.base import PolicyContext
from tokenrouter.repository import Repository
from tokenrouter.request import RequestFields
from tokenrouter.response import Update
from tokenrouter.subserver.machine import Subserver
from tokenrouter.subserver.sequence import ModelSequence
from tokenrouter.subserver.submitted import SubmittingRunner

LONG_NS = 60 * 10**9


def turns_until_over(driver: InProcessDriver, requests: int) -> tuple[int, list[Update]]:
    """Turns until so many requests are over, and their last updates."""
    turns, final = 0, []
    while len(final) < requests:
        final += [update for update in driver.turn() if update.final]
        turns += 1
    return turns, final


def test_a_model_that_waits_for_company_is_not_asked_again_before_its_delay_is_over(tmp_path: Path) -> None:
    delay_us = 20_000
    batching = {"threshold": 2, "max_queue_delay_microseconds": delay_us}
    spec = emulated_spec(entry={"selectable_policies": ["scripted"]}, model={"batching": batching})
    write_emulated(tmp_path, spec)
    with InProcessDriver.load(tmp_path, entry="tokenrouter") as driver:
        began_s = time.monotonic()
        for writer in (0, 1):  # for all that its model knows, the other one may come
            params = {"writers": [writer], "trigger": "keep"}
            driver.submit(RequestFields(text_input="abcdef", max_tokens=5, policy="scripted", policy_params=params))
        turns, final = turns_until_over(driver, requests=2)
        took_s = time.monotonic() - began_s
        steps = sum(subserver.statistics.steps for subserver in driver.subservers.values())
    assert [update.result.text for update in final if update.result is not None] == ["abcde", "abcde"]
    assert steps == 10
    assert took_s > 5 * delay_us * 1e-6, "every token waited for the whole delay"
    # A turn runs a step or sleeps to a model's deadline; a timer may ring a little early.
    assert turns <= 3 * steps


class Alone(Loop):
    """Gives its only news in a thread of its own, while the driver sleeps."""

    def __init__(self, *, answers: bool) -> None:
        super().__init__()
        self.info = EngineInfo("loop", VOCAB_SIZE, 0, 64, 4, 64, 4, 64)
        self._answers = answers

    def submit(self, visits: Sequence[tuple[int, ModelSequence]]) -> None:
        super().submit(visits)
        if self._answers:
            threading.Timer(0.05, self._answer, [visits[0][0]]).start()

    def _answer(self, ticket: int) -> None:
        self.news.append(VisitNews(ticket, Outcome.LENGTH, (65,)))
        self.wake()


def alone(folder: Path, *, answers: bool) -> InProcessDriver:
    write_emulated(folder, emulated_spec(entry={"policy": "single", "policy_params": {}}, models=("small",)))
    runner = SubmittingRunner(Alone(answers=answers), Batching(), clock_ns=time.monotonic_ns)
    subserver = Subserver("small", runner, shares={"routed": 64}, context=PolicyContext)
    source = Repository(folder)
    return InProcessDriver(Entry(source.entry(), source), {"small": subserver})


def submit(driver: InProcessDriver, *, timeout_ns: int) -> None:
    request = driver.entry.builder.build(RequestFields(text_input="abc", max_tokens=1), timeout_ns=timeout_ns)
    driver.orchestrator.submit(request, now_ns=time.monotonic_ns())


def test_news_of_an_engine_end_the_sleep(tmp_path: Path) -> None:
    driver = alone(tmp_path, answers=True)
    submit(driver, timeout_ns=LONG_NS)
    turns, (update,) = turns_until_over(driver, requests=1)
    assert update.result is not None
    assert (update.result.tokens, update.result.finish_reason) == ([65], "length")
    assert turns <= 3, "it submits, sleeps, and takes the news"


def test_a_deadline_of_the_orchestrator_ends_the_sleep(tmp_path: Path) -> None:
    driver = alone(tmp_path, answers=False)
    submit(driver, timeout_ns=50 * 10**6)
    turns, (update,) = turns_until_over(driver, requests=1)
    assert update.result is not None
    assert update.result.finish_reason == "timeout"
    assert turns <= 4, "it submits, sleeps, and ends the request; a timer may ring a little early"
