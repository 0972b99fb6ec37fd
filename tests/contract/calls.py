"""Calls of the double with the demo's small model, for the contract tests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from tests.contract.double import use_double

use_double()

from tensorrt_llm import LLM, SamplingParams  # noqa: E402
from tensorrt_llm.llmapi import KvCacheConfig  # noqa: E402

SMALL = Path(__file__).parents[2] / "model_repository" / "small" / "1"
END, STOP = 261, 258  # ids that the model never chooses by itself
VOCABULARY = 262
PROMPT = [16, 28, 17, 2, 18]
BLOCK = 16

tags = (f"tag {i}" for i in itertools.count())


def build(**changes: Any) -> LLM:
    """An LLM with a small cache that keeps statistics."""
    cache = {"tokens_per_block": BLOCK, "max_tokens": 2048, **changes.pop("cache", {})}
    defaults = {"skip_tokenizer_init": True, "disable_overlap_scheduler": True, "enable_iter_perf_stats": True}
    limits = {"max_num_tokens": 256, "max_batch_size": 8}
    return LLM(**{"model": SMALL, **defaults, **limits, "kv_cache_config": KvCacheConfig(**cache), **changes})


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """A coroutine with an event loop, bounded in time."""

    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, 30)

    return asyncio.run(bounded())


def submit(llm: LLM, prompt: Sequence[int] = PROMPT, salt: str | None = None, **changes: Any) -> Any:
    call = {name: changes.pop(name) for name in ("streaming", "kv_cache_retention_config") if name in changes}
    params = SamplingParams(**{"end_id": END, "max_tokens": 8, "detokenize": False, **changes})
    return llm.generate_async(list(prompt), sampling_params=params, cache_salt=salt, **call)


def finish(llm: LLM, prompt: Sequence[int] = PROMPT, salt: str | None = None, **changes: Any) -> Any:
    return submit(llm, prompt, salt, **changes).result(timeout=30)


def iterations(llm: LLM) -> list[tuple[int, int, int]]:
    """Context requests, decoding requests and prompt tokens of each iteration since the last call."""
    keys = ("numContextRequests", "numGenRequests", "numCtxTokens")
    return [tuple(stats["inflightBatchingStats"][key] for key in keys) for stats in llm.get_stats()]
