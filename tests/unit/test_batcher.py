from __future__ import annotations

import random
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenrouter.batcher import Batch, Batching, DelayedBatcher, Reason, WaitUntil
from tokenrouter.errors import ConfigError

MS = 1_000_000
NEVER = 10**18


def batcher(threshold: int = 1, delay_ns: int = 0, *, max_batch: int = 64, **table: int) -> DelayedBatcher[str]:
    by_in_flight = {int(n[1:]): b for n, b in table.items()}
    return DelayedBatcher(Batching(threshold, delay_ns, by_in_flight), max_batch=max_batch)


def test_a_lone_request_leaves_at_its_deadline_and_not_before() -> None:
    queue = batcher(4, 5 * MS)
    queue.add("a", now_ns=100 * MS)
    assert queue.poll(in_flight=9, now_ns=105 * MS - 1) == WaitUntil(105 * MS)
    assert queue.poll(in_flight=9, now_ns=105 * MS) == Batch(("a",), Reason.DEADLINE)


def test_the_oldest_request_owns_the_deadline() -> None:
    queue = batcher(4, 5 * MS)
    queue.add("a", now_ns=0)
    queue.add("b", now_ns=4 * MS)
    assert queue.poll(in_flight=9, now_ns=4 * MS) == WaitUntil(5 * MS)
    queue.discard("a")
    assert queue.poll(in_flight=9, now_ns=5 * MS) == WaitUntil(9 * MS)


def test_asking_changes_nothing() -> None:
    queue = batcher(2)
    queue.add("a", now_ns=0)
    queue.add("b", now_ns=0)
    first = queue.poll(in_flight=2, now_ns=0)
    assert first == queue.poll(in_flight=2, now_ns=0) == Batch(("a", "b"), Reason.THRESHOLD)
    assert list(queue) == ["a", "b"]


def test_nobody_waits_when_nobody_else_can_come() -> None:
    queue = batcher(4, NEVER)
    queue.add("a", now_ns=0)
    assert isinstance(queue.poll(in_flight=2, now_ns=0), WaitUntil)
    assert queue.poll(in_flight=1, now_ns=0) == Batch(("a",), Reason.ALL_READY)


def test_what_does_not_fit_keeps_its_place() -> None:
    queue = batcher(4, max_batch=2)
    for key in "abc":
        queue.add(key, now_ns=0)
    batch = queue.poll(in_flight=9, now_ns=0)
    assert batch == Batch(("a", "b"), Reason.THRESHOLD)
    queue.take(batch)
    queue.add("d", now_ns=1)
    assert list(queue) == ["c", "d"]


def test_a_request_that_is_ready_twice_is_a_bug_of_the_caller() -> None:
    queue = batcher()
    queue.add("a", now_ns=0)
    with pytest.raises(ValueError, match="ready already"):
        queue.add("a", now_ns=1)


@pytest.mark.parametrize(
    ("in_flight", "threshold"),
    [
        pytest.param(0, 1, id="nobody"),
        pytest.param(1, 1, id="below-the-table"),
        pytest.param(2, 2, id="an-entry"),
        pytest.param(7, 2, id="between-entries"),
        pytest.param(8, 5, id="the-next-entry"),
        pytest.param(500, 5, id="beyond-the-table"),
    ],
)
def test_the_table_gives_the_threshold_of_the_largest_number_that_is_not_exceeded(
    in_flight: int, threshold: int
) -> None:
    assert batcher(3, n2=2, n8=5).threshold(in_flight) == threshold


def test_a_change_of_the_number_in_flight_counts_at_once() -> None:
    queue = batcher(1, NEVER, n1=1, n4=3)
    queue.add("a", now_ns=0)
    assert isinstance(queue.poll(in_flight=4, now_ns=0), WaitUntil)
    assert queue.poll(in_flight=3, now_ns=0) == Batch(("a",), Reason.THRESHOLD)


