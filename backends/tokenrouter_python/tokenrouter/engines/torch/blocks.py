"""Who owns which KV block, and which cache slot a token lives in. Plain integers; no model and no cache memory here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]

NULL_BLOCK = 0
"""Block that no sequence ever owns; it stays zero and pads the block tables of shorter sequences."""


class BlockLease:
    """Exclusive use of some KV blocks until `release`. Also a context manager that releases on exit."""

    __slots__ = ("_pool", "block_ids")

    def __init__(self, pool: BlockPool, block_ids: tuple[int, ...]) -> None:
        self._pool = pool
        self.block_ids = block_ids

    def release(self) -> None:
        """Gives every block back. Releasing twice is harmless."""
        block_ids, self.block_ids = self.block_ids, ()
        self._pool._give_back(block_ids)

    def __enter__(self) -> BlockLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class BlockPool:
    """Hands out blocks 1 to `total`; block 0 is the null block.

    Conservation: free blocks and leased blocks together are always exactly the `total` blocks, each once.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # Taken from the end: a block given back last is taken first, while it may still be in a CPU cache.
        self._free = list(range(total, NULL_BLOCK, -1))

    @property
    def free_count(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def leased_count(self) -> int:
        """Blocks in leases."""
        return self.total - len(self._free)

    def fits(self, num_blocks: int) -> bool:
        """Whether a lease of that many blocks would be granted now. Changes nothing."""
        return num_blocks <= len(self._free)

    def reserve(self, num_blocks: int) -> BlockLease | None:
        """Leases all `num_blocks` blocks, or none and returns None: the pool is too full now."""
        if num_blocks < 0:
            raise ValueError(f"cannot lease {num_blocks} blocks")
        if not self.fits(num_blocks):
            return None
        keep = len(self._free) - num_blocks
        taken = self._free[keep:]
        del self._free[keep:]
        return BlockLease(self, tuple(reversed(taken)))

    def _give_back(self, block_ids: tuple[int, ...]) -> None:
        self._free.extend(reversed(block_ids))


def assert_conserved(pool: BlockPool, leases: Collection[BlockLease]) -> None:
    """Asserts that `leases` (all that are open) and the free blocks are exactly the pool's blocks, each once."""
    held = [block for lease in leases for block in lease.block_ids]
    free = pool._free
    if len(free) + len(held) != pool.total:
        raise AssertionError(f"leaked {pool.total - len(free) - len(held)} of {pool.total} blocks")
    if sorted([*free, *held]) != list(range(1, pool.total + 1)):
        raise AssertionError("one block has two owners")


class BlockTables:
    """Block ids and KV lengths of all open sequences, as arrays: the indices of a whole step come from a few calls.

    A sequence has one row, until `remove`. Rows are reused; the arrays grow when all are taken.
    """

    def __init__(self, *, block_tokens: int, max_blocks: int, rows: int = 16) -> None:
        self.block_tokens = block_tokens
        self.lengths: IntArray = np.zeros(rows, dtype=np.int64)
        """[rows], tokens of each sequence that are in the cache; 0 for rows nobody has."""
        self._blocks: IntArray = np.full((rows, max_blocks), NULL_BLOCK, dtype=np.int64)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def blocks_used(self) -> int:
        """Blocks that hold at least one token."""
        return int((-(-self.lengths // self.block_tokens)).sum())

    def add(self, block_ids: Sequence[int]) -> int:
        """Gives a new sequence of length 0 a row and returns it."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._blocks[row, : len(block_ids)] = block_ids
        return row

    def remove(self, row: int) -> None:
        """Frees the row."""
        self._blocks[row] = NULL_BLOCK
        self.lengths[row] = 0
        self._free_rows.append(row)

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Cache slot of each token. `rows` and `positions` are [T]; returns [T]."""
        blocks = self._blocks[rows, positions // self.block_tokens]
        result: IntArray = blocks * self.block_tokens + positions % self.block_tokens
        return result

    def padded(self, rows: IntArray, num_blocks: int) -> IntArray:
        """First `num_blocks` block ids of each row, the null block after a sequence's last. Returns [n, num_blocks]."""
        return self._blocks[rows, :num_blocks]

    def _grow(self) -> None:
        rows = len(self.lengths)
        self.lengths = np.concatenate([self.lengths, np.zeros_like(self.lengths)])
        self._blocks = np.concatenate([self._blocks, np.full_like(self._blocks, NULL_BLOCK)])
        self._free_rows.extend(range(2 * rows - 1, rows - 1, -1))
