"""What always holds of the blocks of standard serving's prefix cache."""

from __future__ import annotations

from collections.abc import Collection

from perf.baselines.standard.prefix_cache import Lease, PrefixCache


def assert_conserved(cache: PrefixCache, leases: Collection[Lease]) -> None:
    """Asserts that free blocks, the tree's and those that `leases` (all that are open) own are each block once."""
    tree = [block for node in cache._nodes() for block in node.blocks]
    tails = [tail.block for node in cache._nodes() for tail in node.tails]
    owned = [block for lease in leases for block in lease.blocks[lease.shared :]]
    if sorted([*cache._free, *tree, *tails, *owned]) != list(range(1, cache._unused)):
        raise AssertionError(f"{len(cache._free)} free, {len(tree)} + {len(tails)} cached, {len(owned)} leased")