def test_a_threshold_beyond_the_largest_batch_is_reached_at_the_largest_batch() -> None:
    queue = batcher(50, NEVER, max_batch=2)
    queue.add("a", now_ns=0)
    queue.add("b", now_ns=0)
    assert queue.poll(in_flight=99, now_ns=0) == Batch(("a", "b"), Reason.THRESHOLD)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        pytest.param({"threshold": 0}, "preferred_batch_size is 0", id="threshold-zero"),
        pytest.param({"max_queue_delay_ns": -1}, "max_queue_delay_microseconds", id="negative-delay"),
        pytest.param({"by_in_flight": {0: 1}}, "batch_thresholds has 0: 1", id="nobody-in-flight"),
        pytest.param({"by_in_flight": {4: 5}}, "batch_thresholds has 4: 5", id="more-than-in-flight"),
        pytest.param({"by_in_flight": {4: 0}}, "batch_thresholds has 4: 0", id="table-zero"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Batching(**fields)  # type: ignore[arg-type]


# --- a closed system of several models ------------------------------------------------------------------------------


def closed_system(
    thresholds: list[int], n: int, rng: random.Random, *, delay_ns: int, max_batch: int, steps: int
) -> list[tuple[int, Batch[int], int]]:
    """n requests wander between idle-or-busy models for `steps` steps.

    Returns (model, batch, ready at the start) of every step. Fails if nothing can ever happen again.
    """
    queues: list[DelayedBatcher[int]] = [
        DelayedBatcher(Batching(threshold, delay_ns), max_batch=max_batch) for threshold in thresholds
    ]
    busy: set[int] = set()
    idle_since = [0] * len(queues)
    done: list[tuple[int, int, tuple[int, ...]]] = []
    history: list[tuple[int, Batch[int], int]] = []
    now_ns = 0
    order: dict[int, list[int]] = {i: [] for i in range(len(queues))}
    for key in rng.sample(range(n), n):
        home = rng.randrange(len(queues))
        queues[home].add(key, now_ns=now_ns)
        order[home].append(key)
    while len(history) < steps:
        looks: list[int] = []
        for i, queue in enumerate(queues):
            decision = None if i in busy else queue.poll(in_flight=n, now_ns=now_ns)
            if isinstance(decision, WaitUntil):
                looks.append(decision.at_ns)
            elif isinstance(decision, Batch):
                oldest_ns = queue.ready_since(decision.keys[0])
                if decision.reason is Reason.DEADLINE:
                    assert now_ns == max(oldest_ns + delay_ns, idle_since[i]), "a deadline was overslept"
                history.append((i, decision, len(queue)))
                queue.take(decision)
                assert list(decision.keys) == order[i][: len(decision.keys)], "not first come, first served"
                del order[i][: len(decision.keys)]
                busy.add(i)
                heappush(done, (now_ns + rng.randint(1, 40), i, decision.keys))
        times = [*looks, *(done[0][:1] if done else ())]
        assert times, f"deadlock: nobody runs, nobody is ever looked at; {[len(queue) for queue in queues]} wait"
        now_ns = max(now_ns, min(times))
        while done and done[0][0] <= now_ns:
            _, i, keys = heappop(done)
            busy.discard(i)
            idle_since[i] = now_ns
            for key in keys:
                target = rng.randrange(len(queues))
                queues[target].add(key, now_ns=now_ns)
                order[target].append(key)
    return history


@st.composite
def feasible(draw: st.DrawFn) -> tuple[list[int], int]:
    """Thresholds with sum(B_i - 1) < n."""
    n = draw(st.integers(1, 12))
    room = n - 1
    thresholds = []
    for _ in range(draw(st.integers(1, 4))):
        extra = draw(st.integers(0, room))
        room -= extra
        thresholds.append(1 + extra)
    return draw(st.permutations(thresholds)), n


@settings(max_examples=150)
@given(system=feasible(), seed=st.integers(0, 2**32))
def test_feasible_thresholds_never_deadlock_even_without_a_deadline(system: tuple[list[int], int], seed: int) -> None:
    thresholds, n = system
    rng = random.Random(seed)
    history = closed_system(thresholds, n, rng, delay_ns=NEVER, max_batch=n, steps=60)
    for model, batch, ready in history:
        assert batch.reason is not Reason.DEADLINE, "it went on only because a deadline fired"
        assert ready >= thresholds[model] or ready == n
        assert len(batch.keys) == ready


@settings(max_examples=100)
@given(
    thresholds=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    n=st.integers(1, 16),
    max_batch=st.integers(1, 16),
    delay_ns=st.integers(0, 100),
    seed=st.integers(0, 2**32),
)
def test_any_thresholds_go_on_under_a_delay_and_every_step_has_a_reason(
    thresholds: list[int], n: int, max_batch: int, delay_ns: int, seed: int
) -> None:
    history = closed_system(thresholds, n, random.Random(seed), delay_ns=delay_ns, max_batch=max_batch, steps=60)
    for model, batch, ready in history:
        assert len(batch.keys) == min(ready, max_batch)
        if batch.reason is Reason.THRESHOLD:
            assert ready >= min(thresholds[model], max_batch)
        elif batch.reason is Reason.ALL_READY:
            assert ready == n


def test_infeasible_thresholds_go_on_only_by_their_deadline() -> None:
    """The reason for the bound on the thresholds, and proof that the test above can fail."""
    history = closed_system([3, 3], 4, random.Random(1), delay_ns=NEVER, max_batch=4, steps=60)
    assert any(batch.reason is Reason.DEADLINE for _, batch, _ in history)


class BatcherMachine(RuleBasedStateMachine):
    """One batcher beside a list of (key, time): adds, discards, steps and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.next_key = 0
        self.model: list[tuple[int, int]] = []
        self.queue: DelayedBatcher[int] = DelayedBatcher(Batching(3, 50), max_batch=4)

    @rule()
    def arrives(self) -> None:
        self.queue.add(self.next_key, now_ns=self.now_ns)
        self.model.append((self.next_key, self.now_ns))
        self.next_key += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.model))
        self.model.remove(gone)
        self.queue.discard(gone[0])

    @rule(ns=st.integers(1, 60))
    def time_passes(self, ns: int) -> None:
        self.now_ns += ns

    @rule(in_flight=st.integers(0, 12))
    def looks(self, in_flight: int) -> None:
        in_flight = max(in_flight, len(self.model))
        keys = tuple(key for key, _ in self.model[:4])
        got = self.queue.poll(in_flight=in_flight, now_ns=self.now_ns)
        if not self.model:
            assert got is None
        elif len(self.model) >= 3:
            assert got == Batch(keys, Reason.THRESHOLD)
        elif len(self.model) == in_flight:
            assert got == Batch(keys, Reason.ALL_READY)
        elif self.now_ns >= self.model[0][1] + 50:
            assert got == Batch(keys, Reason.DEADLINE)
        else:
            assert got == WaitUntil(self.model[0][1] + 50)
        if isinstance(got, Batch):
            self.queue.take(got)
            del self.model[: len(got.keys)]

    @invariant()
    def holds_what_arrived(self) -> None:
        assert list(self.queue) == [key for key, _ in self.model]
        assert len(self.queue) == len(self.model)


TestBatcherMachine = BatcherMachine.TestCase
TestBatcherMachine.settings = settings(max_examples=60, stateful_step_count=30)
