"""What takes long to read waits on threads of its own, and not without bound."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tokenrouter.errors import ModelUnavailable, Overloaded, RouterError
from tokenrouter.triton.reading import ReadingPool

PATIENCE_S = 30.0


@pytest.fixture
def pool() -> Iterator[ReadingPool]:
    made = ReadingPool("test", most_bytes=100)
    yield made
    made.stop()


def never(error: RouterError) -> None:
    raise AssertionError(f"refused: {error}")


def test_more_than_may_wait_is_refused_and_room_comes_back(pool: ReadingPool) -> None:
    go, done = threading.Event(), threading.Event()
    pool.put(lambda: go.wait(PATIENCE_S) and None, 90, refuse=never)
    with pytest.raises(Overloaded, match="90 bytes of large requests wait to be read already"):
        pool.put(done.set, 20, refuse=never)
    go.set()
    until = threading.Event()
    for _ in range(1000):
        try:
            pool.put(done.set, 20, refuse=never)
            break
        except Overloaded:
            until.wait(0.01)
    assert done.wait(PATIENCE_S)


def test_one_that_is_larger_than_all_together_is_read_alone(pool: ReadingPool) -> None:
    done = threading.Event()
    pool.put(done.set, 1000, refuse=never)
    assert done.wait(PATIENCE_S)


def test_those_that_wait_when_the_server_stops_are_told_so() -> None:
    pool, go, refused = ReadingPool("test"), threading.Event(), list[RouterError]()
    for _ in range(8):  # more than it has threads
        pool.put(lambda: go.wait(PATIENCE_S) and None, 1, refuse=refused.append)
    stopping = threading.Thread(target=pool.stop)
    stopping.start()
    go.set()
    stopping.join(PATIENCE_S)
    pool.put(lambda: None, 1, refuse=refused.append)
    assert refused
    assert all(isinstance(error, ModelUnavailable) for error in refused)
