"""Packs the rows of a step into one token axis and builds every index that the layers share.

Attention over a paged cache needs the keys of each sequence gathered, which are of different length, as are the new
tokens. Sequences of similar size form a *group*: padded to the group's largest, and attended to with one gather and one
attention call per layer. Grouping trades wasted arithmetic for fewer operator calls, which dominate for small models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.engines.torch.blocks import BlockTables, IntArray


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are attended to by one call per layer; their tokens are neighbours on the packed axis.

    Attributes:
        start: first packed token.
        stop: one past the last packed token.
        num_sequences: n.
        num_queries: most new tokens of one sequence, t.
        length: most tokens of one sequence, new ones included, K.
        block_ids: [n * blocks] int64, as many for each sequence as K tokens need.
        mask: [n, 1, t, K] in the cache's dtype, added to the scores; None if every query may see every key.
        pad: [n * t] int64, packed token of each query; None if all sequences have t new tokens.
        unpad: [stop - start] int64, place of each packed token among the n * t queries; None as above.
    """

    start: int
    stop: int
    num_sequences: int
    num_queries: int
    length: int
    block_ids: Tensor
    mask: Tensor | None
    pad: Tensor | None
    unpad: Tensor | None


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step's inputs, T tokens in all.

    Attributes:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64.
        slots: [T] int64, where each token's keys and values go.
        groups: partition of the packed tokens, in order.
        emit: [E] int64, packed token of each emitting position, in the order of the rows; None for all T in order.
        owners: [T], row (of the block tables) that each packed token belongs to; stays on the host.
    """

    input_ids: Tensor
    position_ids: Tensor
    slots: Tensor
    groups: tuple[Group, ...]
    emit: Tensor | None
    owners: IntArray


@dataclass(frozen=True, slots=True)
class Costs:
    """What decides whether two groups become one, in multiply-adds per layer.

    Attributes:
        per_score: for one query and key over all heads.
        per_key: for gathering one token's keys and values.
        per_group: what the operator calls of one more group cost, in multiply-adds that could be done meanwhile.
    """

    per_score: int
    per_key: int
    per_group: int

    def of(self, num_sequences: int, num_queries: int, length: int) -> int:
        """Cost of a padded group, without its calls."""
        return num_sequences * length * (num_queries * self.per_score + self.per_key)


class Packer:
    """Builds `PackedStep`s for one engine."""

    def __init__(self, tables: BlockTables, costs: Costs, *, dtype: torch.dtype, device: torch.device) -> None:
        self._tables = tables
        self._costs = costs
        self._dtype = dtype
        self._device = device

    def pack(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], emit: Sequence[int]) -> PackedStep:
        """Packs new tokens of the sequences at `rows` of the block tables, which keep their old lengths.

        Args:
            rows: [n], each at most once.
            tokens: new token ids of each, at least one.
            emit: how many trailing positions of each are wanted.
        """
        counts = np.array([len(new) for new in tokens], dtype=np.int64)
        table_rows = np.array(rows, dtype=np.int64)
        starts = self._tables.lengths[table_rows]
        parts = plan_groups(counts.tolist(), (starts + counts).tolist(), self._costs)
        order: list[int] | None = None
        if len(parts) > 1:
            order = list(chain.from_iterable(parts))
            index = np.array(order, dtype=np.int64)
            counts, table_rows, starts = counts[index], table_rows[index], starts[index]
            tokens = [tokens[i] for i in order]
        stops = counts.cumsum()
        num_tokens = int(stops[-1])
        owners, positions = table_rows, starts
        if num_tokens > len(rows):
            owners = table_rows.repeat(counts)
            positions = np.arange(num_tokens) + (starts - stops + counts).repeat(counts)
        # One array, so one copy to a device.
        packed = np.empty((3, num_tokens), dtype=np.int64)
        packed[0] = list(chain.from_iterable(tokens))
        packed[1] = positions
        packed[2] = self._tables.slots(owners, positions)
        on_device = self._tensor(packed)
        return PackedStep(
            input_ids=on_device[0:1],
            position_ids=on_device[1:2],
            slots=on_device[2],
            groups=self._groups([len(part) for part in parts], table_rows, starts, counts, stops),
            emit=self._emit(order, emit, stops),
            owners=owners,
        )

    def _groups(
        self, sizes: list[int], rows: IntArray, starts: IntArray, counts: IntArray, stops: IntArray
    ) -> tuple[Group, ...]:
        groups, first = [], 0
        for size in sizes:
            part = slice(first, first + size)
            groups.append(self._group(rows[part], starts[part], counts[part], stops[part]))
            first += size
        return tuple(groups)

    def _group(self, rows: IntArray, starts: IntArray, counts: IntArray, stops: IntArray) -> Group:
        """One group from its sequences' table rows, old lengths, new token counts and packed ends, all [n]."""
        ends = starts + counts
        queries, length = int(counts.max()), int(ends.max())
        begin, stop = int(stops[0] - counts[0]), int(stops[-1])
        even = stop - begin == queries * len(rows)
        blocks = self._tables.padded(rows, -(-length // self._tables.block_tokens))
        pad, unpad = (None, None) if even else _padding(stops - counts, counts, queries)
        return Group(
            start=begin,
            stop=stop,
            num_sequences=len(rows),
            num_queries=queries,
            length=length,
            block_ids=self._tensor(blocks.reshape(-1)),
            mask=None if queries == 1 and int(ends.min()) == length else self._mask(starts, queries, length),
            pad=None if pad is None else self._tensor(pad),
            unpad=None if unpad is None else self._tensor(unpad),
        )

    def _mask(self, starts: IntArray, num_queries: int, length: int) -> Tensor:
        """Causal mask: query j of a sequence sits at position start + j and sees the keys up to there."""
        position = starts[:, None] + np.arange(num_queries)
        hidden = np.arange(length) > position[:, None, :, None]
        # The attention operators would turn a boolean mask into this once per layer.
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        return torch.from_numpy(mask).to(device=self._device, dtype=self._dtype)

    def _emit(self, order: list[int] | None, emit: Sequence[int], stops: IntArray) -> Tensor | None:
        ends = stops
        if order is not None:
            ends = np.empty_like(stops)
            ends[order] = stops
        elif sum(emit) == stops[-1]:
            return None
        counts = np.array(emit, dtype=np.int64)
        if counts.max() <= 1:
            return self._tensor(ends[counts > 0] - 1)
        behind = counts.cumsum()
        return self._tensor(np.arange(behind[-1]) + (ends - behind).repeat(counts))

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def plan_groups(counts: Sequence[int], ends: Sequence[int], costs: Costs) -> list[list[int]]:
    """Partitions sequences into groups, cheapest first by new tokens, then by length.

    Args:
        counts: new tokens of each sequence.
        ends: tokens of each sequence after the step.
        costs: what padding and calls cost.

    Returns:
        Indices of the sequences of each group.
    """
    everything = costs.of(len(counts), max(counts), max(ends))
    alone = sum(end * (count * costs.per_score + costs.per_key) for count, end in zip(counts, ends, strict=True))
    if everything - alone <= costs.per_group:
        return [list(range(len(counts)))]
    order = sorted(range(len(counts)), key=lambda i: (counts[i], ends[i]))
    groups: list[list[int]] = [[order[0]]]
    queries, length = counts[order[0]], ends[order[0]]
    for i in order[1:]:
        size = len(groups[-1])
        apart = costs.of(size, queries, length) + costs.of(1, counts[i], ends[i]) + costs.per_group
        widest, longest = max(queries, counts[i]), max(length, ends[i])
        if costs.of(size + 1, widest, longest) <= apart:
            groups[-1].append(i)
            queries, length = widest, longest
        else:
            groups.append([i])
            queries, length = counts[i], ends[i]
    return groups


def _padding(begins: IntArray, counts: IntArray, num_queries: int) -> tuple[IntArray, IntArray]:
    """Index of each padded query among the packed tokens, and back. Padding repeats a sequence's last token."""
    column = np.arange(num_queries)
    pad: IntArray = (begins[:, None] + np.minimum(column, counts[:, None] - 1)).reshape(-1)
    unpad: IntArray = np.flatnonzero((column < counts[:, None]).reshape(-1))
    return pad, unpad
