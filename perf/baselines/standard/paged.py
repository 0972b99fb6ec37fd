"""The same engines as ours, opened on blocks that a prefix cache chooses instead of blocks of their own.

An engine of ours leases blocks to one sequence. Here all of them belong to the prefix cache, and a sequence is opened
for one call, on blocks of which the first may be filled already. Forward passes are the engines' own, unchanged.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from perf.baselines.standard.wire import TOKEN_BYTES
from tokenrouter.engines.emulated.engine import EmulatedEngine, _Sequence
from tokenrouter.engines.torch.blocks import BlockLease
from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.engine import SequenceHandle, TorchEngine
from tokenrouter.errors import ConfigError

_PROMPTS = 256


def load_paged(name: str, checkpoint: Path, options: dict[str, Any], *, sharing: int) -> PagedEngine:
    """Like `tokenrouter.engines.load_engine`.

    Raises:
        ConfigError: unknown engine, or whatever the engine refuses.
    """
    if name == "torch":
        return PagedTorch.load(checkpoint, options, sharing=sharing)
    if name == "emulated":
        return PagedEmulated.load(checkpoint, options)
    raise ConfigError(f"the standard-serving baseline has no engine {name!r}; it has: torch, emulated")


class _Borrowed(BlockLease):
    """Blocks that are not given back to the engine."""

    __slots__ = ()

    def release(self) -> None:
        """Only forgets them."""
        self.block_ids = ()


class PagedTorch:
    """The torch engine on shared blocks, which are 1 to `info.kv_blocks`."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.info = engine.info
        self.step = engine.step
        self.extras = engine.extras
        if engine._pool.reserve(engine.info.kv_blocks) is None:
            raise ConfigError("the engine's KV blocks are in use already")

    @classmethod
    def load(cls, checkpoint: Path, options: dict[str, Any], *, sharing: int) -> PagedTorch:
        return cls(TorchEngine.from_folder(checkpoint, TorchEngineConfig.from_mapping(options), sharing=sharing))

    def open_on(self, blocks: Sequence[int], ids: bytes, *, cached: int, prompt_tokens: int) -> SequenceHandle:
        """Opens a sequence.

        Args:
            blocks: enough for all ids; not given back by `close`.
            ids: token ids, INT32 bytes.
            cached: tokens whose KV is in the blocks already.
            prompt_tokens: how many of the ids are the prompt.
        """
        tables = self._engine._tables
        row = tables.add(blocks)
        tables.lengths[row] = cached
        return SequenceHandle(len(ids) // TOKEN_BYTES, row, _Borrowed(self._engine._pool, tuple(blocks)))

    def close(self, handle: SequenceHandle) -> bool:
        """Forgets the sequence; whether its KV is good for others."""
        self._engine.close(handle)
        return not handle.poisoned


class PagedEmulated(EmulatedEngine):
    """The emulated engine on shared blocks. Emulated KV is the token ids, so cached tokens come with the call."""

    _keys: OrderedDict[bytes, int]

    @classmethod
    def load(cls, checkpoint: Path, options: dict[str, Any]) -> PagedEmulated:
        engine = cls.from_folder(checkpoint, options)
        assert isinstance(engine, PagedEmulated)
        engine._keys = OrderedDict()
        return engine

    def open_on(self, blocks: Sequence[int], ids: bytes, *, cached: int, prompt_tokens: int) -> int:
        sequence = _Sequence(prompt_tokens, 0)
        sequence.tokens = array("i", ids[: cached * TOKEN_BYTES])  # type: ignore[assignment]
        sequence.key = self._prompt_key(sequence, ids[: prompt_tokens * TOKEN_BYTES])
        self._next_handle += 1
        self._open[self._next_handle] = sequence
        return self._next_handle

    def close(self, handle: int) -> bool:  # type: ignore[override]
        super().close(handle)
        return True

    def _prompt_key(self, sequence: _Sequence, prompt: bytes) -> int | None:
        """The hash that the engine makes of a prompt; remembered, for a real engine would make none in each call."""
        if self._config.signals is None:
            return None
        key = self._keys.pop(prompt, None)
        if key is None:
            key = _Sequence(len(prompt) // TOKEN_BYTES, 0, array("i", prompt).tolist()).prompt_key()
            if len(self._keys) >= _PROMPTS:
                self._keys.popitem(last=False)
        self._keys[prompt] = key
        return key


PagedEngine: TypeAlias = PagedTorch | PagedEmulated
"""Like `engines.base.Engine`, with another way to open sequences."""
