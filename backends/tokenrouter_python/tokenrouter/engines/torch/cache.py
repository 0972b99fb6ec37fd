"""Paged key and value storage of all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Geometry of a cache.

    Attributes:
        layers: attention layers of the model.
        kv_heads: key heads, and as many value heads, per layer.
        head_dim: elements per head.
        num_blocks: blocks that can be leased; one more, the null block, is stored in front of them.
        block_tokens: tokens per block.
    """

    layers: int
    kv_heads: int
    head_dim: int
    num_blocks: int
    block_tokens: int

    @property
    def elements_per_token(self) -> int:
        """Stored elements for one token over all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim


class PagedCache:
    """One tensor for all layers. Keys and values of a token lie side by side, so one gather fetches both.

    Slot `block * block_tokens + offset` of a layer holds [2 * kv_heads, head_dim]: key heads, then value heads.
    """

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        blocks, heads = shape.num_blocks + 1, 2 * shape.kv_heads
        # Zeros, not garbage: masked positions weigh 0, and 0 times a stray NaN would still be NaN.
        storage = torch.zeros(
            (shape.layers, blocks * shape.block_tokens, heads, shape.head_dim), dtype=dtype, device=device
        )
        self._slots = list(storage.unbind(0))
        # A block is a row, so a gather copies few long runs instead of many short ones.
        self._blocks = [layer.view(blocks, -1) for layer in self._slots]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores the keys and values of T tokens.

        Args:
            layer: layer index.
            slots: [T] int64.
            keys: [T, kv_heads, head_dim].
            values: [T, kv_heads, head_dim].
        """
        self._slots[layer].index_copy_(0, slots, torch.cat((keys, values), dim=1))

    def gather(self, layer: int, block_ids: Tensor, num_sequences: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies out the first `length` tokens of each sequence.

        Args:
            layer: layer index.
            block_ids: [num_sequences * blocks_each] int64.
            num_sequences: sequences whose block ids follow one another.
            length: tokens wanted of each; at most blocks_each * block_tokens.

        Returns:
            Keys and values, each a [num_sequences, kv_heads, length, head_dim] view of one copy.
        """
        heads = self.shape.kv_heads
        rows = self._blocks[layer].index_select(0, block_ids)
        both = rows.view(num_sequences, -1, 2 * heads, self.shape.head_dim)[:, :length].transpose(1, 2)
        return both[:, :heads], both[:, heads:]

    @torch.inference_mode()
    def zero(self, slots: Tensor) -> None:
        """Overwrites slots, [n] int64, with zeros in every layer."""
        for layer in self._slots:
            layer.index_fill_(0, slots, 0)
