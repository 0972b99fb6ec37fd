from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tokenrouter.engines.torch.blocks import NULL_BLOCK, BlockLease, BlockPool, BlockTables, assert_conserved

POOL_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """Any order of leasing and releasing, on a pool small enough to be full most of the time."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(POOL_BLOCKS)
        self.open: list[BlockLease] = []

    @rule(target=leases, count=st.integers(0, POOL_BLOCKS + 2))
    def reserve(self, count: int) -> BlockLease:
        free = self.pool.free_count
        assert self.pool.fits(count) == (count <= free)
        lease = self.pool.reserve(count)
        if lease is None:
            assert count > free, "refused although it fitted"
            assert self.pool.free_count == free, "a refusal took blocks"
            return BlockLease(self.pool, ())
        assert len(lease.block_ids) == count
        assert self.pool.free_count == free - count
        self.open.append(lease)
        return lease

    @rule(lease=leases)
    def release_and_keep_the_object(self, lease: BlockLease) -> None:
        lease.release()
        self.open = [other for other in self.open if other is not lease]

    @rule(lease=consumes(leases))
    def release_twice(self, lease: BlockLease) -> None:
        lease.release()
        free = self.pool.free_count
        lease.release()
        assert self.pool.free_count == free
        self.open = [other for other in self.open if other is not lease]

    @invariant()
    def conserved(self) -> None:
        assert_conserved(self.pool, self.open)
        assert self.pool.leased_count == sum(len(lease.block_ids) for lease in self.open)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase


def test_a_lease_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    first = pool.reserve(3)
    assert first is not None
    assert pool.reserve(2) is None
    assert pool.free_count == 1
    first.release()
    assert pool.reserve(4) is not None


def test_the_null_block_is_never_leased() -> None:
    pool = BlockPool(5)
    lease = pool.reserve(5)
    assert lease is not None
    assert sorted(lease.block_ids) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in lease.block_ids


def test_an_exception_inside_a_lease_gives_the_blocks_back() -> None:
    pool = BlockPool(3)
    lease = pool.reserve(2)
    assert lease is not None
    with pytest.raises(RuntimeError), lease:
        raise RuntimeError("cancelled")
    assert_conserved(pool, [])


def test_a_negative_lease_is_misuse() -> None:
    with pytest.raises(ValueError, match="-1"):
        BlockPool(3).reserve(-1)


def test_the_conservation_check_sees_a_leak_and_a_double_owner() -> None:
    pool = BlockPool(3)
    lease = pool.reserve(2)
    assert lease is not None
    with pytest.raises(AssertionError, match="leaked 2 of 3"):
        assert_conserved(pool, [])
    pool._free.append(lease.block_ids[0])
    lease.block_ids = lease.block_ids[:1]
    with pytest.raises(AssertionError, match="two owners"):
        assert_conserved(pool, [lease])


@pytest.mark.parametrize("block_tokens", [1, 4, 7])
def test_slots_match_the_one_line_definition(block_tokens: int) -> None:
    tables = BlockTables(block_tokens=block_tokens, max_blocks=30, rows=1)
    blocks = [9, 2, 30, *range(40, 67)]
    row = tables.add(blocks)
    positions = np.arange(30)
    want = [blocks[p // block_tokens] * block_tokens + p % block_tokens for p in range(30)]
    assert tables.slots(np.full(30, row), positions).tolist() == want


def test_tables_survive_growth_and_reuse_of_rows() -> None:
    tables = BlockTables(block_tokens=4, max_blocks=5, rows=1)
    rng, known = random.Random(0), dict[int, list[int]]()
    for _ in range(300):
        if known and rng.random() < 0.4:
            row = rng.choice(list(known))
            tables.remove(row)
            del known[row]
        else:
            blocks = [rng.randrange(1, 99) for _ in range(rng.randrange(1, 6))]
            row = tables.add(blocks)
            assert row not in known
            assert tables.lengths[row] == 0
            known[row] = blocks
        rows = np.array(list(known), dtype=np.int64)
        want = [blocks + [NULL_BLOCK] * (5 - len(blocks)) for blocks in known.values()]
        assert tables.padded(rows, 5).tolist() == want


def test_used_blocks_are_those_with_at_least_one_token() -> None:
    tables = BlockTables(block_tokens=4, max_blocks=5)
    rows = [tables.add([1]) for _ in range(4)]
    tables.lengths[rows] = [0, 1, 4, 5]
    assert tables.blocks_used == 0 + 1 + 1 + 2
