"""KV blocks that outlive the calls that filled them, found by token ids: a radix tree with eviction by last use.

A node's label is the ids (INT32 bytes) of one or more full blocks, so long prefixes are compared by `memcmp` and not
token by token. Full blocks are shared by any number of calls. The rest of a sequence, less than a block, is a *tail* of
the node where its full blocks end; one call at a time takes it and goes on filling the same block. A call that finds
its tail taken, or that differs inside a block, runs those few tokens again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from perf.baselines.standard.wire import TOKEN_BYTES


class _Node:
    """Full blocks after those of the parent. `calls` hold this node or one below; then it is never evicted."""

    __slots__ = ("blocks", "calls", "children", "label", "parent", "tails", "used")

    def __init__(self, parent: _Node | None, label: bytes, blocks: list[int], *, used: int, calls: int = 0) -> None:
        self.parent = parent
        self.label = label
        self.blocks = blocks
        self.children: dict[bytes, _Node] = {}
        self.tails: list[_Tail] = []
        self.used = used
        self.calls = calls


@dataclass(frozen=True, eq=False, slots=True)
class _Tail:
    """Less than a block. Equal ones are kept, since one call at a time can go on with each."""

    ids: bytes
    block: int
    used: int


@dataclass(slots=True)
class Lease:
    """KV blocks of one call, in order: `shared` of them belong to the tree, the others to the call.

    Attributes:
        ids: token ids of the call, INT32 bytes.
        blocks: enough for all tokens.
        cached: tokens whose KV is there already, fewer than there are ids.
        shared: how many of `blocks` are full blocks of the tree.
    """

    ids: bytes
    blocks: list[int]
    cached: int
    shared: int
    _node: _Node = field(repr=False)


class PrefixCache:
    """Owns the blocks 1 to `num_blocks`. Every block is free, in the tree, or a lease's own.

    Args:
        num_blocks: blocks of the pool.
        block_tokens: tokens per block.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self._width = block_tokens * TOKEN_BYTES
        # Blocks from `_unused` on were never taken; a list of them all would be long for large pools.
        self._free: list[int] = []
        self._unused = 1
        self._root = _Node(None, b"", [], used=0, calls=1)
        self._clock = 0
        # Looking for the oldest visits every node, so a little more than needed is evicted at once.
        self._spare = num_blocks // 64

    @property
    def free_count(self) -> int:
        return len(self._free) + self.num_blocks + 1 - self._unused

    def acquire(self, ids: bytes) -> Lease | None:
        """Blocks for a call, filled as far as the longest cached prefix goes; None if the pool is too full now.

        Args:
            ids: token ids, INT32 bytes, at least one. The last one is never taken from the cache: without a forward
                pass there are no logits.
        """
        self._clock += 1
        limit = len(ids) - TOKEN_BYTES
        node, start = self._walk(ids, limit)
        tail = _longest_tail(node, ids, start, limit)
        blocks = _path_blocks(node)
        shared = len(blocks)
        if tail is not None:
            node.tails.remove(tail)
            blocks.append(tail.block)
            start += len(tail.ids)
        _hold(node, 1)
        fresh = self._allocate(-(-len(ids) // self._width) - len(blocks))
        if fresh is None:
            _hold(node, -1)
            if tail is not None:
                node.tails.append(tail)
            return None
        return Lease(ids, blocks + fresh, start // TOKEN_BYTES, shared, node)

    def release(self, lease: Lease, computed: int) -> None:
        """The call is over; the KV of its first `computed` tokens (at least `lease.cached`) can be found from now on.

        With 0, for KV that must not be used again, only what the tree had before stays.
        """
        self._clock += 1
        end = max(computed * TOKEN_BYTES, lease.shared * self._width)
        node, used = self._insert(lease, end // self._width * self._width)
        rest = lease.ids[end // self._width * self._width : end]
        if rest:
            node.tails.append(_Tail(rest, lease.blocks[used], self._clock))
            used += 1
        self._free.extend(lease.blocks[used:])
        _hold(lease._node, -1)
        lease.blocks = []

    def _walk(self, ids: bytes, limit: int) -> tuple[_Node, int]:
        """The node where the longest cached prefix of full blocks ends, made by splitting if need be; its length."""
        node, position = self._root, 0
        node.used = self._clock
        while limit - position >= self._width:
            child = node.children.get(ids[position : position + self._width])
            if child is None:
                break
            equal = self._equal(child.label, ids, position, limit)
            node = child if equal == len(child.label) else self._split(child, equal)
            node.used = self._clock
            position += equal
        return node, position

    def _equal(self, label: bytes, ids: bytes, position: int, limit: int) -> int:
        """How many bytes of the label, in full blocks, are the ids from `position` on, up to `limit`; at least one."""
        if position + len(label) <= limit and ids.startswith(label, position):
            return len(label)
        low, high = 1, min(len(label), limit - position) // self._width
        while low < high:
            middle = (low + high + 1) // 2
            if ids.startswith(label[: middle * self._width], position):
                low = middle
            else:
                high = middle - 1
        return low * self._width

    def _split(self, node: _Node, size: int) -> _Node:
        """Cuts a node's label after `size` bytes; returns the new upper node."""
        count = size // self._width
        assert node.parent is not None
        upper = _Node(node.parent, node.label[:size], node.blocks[:count], used=node.used, calls=node.calls)
        node.parent.children[node.label[: self._width]] = upper
        node.parent, node.label, node.blocks = upper, node.label[size:], node.blocks[count:]
        upper.children[node.label[: self._width]] = node
        return upper

    def _insert(self, lease: Lease, end: int) -> tuple[_Node, int]:
        """Puts a lease's full blocks up to byte `end` into the tree. Returns the last node and how many blocks it took.

        Blocks that another call has put there meanwhile are given back.
        """
        node, position, used = lease._node, lease.shared * self._width, lease.shared
        while position < end:
            child = node.children.get(lease.ids[position : position + self._width])
            if child is None:
                node = self._append(node, lease, position, end)
                return node, end // self._width
            equal = self._equal(child.label, lease.ids, position, end)
            node = child if equal == len(child.label) else self._split(child, equal)
            node.used = self._clock
            self._free.extend(lease.blocks[used : used + equal // self._width])
            position, used = position + equal, used + equal // self._width
        return node, used

    def _append(self, node: _Node, lease: Lease, position: int, end: int) -> _Node:
        """Adds blocks below a node: to the node itself if nobody else could tell the difference."""
        label = lease.ids[position:end]
        blocks = lease.blocks[position // self._width : end // self._width]
        alone = node is lease._node and node.calls == 1 and node is not self._root
        if alone and not node.children and not node.tails:
            node.label += label
            node.blocks += blocks
            node.used = self._clock
            return node
        child = node.children[label[: self._width]] = _Node(node, label, blocks, used=self._clock)
        return child

    def _allocate(self, count: int) -> list[int] | None:
        if count > self.free_count:
            self._evict(count - self.free_count + self._spare)
        if count > self.free_count:
            return None
        keep = max(0, len(self._free) - count)
        taken = self._free[keep:]
        del self._free[keep:]
        first, self._unused = self._unused, self._unused + count - len(taken)
        return [*taken, *range(first, self._unused)]

    def _evict(self, count: int) -> None:
        """Frees up to `count` blocks that no call holds, oldest first, from the ends of sequences."""
        heap: list[tuple[int, int, _Node, _Tail | None]] = []
        for node in self._nodes():
            heap += [(tail.used, tail.block, node, tail) for tail in node.tails]
            if _is_idle_leaf(node):
                heap.append((node.used, node.blocks[-1], node, None))
        heapify(heap)
        while count > 0 and heap:
            _, _, node, tail = heappop(heap)
            if tail is not None:
                node.tails.remove(tail)
                self._free.append(tail.block)
                count -= 1
            else:
                count -= self._trim(node, count)
                node = node.parent if not node.blocks and node.parent is not None else node
            if _is_idle_leaf(node):
                heappush(heap, (node.used, node.blocks[-1], node, None))

    def _trim(self, node: _Node, count: int) -> int:
        """Frees up to `count` blocks at the end of a leaf, and the leaf when none is left; returns how many."""
        assert node.parent is not None
        key, keep = node.label[: self._width], max(0, len(node.blocks) - count)
        freed, node.blocks = node.blocks[keep:], node.blocks[:keep]
        node.label = node.label[: keep * self._width]
        self._free.extend(freed)
        if not node.blocks:
            del node.parent.children[key]
        return len(freed)

    def _nodes(self) -> Iterator[_Node]:
        todo = [self._root]
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node


def _longest_tail(node: _Node, ids: bytes, start: int, limit: int) -> _Tail | None:
    """The tail that saves most tokens.

    One that ends where the ids end is left alone: the call that comes next to it is rather the one that left it there,
    with one token more, than the same call again.
    """
    best, size = None, 0
    for tail in node.tails:
        if size < len(tail.ids) <= limit - start and ids.startswith(tail.ids, start):
            best, size = tail, len(tail.ids)
    return best


def _path_blocks(node: _Node) -> list[int]:
    """All blocks from the root to the end of a node, in order."""
    parts = []
    at: _Node | None = node
    while at is not None:
        parts.append(at.blocks)
        at = at.parent
    blocks: list[int] = []
    for part in reversed(parts):
        blocks += part
    return blocks


def _hold(node: _Node, change: int) -> None:
    at: _Node | None = node
    while at is not None:
        at.calls += change
        at = at.parent


def _is_idle_leaf(node: _Node) -> bool:
    return bool(node.blocks) and not node.calls and not node.children and not node.tails
