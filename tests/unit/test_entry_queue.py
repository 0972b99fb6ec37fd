from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenrouter.entry_queue import EntryQueue, EntryQueuePolicy, Priorities
from tokenrouter.errors import DeadlineExceeded, InvalidRequest, Overloaded

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


def test_who_takes_long_to_read_has_the_place_of_its_arrival() -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy())
    for item, arrived_ns in (("b", 20), ("d", 40), ("a", 10), ("c", 30), ("e", 40)):
        queue.push(item, now_ns=arrived_ns, deadline_ns=None)
    assert served(queue) == ["a", "b", "c", "d", "e"]


# --- priorities -------------------------------------------------------------------------------------------------------


def test_five_of_priority_2_and_then_one_of_1() -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy(), Priorities(levels=3, default=3))
    for i in range(5):
        queue.push(f"second-{i}", now_ns=i, deadline_ns=None, priority=2)
    queue.push("nobody asked", now_ns=5, deadline_ns=None)
    queue.push("first", now_ns=6, deadline_ns=None, priority=1)
    assert served(queue) == ["first", *[f"second-{i}" for i in range(5)], "nobody asked"]


def test_every_level_has_its_own_policy_or_the_queues() -> None:
    levels = Priorities(3, 2, {1: EntryQueuePolicy(max_queue_size=1), 3: EntryQueuePolicy(default_timeout_ns=50)})
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy(default_timeout_ns=100, reject=False), levels)
    queue.push("a", now_ns=0, deadline_ns=None, priority=1)
    with pytest.raises(Overloaded, match="max_queue_size 1"):
        queue.push("x", now_ns=0, deadline_ns=None, priority=1)
    assert queue.push("b", now_ns=0, deadline_ns=None) == 100
    assert queue.push("c", now_ns=1, deadline_ns=None, priority=2) == 101
    assert queue.push("d", now_ns=0, deadline_ns=None, priority=3) == 50
    assert [item for item, _ in queue.expired(now_ns=50)] == ["d"]
    assert queue.expired(now_ns=100) == []
    assert served(queue) == ["a", "c", "b"]  # what level 2 delayed is before level 3 all the same


@pytest.mark.parametrize(
    ("levels", "priority", "says"),
    [
        pytest.param(Priorities(), 1, "this deployment has no priority levels", id="no-levels"),
        pytest.param(Priorities(2, 1), 3, r"priority is 3; it lies in 1..2", id="too-low"),
        pytest.param(Priorities(2, 1), 2**64 - 1, r"it lies in 1..2", id="huge"),
    ],
)
def test_a_priority_that_does_not_exist_is_refused_with_those_that_do(
    levels: Priorities, priority: int, says: str
) -> None:
    queue: EntryQueue[str] = EntryQueue(EntryQueuePolicy(), levels)
    with pytest.raises(InvalidRequest, match=says):
        queue.push("a", now_ns=0, deadline_ns=None, priority=priority)
    assert len(queue) == 0


@pytest.mark.parametrize("fields", [(2, 0), (0, 1), (2, 3), (-1, 0), (1, 1, {2: EntryQueuePolicy()})])
def test_levels_that_make_no_sense_are_refused(fields: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="priority_levels"):
        Priorities(*fields)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.booleans()), max_size=40))
def test_the_order_is_by_level_and_then_by_arrival_whatever_comes_and_goes(
    arrivals: list[tuple[int, int, bool]],
) -> None:
    queue: EntryQueue[int] = EntryQueue(EntryQueuePolicy(), Priorities(levels=3, default=2))
    stay = []
    for item, (priority, arrived_ns, leaves) in enumerate(arrivals):
        queue.push(item, now_ns=arrived_ns, deadline_ns=None, priority=priority)
        if leaves:
            queue.discard(item)
        else:
            stay.append((priority or 2, arrived_ns, item))
    assert list(queue) == [item for *_, item in sorted(stay)]
    assert len(queue) == len(stay)
    assert served(queue) == [item for *_, item in sorted(stay)]
