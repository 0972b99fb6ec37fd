"""Which KV block holds which tokens: a tree of blocks that outlives the requests, with reuse and eviction.

As in TensorRT-LLM's block manager (cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp): full blocks are shared as soon
as they are computed, a partly filled last block is stored when its request ends, and a prompt may continue from part of
a block by taking it over if nobody uses it, else by copying it. There is no second pool on the host: what is evicted is
gone, whatever host_cache_size says.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm import _behaviour

DEFAULT_PRIORITY = 35


@dataclass(slots=True, eq=False)
class Node:
    """A block with content. `tokens` is shorter than a block only for a leaf."""

    tokens: tuple[int, ...]
    block: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    users: int = 0
    used: int = 0
    priority: int = DEFAULT_PRIORITY
    expires: float = float("inf")


@dataclass(slots=True)
class Lease:
    """The blocks of a running request.

    Attributes:
        blocks: one id per `block_tokens` positions, for prompt and all tokens that may follow.
        path: stored nodes that this request keeps from eviction, one per block from the first on.
        cached: prompt tokens that need no computation.
        reported: what cached_tokens says.
    """

    blocks: list[int]
    path: list[Node]
    cached: int
    reported: int
    retention: Any = None
    prompt_tokens: int = 0
    root: Any = None

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(self.blocks)


class BlockTree:
    """All blocks of one engine.

    Args:
        blocks: ids that may be used.
        block_tokens: tokens per block.
        copy: copies the first n tokens of one block to another: `copy(source, target, n)`.
        config: the KvCacheConfig.
    """

    def __init__(
        self, blocks: Sequence[int], block_tokens: int, copy: Callable[[int, int, int], None], config: Any
    ) -> None:
        self.total = len(blocks)
        self._free = list(reversed(blocks))
        self._size = block_tokens
        self._copy = copy
        self._config = config
        self._roots: dict[str | None, Node] = {}
        self._clock = itertools.count(1)

    @property
    def free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def stored(self) -> int:
        """Blocks in the tree."""
        return sum(1 for _ in self._nodes())

    def lease(self, prompt: Sequence[int], capacity: int, salt: str | None, retention: Any) -> Lease | None:
        """Blocks for `capacity` tokens, those of the prompt's longest stored prefix included; None if too few."""
        root = self._roots.setdefault(salt if _behaviour.true("salted") else None, Node((), 0, None))
        limit = len(prompt) - 1
        path, partial, tail = self._match(root, prompt, limit)
        for node in path:
            node.users += 1
        if partial is not None:
            partial.users += 1
        fresh = self._take(-(-capacity // self._size) - len(path))
        if partial is not None:
            partial.users -= 1
        if fresh is None:
            for node in path:
                node.users -= 1
            return None
        lease = Lease([node.block for node in path] + fresh, path, len(path) * self._size + tail, 0)
        lease.reported = lease.cached
        if not _behaviour.true("reuse_capped") and lease.cached == limit:
            lease.reported = len(prompt)
        lease.retention, lease.prompt_tokens, lease.root = retention, len(prompt), root
        if partial is not None:
            self._continue(lease, partial, tail)
        for node in path:
            node.used = next(self._clock)
        return lease

    def store(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Makes the full blocks of a running request visible to others. `tokens` are those with computed KV."""
        if not self._config.enable_block_reuse:
            return
        for index in range(len(lease.path), len(tokens) // self._size):
            self._insert(lease, index, tuple(tokens[index * self._size : (index + 1) * self._size]))

    def release(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Ends a request: stores what it computed, the partly filled last block included, and frees the rest."""
        if not _behaviour.true("generated_stored"):
            tokens = tokens[: lease.prompt_tokens]
        self.store(lease, tokens)
        full = len(tokens) // self._size
        tail = tuple(tokens[full * self._size :])
        if tail and self._config.enable_block_reuse and full == len(lease.path):
            self._insert(lease, full, tail)
        in_tree = {node.block for node in lease.path}
        self._free.extend(block for block in lease.blocks if block not in in_tree)
        for node in lease.path:
            node.users -= 1
            node.used = next(self._clock)

    def _insert(self, lease: Lease, index: int, tokens: tuple[int, ...]) -> None:
        parent = lease.path[-1] if lease.path else lease.root
        node = parent.children.get(tokens)
        if node is None:
            node = Node(tokens, lease.blocks[index], parent)
            parent.children[tokens] = node
        # A request that computed the same block at the same time keeps its own until it ends.
        self._rate(node, lease, index)
        node.users += 1
        lease.path.append(node)

    def _rate(self, node: Node, lease: Lease, index: int) -> None:
        start = index * self._size
        retention = lease.retention
        priority, duration = DEFAULT_PRIORITY, None
        if retention is not None and start >= lease.prompt_tokens:
            priority, duration = retention.decode_retention_priority, retention.decode_duration_ms
        elif retention is not None:
            for given in retention.token_range_retention_configs:
                if given.token_start <= start and (given.token_end is None or start < given.token_end):
                    priority, duration = given.priority, given.duration_ms
                    break
        node.priority = priority
        node.expires = float("inf") if duration is None else time.monotonic() + duration.total_seconds()

    def _match(self, root: Node, prompt: Sequence[int], limit: int) -> tuple[list[Node], Node | None, int]:
        """Whole blocks, then the block that continues furthest and by how many tokens."""
        path: list[Node] = []
        if not self._config.enable_block_reuse or not _behaviour.true("reuse"):
            return path, None, 0
        node, at = root, 0
        while at + self._size <= limit and (child := node.children.get(tuple(prompt[at : at + self._size]))):
            path.append(child)
            node, at = child, at + self._size
        if not self._config.enable_partial_reuse and _behaviour.true("partial_reuse"):
            return path, None, 0
        best, length = None, 0
        for child in node.children.values():
            common = _common(child.tokens, prompt[at:limit])
            if common > length and (self._idle(child) or self._config.copy_on_partial_reuse):
                best, length = child, common
        return path, best, length

    def _continue(self, lease: Lease, partial: Node, tail: int) -> None:
        target = len(lease.path)
        if self._idle(partial):
            self._drop(partial)
            self._free.append(lease.blocks[target])
            lease.blocks[target] = partial.block
        else:
            self._copy(partial.block, lease.blocks[target], tail)

    def _idle(self, node: Node) -> bool:
        return not node.users and not node.children

    def _take(self, count: int) -> list[int] | None:
        """`count` blocks, evicting what is stored; None, and nothing evicted, if that many cannot be had."""
        if count > len(self._free) + sum(not _in_use(node) for node in self._nodes()):
            return None
        while count > len(self._free):
            victim = min((node for node in self._nodes() if self._idle(node)), key=self._worth)
            self._drop(victim)
            self._free.append(victim.block)
        return [self._free.pop() for _ in range(count)]

    def _worth(self, node: Node) -> tuple[int, int]:
        priority = node.priority if time.monotonic() < node.expires else DEFAULT_PRIORITY
        if not _behaviour.true("evicts_low_priority_first"):
            priority = 0
        return priority, node.used if _behaviour.true("evicts_least_recent") else -node.used

    def _drop(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens]

    def _nodes(self) -> Iterator[Node]:
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


def _in_use(node: Node) -> bool:
    return bool(node.users) or any(_in_use(child) for child in node.children.values())


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
