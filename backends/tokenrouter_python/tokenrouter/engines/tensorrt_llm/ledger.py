"""KV blocks leased to sequences, counted: for engines that allocate blocks by themselves.

Such an engine knows nothing of leases; it finds room as long as no more than its pool is leased.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenrouter.engines.base import EngineInfo, blocks_needed
from tokenrouter.errors import EngineFailed


@dataclass(slots=True, eq=False)
class Lease:
    """KV of one sequence: `blocks` are leased, `tokens` of it should be in the cache."""

    blocks: int
    tokens: int = 0


class Ledger:
    """Leases of one engine, within the sizes of its `EngineInfo`."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._leases: set[Lease] = set()

    @property
    def leased(self) -> int:
        """Blocks leased."""
        return sum(lease.blocks for lease in tuple(self._leases))

    @property
    def used(self) -> int:
        """Blocks that should hold tokens."""
        return sum(blocks_needed(lease.tokens, self._info.block_tokens) for lease in tuple(self._leases))

    def open(self, kv_tokens: int) -> Lease:
        """A lease for a sequence of at most `kv_tokens` tokens.

        Raises:
            EngineFailed: the pool has not enough free blocks, or kv_tokens exceeds max_context.
        """
        info = self._info
        if not 1 <= kv_tokens <= info.max_context:
            raise EngineFailed(f"a sequence of {kv_tokens} tokens; this model takes 1 to {info.max_context}")
        needed, free = blocks_needed(kv_tokens, info.block_tokens), info.kv_blocks - self.leased
        if needed > free:
            raise EngineFailed(
                f"a sequence of {kv_tokens} tokens needs {needed} KV blocks; {free} of {info.kv_blocks} are free "
                "(kv_cache_config.max_tokens sets the total)"
            )
        lease = Lease(needed)
        self._leases.add(lease)
        return lease

    def close(self, lease: Lease) -> None:
        """Gives a lease back; closing twice is harmless."""
        self._leases.discard(lease)
