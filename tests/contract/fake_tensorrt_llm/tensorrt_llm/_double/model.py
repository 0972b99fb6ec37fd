"""Forward passes: tokenrouter's torch engine underneath, TensorRT-LLM's model interface above it.

The logits are those of `tokenrouter.engines.torch` for the same tokens and the same split into forward passes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorrt_llm import _behaviour
from tensorrt_llm._double.kv import BlockTree, Lease
from tokenrouter.engines.torch.config import KvCacheConfig as TorchKvCacheConfig
from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.engine import SequenceHandle, TorchEngine

POOL = "FAKE_TENSORRT_LLM_POOL"
"""Environment variable: blocks for which the share of the memory suffices."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a forward pass."""

    handle: SequenceHandle
    tokens: Sequence[int]
    context: bool
    request_id: int


class PagedModel(TorchEngine):
    """A torch engine whose blocks are managed by a `BlockTree` and whose model is called as TensorRT-LLM calls it."""

    tree: BlockTree
    causal_lm: Any

    @classmethod
    def load(cls, args: Any) -> PagedModel:
        """Loads the checkpoint folder `args.model`."""
        from tensorrt_llm._torch.models import modeling_utils

        cache = args.kv_cache_config
        if cache.max_tokens is None:
            raise NotImplementedError("the double has no memory to take a share of: set kv_cache_config.max_tokens")
        size = cache.tokens_per_block
        blocks = cache.max_tokens // size
        if _behaviour.true("pool_capped"):
            blocks = min(blocks, int(os.environ.get(POOL, blocks)))
        config = TorchEngineConfig(
            dtype=args.dtype,
            max_seq_len=args.max_seq_len,
            max_batch_size=args.max_batch_size,
            max_num_tokens=max(args.max_num_tokens, args.max_batch_size),
            kv_cache_config=TorchKvCacheConfig(tokens_per_block=size, max_tokens=blocks * size),
        )
        self = cls.from_folder(Path(args.model), config)
        lease = self._pool.reserve(blocks)
        assert lease is not None
        self.tree = BlockTree(lease.block_ids, size, self._copy_block, cache)
        padded = args.cuda_graph_config is not None and args.cuda_graph_config.enable_padding
        if padded and _behaviour.true("padding_takes_a_block"):
            self.tree.take(1)
        self.causal_lm = modeling_utils.build(self, self._model.config)
        return self

    def begin(self, lease: Lease, capacity: int) -> SequenceHandle:
        """Starts a sequence on blocks whose first `lease.cached` tokens are computed."""
        handle = SequenceHandle(capacity, self._tables.add(lease.blocks), lease)  # type: ignore[arg-type]
        self._tables.lengths[handle.row] = lease.cached
        return handle

    def end(self, handle: SequenceHandle) -> None:
        """Ends a sequence; its blocks stay."""
        self._tables.remove(handle.row)
        handle.row = -1

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """[T, H] of the tokens packed last, after the final norm."""
        assert input_ids.shape == self._packed.input_ids[0].shape
        hidden: Tensor = self._forward(self._packed)
        return hidden

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> Tensor:
        """One forward pass; logits [n, V] float32 of last positions, in the order of rows."""
        ordered = sorted(rows, key=lambda row: not row.context)
        self._packed = packed = self._packer.pack(
            [row.handle.row for row in ordered], [row.tokens for row in ordered], [True] * len(rows)
        )
        starts = np.flatnonzero(np.diff(packed.owners, prepend=-1))
        by_table_row = {row.handle.row: i for i, row in enumerate(rows)}
        places = [by_table_row[owner] for owner in packed.owners[starts].tolist()]
        lengths = np.diff(starts, append=len(packed.owners))
        logits = self._call([rows[i] for i in places], lengths.tolist())
        for row in rows:
            self._tables.lengths[row.handle.row] += len(row.tokens)
        back = torch.empty(len(places), dtype=torch.long)
        back[torch.tensor(places)] = torch.arange(len(places))
        return logits[back.to(logits.device)]

    def _call(self, rows: list[Row], lengths: list[int]) -> Tensor:
        from tensorrt_llm._torch.attention_backend import AttentionMetadata

        packed, contexts = self._packed, sum(row.context for row in rows)
        metadata = AttentionMetadata(lengths, [row.request_id for row in rows], contexts, packed.input_ids.device)
        logits: Tensor = self.causal_lm.forward(
            attn_metadata=metadata,
            input_ids=packed.input_ids[0],
            position_ids=packed.position_ids,
            inputs_embeds=None,
            return_context_logits=False,
        )
        if logits.shape != (len(rows), self.info.vocab_size) or logits.dtype != torch.float32:
            raise RuntimeError(
                f"forward of {type(self.causal_lm).__name__} gave logits {tuple(logits.shape)} {logits.dtype}; "
                f"wanted ({len(rows)}, {self.info.vocab_size}) in float32"
            )
        return logits

    def _copy_block(self, source: int, target: int, tokens: int) -> None:
        size = self.info.block_tokens
        for layer in self._cache._slots:
            layer[target * size : target * size + tokens] = layer[source * size : source * size + tokens]
