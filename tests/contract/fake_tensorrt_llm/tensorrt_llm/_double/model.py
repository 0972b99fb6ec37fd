"""Forward passes: tokenrouter's torch engine underneath, TensorRT-LLM's model interface above it.

The logits are those of `tokenrouter.engines.torch` for the same tokens and the same split into forward passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from tensorrt_llm import _behaviour
from tensorrt_llm._double.kv import BlockTree, Lease
from tokenrouter.engines.torch.config import KvCacheConfig as TorchKvCacheConfig
from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.engine import SequenceHandle, TorchEngine

DEFAULT_SEQUENCES = 16
"""Full-length sequences that the KV pool holds if the arguments set no size."""


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

        folder = Path(args.model)
        cache = args.kv_cache_config
        limit = args.max_seq_len or AutoConfig.from_pretrained(folder, local_files_only=True).max_position_embeddings
        size = cache.tokens_per_block
        tokens = cache.max_tokens or DEFAULT_SEQUENCES * -(-limit // size) * size
        config = TorchEngineConfig(
            dtype=args.dtype,
            max_seq_len=args.max_seq_len,
            max_batch_size=args.max_batch_size,
            max_num_tokens=max(args.max_num_tokens, args.max_batch_size),
            kv_cache_config=TorchKvCacheConfig(tokens_per_block=size, max_tokens=tokens),
        )
        self = cls.from_folder(folder, config)
        lease = self._pool.reserve(self._pool.total)
        assert lease is not None
        self.tree = BlockTree(lease.block_ids, size, self._copy_block, cache)
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
    def run(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """One forward pass. Returns "logits" [n, V] and whatever else the model class returns, in the order of rows."""
        order = sorted(range(len(rows)), key=lambda i: not rows[i].context)
        ordered = [rows[i] for i in order]
        self._packed = packed = self._packer.pack(
            [row.handle.row for row in ordered], [row.tokens for row in ordered], [True] * len(rows)
        )
        starts = np.flatnonzero(np.diff(packed.owners, prepend=-1))
        by_table_row = {row.handle.row: i for i, row in enumerate(rows)}
        places = [by_table_row[owner] for owner in packed.owners[starts].tolist()]
        lengths = np.diff(starts, append=len(packed.owners))
        outputs = self._call(packed, [rows[i] for i in places], lengths.tolist())
        for row in rows:
            self._tables.lengths[row.handle.row] += len(row.tokens)
        back = torch.empty(len(places), dtype=torch.long)
        back[torch.tensor(places)] = torch.arange(len(places))
        last = torch.from_numpy(lengths).cumsum(0) - 1
        return {
            name: (tensor if len(tensor) == len(rows) else tensor[last.to(tensor.device)])[back.to(tensor.device)]
            for name, tensor in outputs.items()
        }

    def _call(self, packed: Any, rows: list[Row], lengths: list[int]) -> dict[str, Tensor]:
        from tensorrt_llm._torch.attention_backend import AttentionMetadata

        metadata = AttentionMetadata(
            lengths, [row.request_id for row in rows], sum(row.context for row in rows), packed.input_ids.device
        )
        given = {
            "attn_metadata": metadata,
            "input_ids": packed.input_ids[0],
            "position_ids": packed.position_ids,
            "inputs_embeds": None,
            "return_context_logits": False,
        }
        outputs = self.causal_lm.forward(**given)
        outputs = outputs if isinstance(outputs, dict) else {"logits": outputs}
        logits = outputs["logits"]
        if logits.shape != (len(rows), self.info.vocab_size) or logits.dtype != torch.float32:
            raise RuntimeError(
                f"forward of {type(self.causal_lm).__name__} gave logits {tuple(logits.shape)} {logits.dtype}; "
                f"wanted ({len(rows)}, {self.info.vocab_size}) in float32"
            )
        return outputs

    def _copy_block(self, source: int, target: int, tokens: int) -> None:
        size = self.info.block_tokens
        for layer in self._cache._slots:
            layer[target * size : target * size + tokens] = layer[source * size : source * size + tokens]


def check_processor(processor: Any) -> None:
    """Refuses a processor that takes neither four nor five positional arguments."""
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variable = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not variable and len(positional) not in (4, 5) and _behaviour.true("five_arguments"):
        raise ValueError(f"a logits processor takes 4 or 5 positional arguments, not {len(positional)}")
