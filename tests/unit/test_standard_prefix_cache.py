"""The prefix cache of the standard-serving baseline: what it finds is what was computed, and no block is lost."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.baselines.standard.prefix_cache import Lease, PrefixCache
from tests.unit.prefix_cache_blocks import assert_conserved

BLOCK = 4


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Memory:
    """KV as a real engine has it: for every slot the whole prefix that its token was computed with."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.slots: dict[tuple[int, int], bytes] = {}

    def acquire(self, tokens: bytes) -> Lease | None:
        lease = self.cache.acquire(tokens)
        if lease is not None:
            self.check(lease, lease.cached)
        return lease

    def compute(self, lease: Lease, until: int) -> None:
        for position in range(lease.cached, until):
            self.slots[self.slot(lease, position)] = lease.ids[: 4 * (position + 1)]

    def check(self, lease: Lease, until: int) -> None:
        """What a forward pass would read is the KV of exactly this prefix."""
        for position in range(until):
            assert self.slots[self.slot(lease, position)] == lease.ids[: 4 * (position + 1)]

    def release(self, lease: Lease, computed: int) -> None:
        self.check(lease, computed)
        self.cache.release(lease, computed)

    def run(self, *tokens: int) -> int:
        """A whole call; returns how many tokens were cached."""
        lease = self.acquire(ids(*tokens))
        assert lease is not None
        self.compute(lease, len(tokens))
        cached = lease.cached
        self.release(lease, len(tokens))
        return cached

    @staticmethod
    def slot(lease: Lease, position: int) -> tuple[int, int]:
        return lease.blocks[position // BLOCK], position % BLOCK


@pytest.fixture
def memory() -> Memory:
    return Memory(PrefixCache(16, BLOCK))


def test_a_call_that_adds_tokens_runs_only_those(memory: Memory) -> None:
    history = list(range(10))
    assert memory.run(*history) == 0
    for token in range(10, 40):
        history.append(token)
        assert memory.run(*history) == len(history) - 1
    assert memory.cache.free_count == 16 - 10
    assert_conserved(memory.cache, [])


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (6, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_run(memory: Memory, length: int, cached: int) -> None:
    """The same call again: its last block is run again, since blocks are never changed where they are filled."""
    memory.run(*range(length))
    assert memory.run(*range(length)) == cached


def test_a_shared_prefix_is_shared_by_whole_blocks(memory: Memory) -> None:
    memory.run(1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert memory.run(1, 2, 3, 4, 5, 6, 0, 0) == 4
    assert memory.run(1, 2, 3, 4, 5, 6, 7, 8, 0) == 8
    assert memory.run(0, 2, 3, 4) == 0
    assert memory.run(1, 2, 3, 4, 5, 6, 7, 8, 9, 10) == 9


def test_calls_with_equal_prompts_at_the_same_time_both_go_on(memory: Memory) -> None:
    tokens = ids(1, 2, 3, 4, 5, 6)
    first, second = memory.acquire(tokens), memory.acquire(tokens)
    assert first is not None
    assert second is not None
    for lease in (first, second):
        memory.compute(lease, 6)
        memory.release(lease, 6)
    third, fourth = memory.acquire(tokens + ids(7)), memory.acquire(tokens + ids(8))
    assert third is not None
    assert fourth is not None
    assert (third.cached, fourth.cached) == (6, 6)
    assert third.blocks[0] == fourth.blocks[0]
    assert third.blocks[1] != fourth.blocks[1]
    assert_conserved(memory.cache, [third, fourth])


def test_eviction_takes_what_was_not_used_longest_and_nothing_that_is_in_use() -> None:
    memory = Memory(PrefixCache(6, BLOCK))
    memory.run(*range(8))
    memory.run(*range(100, 108))
    memory.run(*range(8), 8)
    lease = memory.acquire(ids(*range(100, 108), 1))
    assert lease is not None
    assert memory.cache.acquire(ids(*range(200, 216))) is None, "8 of 24 tokens are in use, and one more block"
    assert_conserved(memory.cache, [lease])
    memory.compute(lease, 9)
    memory.release(lease, 9)
    assert memory.run(*range(100, 108), 1, 2) == 9
    assert memory.run(*range(8), 8) == 0, "evicted for the call that did not fit"


def test_a_failed_call_leaves_nothing_behind(memory: Memory) -> None:
    memory.run(1, 2, 3, 4, 5)
    lease = memory.acquire(ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert lease is not None
    assert lease.cached == 5
    memory.cache.release(lease, 0)
    assert memory.run(1, 2, 3, 4, 5, 6) == 4
    assert_conserved(memory.cache, [])


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.lists(st.integers(0, 1), min_size=1, max_size=18)),
        st.tuples(st.just("longer"), st.lists(st.integers(0, 1), min_size=1, max_size=6)),
        st.tuples(st.just("end"), st.just([0])),
        st.tuples(st.just("fail"), st.just([0])),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(OPERATIONS, st.integers(5, 24))
def test_never_the_kv_of_another_prefix_and_no_block_lost(operations: list[tuple[str, list[int]]], blocks: int) -> None:
    """Two token ids only, so that prefixes collide all the time; several calls run at once."""
    memory = Memory(PrefixCache(blocks, BLOCK))
    running: list[Lease] = []
    last: list[int] = []
    for kind, tokens in operations:
        if kind in ("call", "longer"):
            last = ([*last, *tokens] if kind == "longer" else tokens)[:18]
            lease = memory.acquire(ids(*last))
            if lease is not None:
                assert lease.cached < len(last)
                assert len(lease.blocks) == -(-len(last) // BLOCK)
                memory.compute(lease, len(last))
                running.append(lease)
            else:
                assert running, "an idle pool of 5 blocks holds any call"
        elif running:
            lease = running.pop(0)
            if kind == "end":
                memory.release(lease, len(lease.ids) // 4)
            else:
                memory.cache.release(lease, 0)
        for other in running:
            memory.check(other, len(other.ids) // 4)
        assert_conserved(memory.cache, running)
    for lease in running:
        memory.release(lease, len(lease.ids) // 4)
    assert_conserved(memory.cache, [])
