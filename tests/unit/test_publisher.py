"""When statistics are published."""

from __future__ import annotations

import time

import pytest

from tokenrouter.triton.publisher import PERIOD_S, QUIET_S, Publisher


class Told:
    """Notes when it was called, and whether the value of that time was seen."""

    def __init__(self) -> None:
        self.value = 0
        self.seen: list[tuple[float, int]] = []

    def publish(self) -> None:
        self.seen.append((time.monotonic(), self.value))
        if self.value < 0:
            raise RuntimeError("no")


@pytest.fixture
def told() -> Told:
    return Told()


def work(told: Told, publisher: Publisher, seconds: float) -> float:
    """Changes the value every 5 ms; returns when it began."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        told.value += 1
        publisher.changed()
        time.sleep(0.005)
    return began


def test_the_first_and_the_last_change_are_told_soon_and_in_between_seldom(told: Told) -> None:
    publisher = Publisher(told.publish)
    began = work(told, publisher, 2.5 * PERIOD_S)
    ended = time.monotonic()
    time.sleep(5 * QUIET_S)
    publisher.stop()
    assert told.seen[0][0] - began < 4 * QUIET_S
    assert told.seen[-1][1] == told.value
    assert told.seen[-1][0] - ended < 4 * QUIET_S
    # At the beginning, twice while it goes on, at the end; one more if this machine stalled.
    assert 3 <= len(told.seen) <= 5


def test_nothing_is_told_while_nothing_changes(told: Told) -> None:
    publisher = Publisher(told.publish)
    time.sleep(3 * QUIET_S)
    publisher.stop()
    assert told.seen == []


def test_a_failure_does_not_end_it(told: Told) -> None:
    publisher = Publisher(told.publish)
    for value in (-1, 7):
        told.value = value
        publisher.changed()
        time.sleep(4 * QUIET_S)
    publisher.stop()
    assert [value for _, value in told.seen] == [-1, 7]
