"""Which KV block holds which tokens: a tree of blocks that outlives the requests, with reuse and eviction.

As in TensorRT-LLM's block manager (cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp): full blocks of a prompt are
shared as soon as they are computed, everything else when its request ends, and a prompt may continue from part of a
block by taking it over if nobody uses it, else by copying it. There is no second pool on the host: what is evicted is
gone, whatever host_cache_size says.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
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
    request: Any
    root: Node

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
    def available(self) -> int:
        """Blocks that requests could have now, those that would have to be evicted included."""
        return len(self._free) + sum(not _in_use(node) for node in self._nodes())

    def get_kv_cache_stats(self) -> SimpleNamespace:
        """As the KV manager has it."""
        return SimpleNamespace(max_num_blocks=self.total)

    def cached(self, request: Any) -> int:
        """Prompt tokens that need no computation."""
        path, _, tail = self._match(self._root(request), request.prompt_token_ids)
        return len(path) * self._size + tail

    def lease(self, request: Any, count: int) -> Lease:
        """`count` blocks, those of the prompt's longest stored prefix included."""
        prompt = request.prompt_token_ids
        path, partial, tail = self._match(self._root(request), prompt)
        held = [*path, *([partial] if partial is not None else [])]
        for node in held:
            node.users += 1
        blocks = [node.block for node in path] + self.take(count - len(path))
        if partial is not None:
            partial.users -= 1
        cached = len(path) * self._size + tail
        capped = cached < len(prompt) - 1 or _behaviour.true("reuse_capped")
        lease = Lease(blocks, path, cached, cached if capped else len(prompt), request, self._root(request))
        if partial is not None:
            self._continue(lease, partial, tail)
        for node in path:
            node.used = next(self._clock)
        return lease

    def _root(self, request: Any) -> Node:
        return self._roots.setdefault(request.cache_salt if _behaviour.true("salted") else None, Node((), 0, None))

    def store(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Makes the full blocks of a running request visible to others. `tokens` are those with computed KV."""
        if not self._config.enable_block_reuse:
            return
        for index in range(len(lease.path), len(tokens) // self._size):
            self._insert(lease, index, tuple(tokens[index * self._size : (index + 1) * self._size]))

    def release(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Ends a request: stores what it computed, the partly filled last block included, and frees the rest."""
        if not _behaviour.true("generated_stored"):
            tokens = tokens[: len(lease.request.prompt_token_ids)]
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
        start, retention = index * self._size, lease.request.retention
        priority, duration = DEFAULT_PRIORITY, None
        if retention is not None and start >= len(lease.request.prompt_token_ids):
            priority, duration = retention.decode_retention_priority, retention.decode_duration_ms
        elif retention is not None:
            for given in retention.token_range_retention_configs:
                if given.token_start <= start and (given.token_end is None or start < given.token_end):
                    priority, duration = given.priority, given.duration_ms
                    break
        node.priority = priority
        node.expires = float("inf") if duration is None else time.monotonic() + duration.total_seconds()

    def _match(self, root: Node, prompt: Sequence[int]) -> tuple[list[Node], Node | None, int]:
        """Whole blocks, then the block that continues furthest and by how many tokens; never the last token."""
        path: list[Node] = []
        limit = len(prompt) - 1
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

    def take(self, count: int) -> list[int]:
        """`count` blocks that are available, evicting what is stored."""
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
