"""The first request to a loaded engine: how many KV blocks has it really, and do our processors run in its worker?

The pool is the smaller of `max_tokens` and what the memory allows, and nothing outside is told. Inside the worker the
KV manager is known to whoever runs the step, so a logits processor finds it in the frames of its callers and writes the
number, a byte a step: nothing comes out of the worker but token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from typing import TYPE_CHECKING, Any

from tokenrouter.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from tokenrouter.engines.tensorrt_llm.library import Library

log = logging.getLogger(__name__)
_BYTES = 4
_TIMEOUT_S = 300.0


class PoolProbe:
    """Writes the number of KV blocks; 0 if it cannot be found. A `tensorrt_llm.sampling_params.LogitsProcessor`."""

    def __init__(self) -> None:
        self._written: bytes | None = None

    def __call__(
        self,
        req_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """Leaves the next byte as the token; the prompt is one token long."""
        if self._written is None:
            self._written = b"\0" * _BYTES
            with contextlib.suppress(Exception):  # it would fail every request of the engine
                self._written = _blocks().to_bytes(_BYTES, "big")
        row = logits.view(-1)
        row.fill_(float("-inf"))
        row[self._written[(len(token_ids[0]) - 1) % _BYTES]] = 0.0


def _blocks() -> int:
    frame = inspect.currentframe()
    while frame is not None:
        managers = getattr(frame.f_locals.get("resource_manager"), "resource_managers", {})
        for manager in managers.values():
            if hasattr(manager, "get_kv_cache_stats"):
                return int(manager.get_kv_cache_stats().max_num_blocks)
        frame = frame.f_back
    return 0


async def pool_blocks(library: Library) -> int | None:
    """KV blocks that the engine has, or None if that cannot be found out.

    Raises:
        ConfigError: the engine cannot run a request with a processor of ours.
    """

    async def answered() -> list[int]:
        output = library.generate([0], max_tokens=_BYTES, end_id=None, stop_ids=(), processor=PoolProbe())
        async for _ in output:
            pass
        tokens: Any = output.outputs[0].token_ids
        return list(tokens)

    try:
        written = await asyncio.wait_for(answered(), _TIMEOUT_S)
        blocks = int.from_bytes(bytes(written), "big")
    except Exception as exc:
        raise ConfigError(f"TensorRT-LLM cannot run a first request: {type(exc).__name__}: {exc}") from exc
    return blocks or None
