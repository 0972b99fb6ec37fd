from __future__ import annotations

from dataclasses import dataclass

import pytest

from tokenrouter.entry_queue import EntryQueue, EntryQueuePolicy
from tokenrouter.errors import DeadlineExceeded, Overloaded

MS = 1_000_000


def served(queue: EntryQueue[str]) -> list[str]:
    order = []
    while (head := queue.head()) is not None:
        order.append(head)
        queue.discard(head)
    return order


def test_who_comes_first_is_served_first() -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy())
    for item in "abc":
        queue.push(item, now_ns=0, deadline_ns=None)
    assert len(queue) == 3
    assert served(queue) == ["a", "b", "c"]
    assert queue.head() is None


def test_without_limits_nobody_is_ever_refused() -> None:
    queue: EntryQueue[int] = EntryQueue(EntryQueuePolicy())
    for item in range(1000):
        queue.push(item, now_ns=0, deadline_ns=None)
    assert queue.expired(now_ns=10**18) == []


def test_a_full_queue_refuses_with_the_limit_and_keeps_the_others() -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy(max_queue_size=2))
    for item in "ab":
        queue.push(item, now_ns=0, deadline_ns=None)
    with pytest.raises(Overloaded, match=r"maximum queue size: 2 requests wait already \(max_queue_size 2\)"):
        queue.push("c", now_ns=0, deadline_ns=None)
    queue.discard("a")
    queue.push("d", now_ns=0, deadline_ns=None)
    assert list(queue) == ["b", "d"]


def test_delayed_requests_count_towards_the_size() -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy(max_queue_size=1, default_timeout_ns=MS, reject=False))
    queue.push("a", now_ns=0, deadline_ns=None)
    queue.expired(now_ns=MS)
    with pytest.raises(Overloaded):
        queue.push("b", now_ns=2 * MS, deadline_ns=None)


@pytest.mark.parametrize(
    ("default_ms", "own_ms", "limit_ms"),
    [
        pytest.param(500, None, 500, id="default"),
        pytest.param(0, 300, 300, id="own"),
        pytest.param(500, 300, 300, id="own-is-shorter"),
        pytest.param(500, 900, 500, id="own-cannot-exceed-the-default"),
    ],
)
def test_a_request_is_refused_exactly_at_its_limit(default_ms: int, own_ms: int | None, limit_ms: int) -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy(default_timeout_ns=default_ms * MS))
    deadline_ns = None if own_ms is None else (7 + own_ms) * MS
    due_ns = (7 + limit_ms) * MS
    assert queue.push("a", now_ns=7 * MS, deadline_ns=deadline_ns) == due_ns
    assert queue.expired(now_ns=due_ns - 1) == []
    ((refused, error),) = queue.expired(now_ns=due_ns)
    assert refused == "a"
    assert isinstance(error, DeadlineExceeded)
    assert f"waited {limit_ms / 1000:.2f} s in the queue (limit {limit_ms * 1000} microseconds)" in str(error)
    assert len(queue) == 0


def test_only_those_whose_time_is_over_are_refused() -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy(default_timeout_ns=100))
    for at_ns, item in enumerate("abcd"):
        queue.push(item, now_ns=at_ns * 30, deadline_ns=None)
    assert [item for item, _ in queue.expired(now_ns=130)] == ["a", "b"]
    assert list(queue) == ["c", "d"]


def test_delay_moves_a_late_request_behind_all_others_and_keeps_their_order() -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy(default_timeout_ns=100, reject=False))
    for at_ns, item in enumerate("abc"):
        queue.push(item, now_ns=at_ns * 60, deadline_ns=None)
    assert queue.expired(now_ns=100) == []
    assert list(queue) == ["b", "c", "a"]
    queue.push("d", now_ns=120, deadline_ns=None)
    assert queue.expired(now_ns=160) == []
    assert served(queue) == ["c", "d", "a", "b"]


def test_a_delayed_request_is_refused_only_at_its_own_limit() -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy(default_timeout_ns=100, reject=False))
    queue.push("a", now_ns=0, deadline_ns=250)
    queue.push("b", now_ns=0, deadline_ns=None)
    assert queue.expired(now_ns=249) == []
    ((refused, _),) = queue.expired(now_ns=250)
    assert refused == "a"
    assert queue.expired(now_ns=10**15) == []
    assert list(queue) == ["b"]


def test_an_own_limit_below_the_default_refuses_even_under_delay() -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy(default_timeout_ns=100, reject=False))
    queue.push("a", now_ns=0, deadline_ns=50)
    assert [item for item, _ in queue.expired(now_ns=50)] == ["a"]


@pytest.mark.parametrize("delayed", [False, True])
def test_a_request_can_be_taken_out_from_anywhere_even_beside_an_equal_one(delayed: bool) -> None:
    @dataclass(eq=False)
    class Request:
        text: str

    queue: EntryQueue[Request] = EntryQueue(EntryQueuePolicy(default_timeout_ns=100, reject=False))
    twins = [Request("twin"), Request("twin")]
    for twin in twins:
        queue.push(twin, now_ns=0, deadline_ns=None)
    if delayed:
        queue.expired(now_ns=100)
    queue.discard(twins[1])
    queue.discard(twins[1])
    (left,) = queue
    assert left is twins[0]
