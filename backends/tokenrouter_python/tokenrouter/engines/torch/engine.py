"""The torch engine: any decoder-only Hugging Face causal LM in a local folder, over a paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from tokenrouter.engines.base import EngineInfo, EngineRow, PolicyExtras, StepResult, blocks_needed, nothing
from tokenrouter.engines.torch import attention, fusion, loading
from tokenrouter.engines.torch.attention import AttentionState
from tokenrouter.engines.torch.batch import Costs, PackedStep, Packer
from tokenrouter.engines.torch.blocks import BlockLease, BlockPool, BlockTables
from tokenrouter.engines.torch.cache import CacheShape, PagedCache
from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.threads import default_threads
from tokenrouter.errors import ConfigError, EngineFailed

if TYPE_CHECKING:
    from tokenrouter.engines.base import Engine

# Multiply-adds that a CPU core, or a GPU, does in the time that the operator calls of one more group take.
CPU_GROUP_COST = 200_000
CUDA_GROUP_COST = 200_000_000

# Below this size matrix products take microseconds. Waking a second thread costs as much, and where other processes
# want the cores as well, waiting for it at every operator makes a step many times slower.
SINGLE_THREAD_PARAMETERS = 30_000_000


class SequenceHandle:
    """An open sequence. Opaque to callers; `kv_tokens` and the lease never change while it is open.

    Attributes:
        kv_tokens: most tokens it may hold.
        row: its row of the block tables; -1 once closed.
        lease: its blocks.
        poisoned: whether a value that is not finite may be among its keys and values.
    """

    __slots__ = ("kv_tokens", "lease", "poisoned", "row")

    def __init__(self, kv_tokens: int, row: int, lease: BlockLease) -> None:
        self.kv_tokens = kv_tokens
        self.row = row
        self.lease = lease
        self.poisoned = False


class TorchEngine:
    """Implements `tokenrouter.engines.base.Engine`. Not thread-safe.

    Construction sets the number of CPU threads that torch uses in this process (`config.threads`), for every engine in
    it. The network is never used.

    The tokens of a sequence do not depend on what shares its steps: attention reads only its own blocks. The last bits
    of its logits can: matrix products of another height add up in another order. In float32 this moves logits by about
    1e-6 of their size, so a greedy choice differs only where two logits are that close. For the same reason a suffix
    extended over a cache equals a fresh prefill to within rounding and not to the bit, as in every batching engine.
    """

    def __init__(self, model: nn.Module, config: TorchEngineConfig, device: torch.device) -> None:
        """Takes a model that `loading.load_model` returned."""
        facts = loading.read_facts(model)
        self._model, self._decoder, self._head = model, *loading.split(model)
        dtype: torch.dtype = facts.dtype
        per_block = config.kv_cache_config.tokens_per_block
        max_context = config.resolve_seq_len(facts.max_position_embeddings)
        one_token = CacheShape(facts.layers, facts.kv_heads, facts.head_dim, 1, per_block).elements_per_token
        blocks = config.resolve_kv_blocks(
            seq_len=max_context, bytes_per_token=one_token * dtype.itemsize, device=device
        )
        self._info = EngineInfo(
            name="torch",
            vocab_size=facts.vocab_size,
            hidden_size=facts.hidden_size,
            max_context=max_context,
            block_tokens=per_block,
            kv_blocks=blocks,
            max_batch=config.max_batch_size,
            max_num_tokens=config.resolve_num_tokens(device),
            computes_here=device.type == "cpu",
        )
        self._pool = BlockPool(blocks)
        self._tables = BlockTables(block_tokens=per_block, max_blocks=blocks_needed(max_context, per_block))
        shape = CacheShape(facts.layers, facts.kv_heads, facts.head_dim, blocks, per_block)
        with torch.inference_mode():
            self._cache = PagedCache(shape, dtype=dtype, device=device)
        costs = Costs(
            per_score=2 * facts.heads * facts.head_dim,
            per_key=2 * facts.kv_heads * facts.head_dim,
            per_group=CUDA_GROUP_COST if device.type == "cuda" else CPU_GROUP_COST,
        )
        self._packer = Packer(self._tables, costs, dtype=dtype, device=device)
        # Four dimensions mean "prepared" to transformers: it passes the mask on, and searches no packed sequences.
        self._ready_mask = torch.zeros((1, 1, 1, 1), dtype=dtype, device=device)
        self._attention = AttentionState(self._cache, max_context)
        attention.attach(model, self._attention)

    @classmethod
    def from_folder(cls, path: str | Path, config: TorchEngineConfig | None = None, *, sharing: int = 1) -> TorchEngine:
        """Loads a model and checks, with some tokens, that this engine computes what the model computes by itself.

        Args:
            path: folder with config.json and the weights, in Hugging Face format.
            config: settings; the defaults suit a small model on a CPU.
            sharing: engine processes that share this host's cores, this one included.

        Raises:
            ConfigError: the folder, the settings or the architecture cannot be served; the message says what to change.
        """
        config = config or TorchEngineConfig()
        device = config.resolve_device()
        torch.set_num_threads(config.threads or 1)
        facts = loading.read_config(Path(path))
        max_context = config.resolve_seq_len(loading.position_limit(facts))
        loading.refuse_unsupported(facts, max_context)
        model = loading.load_model(Path(path), facts, dtype=config.resolve_dtype(device), device=device)
        if config.threads is None and model.num_parameters() > SINGLE_THREAD_PARAMETERS:
            torch.set_num_threads(default_threads(sharing))
        probe = loading.probe(model, max_context)
        fusion.fuse_norms(model)
        try:
            engine = cls(model, config, device)
        except torch.OutOfMemoryError as exc:
            raise ConfigError(f"the KV cache does not fit on {device}; lower kv_cache_config.max_tokens") from exc
        engine._check(probe)
        return engine

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine; constant after construction."""
        return self._info

    @property
    def blocks_leased(self) -> int:
        """KV blocks leased to open sequences (reserved for their worst case)."""
        return self._pool.leased_count

    @property
    def blocks_used(self) -> int:
        """KV blocks that hold at least one token."""
        return self._tables.blocks_used

    def open(self, *, kv_tokens: int, prompt_tokens: int = 0) -> SequenceHandle:
        """Leases KV for a sequence of at most `kv_tokens` tokens and returns its handle.

        Raises:
            EngineFailed: the pool has not enough free blocks, or kv_tokens exceeds max_context.
        """
        if not 1 <= kv_tokens <= self._info.max_context:
            raise EngineFailed(f"a sequence of {kv_tokens} tokens; this model takes 1 to {self._info.max_context}")
        needed = blocks_needed(kv_tokens, self._info.block_tokens)
        lease = self._pool.reserve(needed)
        if lease is None:
            raise EngineFailed(
                f"a sequence of {kv_tokens} tokens needs {needed} KV blocks; "
                f"{self._pool.free_count} of {self._pool.total} are free (kv_cache_config.max_tokens sets the total)"
            )
        return SequenceHandle(kv_tokens, self._tables.add(lease.block_ids), lease)

    @torch.inference_mode()
    def step(self, rows: Sequence[EngineRow], meanwhile: Callable[[], None] = nothing) -> StepResult:
        """Runs one forward pass over extends and decodes mixed in one batch and keeps their KV.

        At most `info.max_batch` rows and `info.max_num_tokens` new tokens. A handle occurs at most once. If it raises,
        no sequence has changed and the step can be tried again.

        Raises:
            EngineFailed: the rows break a rule above, or the forward pass failed.
        """
        self._validate(rows)
        meanwhile()  # first, because a pass takes this thread: it computes here, or launches
        handles: list[SequenceHandle] = [row.handle for row in rows]
        table_rows = [handle.row for handle in handles]
        packed = self._packer.pack(table_rows, [row.tokens for row in rows], [row.emit for row in rows])
        try:
            hidden = self._forward(packed)
            emitted = hidden if packed.emit is None else hidden.index_select(0, packed.emit)
            logits: Tensor = self._head(emitted)
        except (RuntimeError, IndexError) as exc:
            raise EngineFailed(f"forward pass over {len(packed.owners)} tokens failed: {exc}") from exc
        for row in rows:
            self._tables.lengths[row.handle.row] += len(row.tokens)
        self._note_poison(hidden, packed, handles)
        return StepResult(logits=logits.float(), hidden=emitted.float())

    def truncate(self, handle: SequenceHandle, length: int) -> None:
        """Forgets the KV of all tokens from position `length` on; the lease stays. No-op if shorter already."""
        if handle.row < 0 or length < 0:
            raise EngineFailed(f"cannot truncate to {length} tokens: the sequence is closed or the length is negative")
        self._tables.lengths[handle.row] = min(length, int(self._tables.lengths[handle.row]))
        if handle.poisoned:
            self._cleanse(handle, length)

    def close(self, handle: SequenceHandle) -> None:
        """Gives the lease back. Closing twice is harmless."""
        if handle.row < 0:
            return
        if handle.poisoned:
            self._cleanse(handle, 0)
        self._tables.remove(handle.row)
        handle.row = -1
        handle.lease.release()

    def extras(self, model: str) -> PolicyExtras:
        """The input embedding [V, H] of this model, and the device of logits and hidden states."""
        embedding: nn.Embedding = self._model.get_input_embeddings()  # type: ignore[operator]
        weight = embedding.weight.detach()

        def input_embedding(name: str) -> Tensor:
            if name != model:
                raise ConfigError(f"the input embedding of {name!r} is not in the process of {model!r}")
            return weight

        return {"input_embedding": input_embedding, "device": str(weight.device)}

    def shutdown(self) -> None:
        """Frees weights and cache; the engine is not used afterwards. Repeating it is harmless."""
        if not hasattr(self, "_model"):
            return
        attention.attach(self._model, None)
        del self._model, self._decoder, self._head, self._cache, self._attention, self._packer
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _forward(self, packed: PackedStep) -> Tensor:
        """Hidden states of all packed tokens after the final norm, [T, H]."""
        self._attention.step = packed
        output = self._decoder(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=self._ready_mask,
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _validate(self, rows: Sequence[EngineRow]) -> None:
        if not 1 <= len(rows) <= self._info.max_batch:
            raise EngineFailed(f"a step of {len(rows)} sequences; this engine takes 1 to {self._info.max_batch}")
        total = sum(len(row.tokens) for row in rows)
        if total > self._info.max_num_tokens:
            raise EngineFailed(f"a step of {total} tokens; this engine takes at most {self._info.max_num_tokens}")
        seen = {row.handle.row for row in rows}
        if len(seen) != len(rows) or -1 in seen:
            raise EngineFailed("a sequence occurs twice in one step, or is closed")
        for row in rows:
            self._validate_row(row)

    def _validate_row(self, row: EngineRow) -> None:
        if len(row.tokens) == 0:
            raise EngineFailed("a row without tokens; a forward pass needs at least one")
        if not 0 <= row.emit <= len(row.tokens):
            raise EngineFailed(f"logits at {row.emit} positions of a row of {len(row.tokens)} tokens")
        after = int(self._tables.lengths[row.handle.row]) + len(row.tokens)
        if after > row.handle.kv_tokens:
            raise EngineFailed(f"{after} tokens in a sequence that was opened for {row.handle.kv_tokens}")
        # A wrong id would be a device-side assertion on CUDA, which ends the process.
        if min(row.tokens) < 0 or max(row.tokens) >= self._info.vocab_size:
            raise EngineFailed(f"a token id outside 0 to {self._info.vocab_size - 1}")

    def _note_poison(self, hidden: Tensor, packed: PackedStep, handles: list[SequenceHandle]) -> None:
        """Marks sequences with values that are not finite. Keys and values come from states that show it in the end."""
        if math.isfinite(float(hidden.sum(dtype=torch.float32))):
            return
        bad_tokens = ~torch.isfinite(hidden).all(dim=1).cpu().numpy()
        bad_rows = set(np.unique(packed.owners[bad_tokens]).tolist())
        for handle in handles:
            handle.poisoned = handle.poisoned or handle.row in bad_rows

    def _cleanse(self, handle: SequenceHandle, start: int) -> None:
        """Zeroes the slots of a sequence from position `start` on.

        Masked positions weigh 0, but 0 times NaN is NaN: whoever writes there next must not find one.
        """
        positions = np.arange(start, len(handle.lease.block_ids) * self._info.block_tokens)
        slots = self._tables.slots(np.full_like(positions, handle.row), positions)
        self._cache.zero(torch.from_numpy(slots).to(self._ready_mask.device))

    def _check(self, probe: loading.Probe) -> None:
        """Compares with what the model computed by itself: in chunks and alone, then whole and beside a short sequence.

        Raises:
            ConfigError: the logits differ, so the architecture does something that this engine does not.
        """
        self._attention.checking = True
        room = min(self._info.max_context, self._info.kv_blocks * self._info.block_tokens)
        tokens = probe.tokens[:room]
        try:
            self._check_rows(probe, [list(loading.probe_spans(len(tokens), self._info.max_num_tokens))])
            last = len(tokens) - 1
            short = min(2, last - 1)
            spans = [[(0, last), (last, last + 1)], [(0, short), (short, short + 1)]]
            blocks = sum(blocks_needed(parts[-1][1], self._info.block_tokens) for parts in spans)
            fits = blocks <= self._info.kv_blocks and last + short <= self._info.max_num_tokens
            if short > 0 and fits and self._info.max_batch > 1:
                self._check_rows(probe, spans)
        except ConfigError:
            raise
        except Exception as exc:  # an architecture's own code, given what it does not expect
            raise ConfigError(
                f"the torch engine cannot serve this architecture ({exc}); serve it with the tensorrt_llm engine"
            ) from exc
        finally:
            self._attention.checking = False

    def _check_rows(self, probe: loading.Probe, spans: list[list[tuple[int, int]]]) -> None:
        """Runs sequences together, each a beginning of the probe; `spans` has what they get in each step."""
        handles = [self.open(kv_tokens=parts[-1][1]) for parts in spans]
        try:
            for parts in zip(*spans, strict=True):
                rows = [
                    EngineRow(handle, probe.tokens[start:stop])
                    for handle, (start, stop) in zip(handles, parts, strict=True)
                ]
                for logits, (_, stop) in zip(self.step(rows).logits, parts, strict=True):
                    loading.compare(probe, stop - 1, logits)
        finally:
            for handle in handles:
                self.close(handle)


if TYPE_CHECKING:
    _: type[Engine] = TorchEngine
